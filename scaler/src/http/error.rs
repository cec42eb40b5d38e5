//! Errors as clients and agents see them: a status, a stable word, a sentence.

use axum::{
    Json,
    extract::rejection::{BytesRejection, JsonRejection, PathRejection, QueryRejection},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use pilotlight_runtime::Report;
use pilotlight_wire::ErrorBody;

use crate::{
    control::Stopped,
    fleet::Refusal,
    logs::{AppendError, LogError},
    store::StoreError,
};

/// An answer that is not a success.
#[derive(Debug)]
pub(super) struct ApiError {
    status: StatusCode,
    body: ErrorBody,
}

impl ApiError {
    fn new(status: StatusCode, code: &str, message: impl Into<String>) -> Self {
        Self { status, body: ErrorBody::new(code, message) }
    }

    pub(super) fn bad_input(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "bad_input", message)
    }

    pub(super) fn unauthorized(message: &str) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", message)
    }

    pub(super) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", message)
    }

    pub(super) fn method_not_allowed() -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "this path is not called with this method")
    }

    pub(super) fn unavailable(message: &str) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message)
    }

    pub(super) fn offset(size: u64) -> Self {
        let mut error = Self::new(StatusCode::CONFLICT, "offset", format!("the log has {size} bytes"));
        error.body.size = Some(size);
        error
    }

    pub(super) fn internal(error: &dyn std::error::Error) -> Self {
        let message = Report(error).to_string();
        tracing::error!(error = message, "request failed");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(self.body)).into_response()
    }
}

impl From<Stopped> for ApiError {
    fn from(stopped: Stopped) -> Self {
        Self::unavailable(&stopped.to_string())
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        Self::internal(&error)
    }
}

impl From<std::fmt::Error> for ApiError {
    fn from(error: std::fmt::Error) -> Self {
        Self::internal(&error)
    }
}

impl From<LogError> for ApiError {
    fn from(error: LogError) -> Self {
        match error {
            LogError::Unknown(job) => Self::not_found(format!("the log of job {job} was deleted after keep_logs")),
            other @ LogError::Io { .. } => Self::internal(&other),
        }
    }
}

impl From<AppendError> for ApiError {
    fn from(error: AppendError) -> Self {
        match error {
            AppendError::Offset { size } | AppendError::Closed { size } => Self::offset(size),
            AppendError::Log(error) => error.into(),
        }
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let message = refusal.to_string();
        match refusal {
            Refusal::InstanceGone => Self::new(StatusCode::GONE, ErrorBody::INSTANCE_GONE, message),
            Refusal::UnknownInstance | Refusal::UnknownAssignment | Refusal::UnknownJob | Refusal::UnknownPool => {
                Self::not_found(message)
            }
            Refusal::OtherNonce => Self::new(StatusCode::CONFLICT, "other_nonce", message),
            Refusal::Leaving => Self::new(StatusCode::CONFLICT, "leaving", message),
            Refusal::HoldTooLong => Self::bad_input(message),
            Refusal::OtherBody => Self::new(StatusCode::CONFLICT, "other_body", message),
            Refusal::EventGap { expected } => {
                let mut error = Self::new(StatusCode::CONFLICT, "gap", message);
                error.body.expected = Some(expected);
                error
            }
            Refusal::UnknownLabel { .. } => Self::new(StatusCode::UNPROCESSABLE_ENTITY, "unknown_label", message),
            Refusal::TooLarge { .. } => Self::new(StatusCode::UNPROCESSABLE_ENTITY, "too_large", message),
        }
    }
}

impl From<JsonRejection> for ApiError {
    fn from(rejection: JsonRejection) -> Self {
        Self::new(status(rejection.status()), "bad_input", rejection.body_text())
    }
}

impl From<BytesRejection> for ApiError {
    fn from(rejection: BytesRejection) -> Self {
        Self::new(rejection.status(), "bad_input", rejection.body_text())
    }
}

impl From<PathRejection> for ApiError {
    fn from(rejection: PathRejection) -> Self {
        Self::new(rejection.status(), "bad_input", rejection.body_text())
    }
}

impl From<QueryRejection> for ApiError {
    fn from(rejection: QueryRejection) -> Self {
        Self::new(rejection.status(), "bad_input", rejection.body_text())
    }
}

/// One status for every kind of malformed body; too large stays what it is.
fn status(status: StatusCode) -> StatusCode {
    if status == StatusCode::PAYLOAD_TOO_LARGE { status } else { StatusCode::UNPROCESSABLE_ENTITY }
}
