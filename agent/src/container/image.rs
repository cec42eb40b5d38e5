//! Making an image ready: there already, built in, or pulled with progress; and whose fault it is when it cannot be.

use std::{collections::HashMap, time::Duration};

use bollard::{models::CreateImageInfo, query_parameters::CreateImageOptions};
use futures_util::StreamExt;
use pilotlight_runtime::units::Size;
use tokio::time::{Instant, timeout};

use super::{Engine, EngineError, host_image, status};

/// A pull without progress for so long is a network failure.
const STALLED: Duration = Duration::from_secs(300);

/// How often a pull that the network broke is tried.
const TRIES: u32 = 3;

/// At most this often progress is told.
const TELL_EVERY: Duration = Duration::from_millis(500);

/// An image that is ready to be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// What Docker is told: the id, so that a tag moved meanwhile changes nothing.
    pub reference: String,
    /// Its digest or id, for people.
    pub id: Option<String>,
    /// Whether the host's own programs are mounted into it.
    pub is_host: bool,
}

/// Why an image cannot be used. The class decides the verdict (link 6).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// The job names an image that cannot be used: not found, not allowed, wrong platform.
    #[error("{0}")]
    Unusable(String),
    /// The network between us and the registry.
    #[error("{0}")]
    Network(String),
    /// This machine: its disk, its Docker.
    #[error("{0}")]
    Machine(String),
}

impl Engine {
    /// Makes an image ready.
    ///
    /// # Errors
    /// See [`ImageError`].
    pub async fn prepare_image(
        &self,
        name: &str,
        host_image_allowed: bool,
        mut tell: impl FnMut(String),
    ) -> Result<Image, ImageError> {
        if name == host_image::NAME {
            if !host_image_allowed {
                let text = format!("image {name} is switched off on this machine (host_image = false)");
                return Err(ImageError::Unusable(text));
            }
            let machine = |error: EngineError| ImageError::Machine(error.message());
            let reference = host_image::prepare(self).await.map_err(machine)?;
            return Ok(Image { reference, id: None, is_host: true });
        }
        let name = with_tag(name)?;
        if let Some(image) = self.local_image(&name).await? {
            return Ok(image);
        }
        let mut pause = Duration::from_secs(1);
        for last in (0..TRIES).rev() {
            match self.pull(&name, &mut tell).await {
                Ok(()) => break,
                Err(ImageError::Network(text)) if last > 0 => {
                    tell(format!("pulling {name} failed, trying again: {text}"));
                    tokio::time::sleep(pause).await;
                    pause *= 4;
                }
                Err(error) => return Err(error),
            }
        }
        let missing = || ImageError::Machine(format!("image {name} was pulled and is not there"));
        self.local_image(&name).await?.ok_or_else(missing)
    }

    async fn local_image(&self, name: &str) -> Result<Option<Image>, ImageError> {
        match self.docker.inspect_image(name).await {
            Ok(found) => {
                let id = found.id.clone();
                let digest = found.repo_digests.unwrap_or_default().into_iter().next();
                let reference = id.clone().unwrap_or_else(|| name.to_owned());
                Ok(Some(Image { reference, id: digest.or(id), is_host: false }))
            }
            Err(error) if status(&error) == Some(404) => Ok(None),
            Err(source) => {
                let error = EngineError { doing: format!("inspect image {name}"), source };
                Err(ImageError::Machine(error.message()))
            }
        }
    }

    async fn pull(&self, name: &str, tell: &mut impl FnMut(String)) -> Result<(), ImageError> {
        tell(format!("pulling {name}"));
        let options = CreateImageOptions { from_image: Some(name.to_owned()), ..CreateImageOptions::default() };
        let mut stream = Box::pin(self.docker.create_image(Some(options), None, None));
        let mut layers = Layers::default();
        let mut told = Instant::now();
        loop {
            let step = match timeout(STALLED, stream.next()).await {
                Ok(Some(step)) => step,
                Ok(None) => return Ok(()),
                Err(_elapsed) => {
                    let text = format!("pulling {name} made no progress for {} s", STALLED.as_secs());
                    return Err(ImageError::Network(text));
                }
            };
            let step = step.map_err(|source| {
                let error = EngineError { doing: format!("pull image {name}"), source };
                classify(name, &error.message())
            })?;
            layers.take_in(step);
            if told.elapsed() >= TELL_EVERY {
                told = Instant::now();
                tell(layers.say(name));
            }
        }
    }
}

/// How far each layer is.
#[derive(Debug, Default)]
struct Layers(HashMap<String, (u64, u64)>);

impl Layers {
    fn take_in(&mut self, step: CreateImageInfo) {
        let (Some(id), Some(progress)) = (step.id, step.progress_detail) else { return };
        // Unpacking counts from zero again; only the download is told.
        if step.status.as_deref() != Some("Downloading") {
            return;
        }
        let bytes = |count: Option<i64>| u64::try_from(count.unwrap_or(0)).unwrap_or(0);
        self.0.insert(id, (bytes(progress.current), bytes(progress.total)));
    }

    fn say(&self, name: &str) -> String {
        let current: u64 = self.0.values().map(|(current, _)| current).sum();
        let total: u64 = self.0.values().map(|(_, total)| total).sum();
        match current.saturating_mul(100).checked_div(total) {
            Some(percent) => format!("pulling {name}: {percent}% of {}", Size(total)),
            None => format!("pulling {name}"),
        }
    }
}

/// An image's name with a tag: without one Docker would pull them all.
fn with_tag(name: &str) -> Result<String, ImageError> {
    if !is_reference(name) {
        return Err(ImageError::Unusable(format!("{name:?} is not the name of an image")));
    }
    let last = name.rsplit('/').next().unwrap_or(name);
    let complete = last.contains(':') || name.contains('@') || is_id(name);
    Ok(if complete { name.to_owned() } else { format!("{name}:latest") })
}

/// Whether a name is made like one. Docker judges the rest; but the name becomes part of a path of its API, so what has
/// a meaning there must not get through.
fn is_reference(name: &str) -> bool {
    let known = |c: char| c.is_ascii_alphanumeric() || "._-/:@+[]".contains(c);
    // A bracket begins a registry's IPv6 address.
    let begins = |part: &str| part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '[');
    name.chars().all(known) && name.split('/').all(begins)
}

fn is_id(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whose fault a failed pull is, from Docker's own sentence.
fn classify(name: &str, message: &str) -> ImageError {
    let text = format!("cannot pull image {name}: {}", message.trim());
    let lower = message.to_lowercase();
    let says = |needles: &[&str]| needles.iter().any(|needle| lower.contains(needle));
    if says(&["no space left on device", "disk quota exceeded"]) {
        ImageError::Machine(text)
    } else if says(&[
        "not found",
        "manifest unknown",
        "does not exist",
        "invalid reference",
        "invalid repository name",
        "invalid tag",
        "repository name must",
        "unauthorized",
        "denied",
        "authentication required",
        "no basic auth credentials",
        "no matching manifest",
        "does not match the specified platform",
        "unsupported media type",
        "schema1",
    ]) && !says(&["no such host", "server misbehaving"])
    {
        ImageError::Unusable(text)
    } else {
        ImageError::Network(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn docker_says_whose_fault_it_is() {
        let class = |message: &str| match classify("x", message) {
            ImageError::Unusable(_) => 'u',
            ImageError::Network(_) => 'n',
            ImageError::Machine(_) => 'm',
        };
        for message in [
            "manifest for alpine:nosuch not found: manifest unknown: manifest unknown",
            "pull access denied for nosuch, repository does not exist or may require 'docker login': denied",
            "Head \"http://localhost:5000/v2/x/manifests/1\": unauthorized: authentication required",
            "no matching manifest for linux/amd64 in the manifest list entries",
            "invalid reference format",
        ] {
            assert_eq!(class(message), 'u', "{message}");
        }
        for message in [
            "Get \"https://registry.example/v2/\": dial tcp: lookup registry.example on 10.0.0.2:53: no such host",
            "Get \"https://registry.example/v2/\": net/http: TLS handshake timeout",
            "received unexpected HTTP status: 503 Service Unavailable",
            "toomanyrequests: You have reached your pull rate limit",
            "unexpected EOF",
        ] {
            assert_eq!(class(message), 'n', "{message}");
        }
        assert_eq!(class("write /var/lib/docker/tmp/GetImageBlob1: no space left on device"), 'm');
    }

    #[test]
    fn a_name_without_a_tag_means_latest() {
        let name = |text: &str| with_tag(text).unwrap();
        assert_eq!(name("alpine"), "alpine:latest");
        assert_eq!(name("localhost:5000/x"), "localhost:5000/x:latest");
        assert_eq!(name("localhost:5000/x:1"), "localhost:5000/x:1");
        assert_eq!(name("x@sha256:00"), "x@sha256:00");
        assert_eq!(name("[::1]:5000/a_b/c-d.e"), "[::1]:5000/a_b/c-d.e:latest");
        for bad in ["", "a b", "a\n", "a?b", "a#b", "a%2fb", "../info", "a/../b", "/a", "a//b", "a/", "-a", "ä"] {
            assert!(matches!(with_tag(bad), Err(ImageError::Unusable(_))), "{bad:?}");
        }
    }
}
