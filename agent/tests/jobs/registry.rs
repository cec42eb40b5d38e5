//! A registry on the loopback interface, which Docker takes without TLS. It holds one image under several names, and
//! fails in its own way under others.

use std::{
    fs,
    io::Write,
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::State,
    http::{Response, StatusCode, Uri, header},
};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use tokio::{net::TcpListener, task::JoinHandle};

const MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
const LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";

pub(crate) struct Registry {
    host: String,
    task: JoinHandle<()>,
}

struct Held {
    config: Bytes,
    layer: Bytes,
    manifest: String,
}

impl Registry {
    pub(crate) async fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let host = format!("127.0.0.1:{}", listener.local_addr().unwrap().port());
        let router = Router::new().fallback(answer).with_state(Arc::new(Held::new()));
        Self { host, task: tokio::spawn(async move { axum::serve(listener, router).await.unwrap() }) }
    }

    pub(crate) fn image(&self, name: &str) -> String {
        format!("{}/{name}", self.host)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Held {
    /// bash and its libraries, a job's defaults, and some noise that makes the layer large and new.
    fn new() -> Self {
        let mut tar = tar::Builder::new(Vec::new());
        let libraries = Command::new("ldd").arg("/bin/bash").output().unwrap().stdout;
        let libraries = String::from_utf8(libraries).unwrap();
        let paths = libraries.split_whitespace().filter(|word| word.starts_with('/')).chain(["/bin/bash"]);
        for path in paths {
            tar.append_path_with_name(fs::canonicalize(path).unwrap(), path.trim_start_matches('/')).unwrap();
        }
        let mut noise = vec![0; 6 * 1024 * 1024];
        std::io::Read::read_exact(&mut fs::File::open("/dev/urandom").unwrap(), &mut noise).unwrap();
        let mut add = |path: &str, content: &[u8]| {
            let mut header = tar::Header::new_gnu();
            header.set_mode(0o644);
            header.set_size(content.len() as u64);
            tar.append_data(&mut header, path, content).unwrap();
        };
        add("noise", &noise);
        add("etc/passwd", b"root:x:0:0:root:/:/bin/bash\nworker:x:1234:1234::/w:/bin/bash\n");
        let layer = Bytes::from(tar.into_inner().unwrap());
        let config = serde_json::json!({
            "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
            "os": "linux",
            "config": {
                "Entrypoint": ["/bin/bash", "-c"],
                "Cmd": ["echo $GREETING $UID $PWD"],
                "Env": ["GREETING=hello", "NVIDIA_VISIBLE_DEVICES=all"],
                "User": "worker",
                "WorkingDir": "/w",
                "Volumes": {"/v": {}},
            },
            "rootfs": {"type": "layers", "diff_ids": [digest(&layer)]},
        });
        let config = Bytes::from(config.to_string());
        let manifest = serde_json::json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {
                "mediaType": "application/vnd.docker.container.image.v1+json",
                "size": config.len(),
                "digest": digest(&config),
            },
            "layers": [{
                "mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip",
                "size": layer.len(),
                "digest": digest(&layer),
            }],
        });
        Self { config, layer, manifest: manifest.to_string() }
    }
}

async fn answer(State(held): State<Arc<Held>>, uri: Uri) -> Response<Body> {
    let path: Vec<&str> = uri.path().trim_matches('/').split('/').collect();
    match path[..] {
        ["v2"] => reply(StatusCode::OK, "application/json", "{}"),
        [_, "private", ..] => {
            let mut answer = error(StatusCode::UNAUTHORIZED, "UNAUTHORIZED", "authentication required");
            answer.headers_mut().insert(header::WWW_AUTHENTICATE, "Basic realm=\"test\"".parse().unwrap());
            answer
        }
        [_, "broken", ..] => error(StatusCode::BAD_GATEWAY, "UNKNOWN", "the registry is broken"),
        [_, "foreign", "manifests", _] => {
            let list = serde_json::json!({
                "schemaVersion": 2,
                "mediaType": LIST,
                "manifests": [{
                    "mediaType": MANIFEST,
                    "size": held.manifest.len(),
                    "digest": digest(held.manifest.as_bytes()),
                    "platform": {"architecture": "s390x", "os": "linux"},
                }],
            });
            reply(StatusCode::OK, LIST, &list.to_string())
        }
        [_, "good" | "stalled", "manifests", _] => reply(StatusCode::OK, MANIFEST, &held.manifest),
        [_, name, "blobs", wanted] if wanted == digest(&held.layer) => {
            let parts: Vec<Bytes> = held.layer.chunks(256 * 1024).map(Bytes::copy_from_slice).collect();
            let stops = name == "stalled";
            let parts = stream::iter(parts.into_iter().enumerate()).then(move |(n, part)| async move {
                let pause = if stops && n > 8 { Duration::from_secs(3600) } else { Duration::from_millis(50) };
                tokio::time::sleep(pause).await;
                Ok::<_, std::io::Error>(part)
            });
            let mut answer = Response::new(Body::from_stream(parts));
            answer.headers_mut().insert(header::CONTENT_LENGTH, held.layer.len().into());
            answer
        }
        [_, _, "blobs", wanted] if wanted == digest(&held.config) => Response::new(Body::from(held.config.clone())),
        _ => error(StatusCode::NOT_FOUND, "MANIFEST_UNKNOWN", "manifest unknown"),
    }
}

fn error(status: StatusCode, code: &str, message: &str) -> Response<Body> {
    let body = serde_json::json!({"errors": [{"code": code, "message": message}]});
    reply(status, "application/json", &body.to_string())
}

fn reply(status: StatusCode, kind: &str, body: &str) -> Response<Body> {
    Response::builder()
        .status(status)
        .header(header::CONTENT_TYPE, kind)
        .header("docker-distribution-api-version", "registry/2.0")
        .header("docker-content-digest", digest(body.as_bytes()))
        .body(Body::from(body.to_owned()))
        .unwrap()
}

fn digest(bytes: &[u8]) -> String {
    let mut child = Command::new("sha256sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    let output = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    format!("sha256:{}", output.split(' ').next().unwrap())
}
