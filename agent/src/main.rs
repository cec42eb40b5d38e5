//! The agent's binary.

fn main() -> std::process::ExitCode {
    pilotlight_agent::cli::main(std::env::args_os())
}
