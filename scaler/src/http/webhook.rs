//! Webhooks of forges. They say only that something happened: what did is read from the forge, because an event is sent
//! once, may be lost, and may come late (spec gitea 4).

use aws_lc_rs::hmac;
use axum::{
    extract::{Path, State, rejection::PathRejection},
    http::{HeaderMap, StatusCode},
};
use bytes::Bytes;
use pilotlight_wire::ForgeName;

use super::{ApiError, App};

/// `POST /webhooks/gitea/{forge}`, signed. Answered at once: the server gives up after five seconds.
pub(super) async fn gitea(
    State(app): State<App>,
    forge: Result<Path<ForgeName>, PathRejection>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<StatusCode, ApiError> {
    let Path(name) = forge?;
    // The same answer for a forge that is not there: who has no secret learns nothing.
    let refused = || ApiError::unauthorized("the signature is not that of this forge's webhook secret");
    let forge = app.forges.get(&name).ok_or_else(refused)?;
    let file = forge.config().webhook_secret_file.as_ref().ok_or_else(refused)?;
    let secret = tokio::fs::read_to_string(file).await.map_err(|error| {
        tracing::error!(forge = %name, %error, "webhook secret not readable");
        refused()
    })?;
    let signed = headers.get("x-gitea-signature").and_then(|value| hex::decode(value.as_bytes()).ok());
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.trim().as_bytes());
    hmac::verify(&key, &body, &signed.unwrap_or_default()).map_err(|_| refused())?;
    forge.wake();
    Ok(StatusCode::NO_CONTENT)
}
