//! What the measurement `agents` is made of: a real scaler, the machines it makes, and the agents played on them.

pub mod agent;
pub mod machine;
pub mod numbers;
pub mod scaler;
