//! The built-in image `pilotlight/host`: almost nothing, with the host's own programs mounted read-only. It needs no
//! registry, so smoke tests and the demo run offline (design 6).

use std::path::Path;

use bollard::{
    body_full,
    models::{Mount, MountType},
    query_parameters::CreateImageOptions,
};
use bytes::Bytes;
use futures_util::TryStreamExt;

use super::{Engine, EngineError};

/// The name that jobs use.
pub(super) const NAME: &str = "pilotlight/host";

/// The repository of the image that is imported; its tag says what is in it.
const REPOSITORY: &str = "pilotlight-host";

/// Raised when the content of the image changes.
const VERSION: u32 = 1;

/// The programs of the host. Not `/sbin`: Docker puts its init there, and a read-only mount would hide it.
const PROGRAMS: [&str; 6] = ["/usr", "/bin", "/lib", "/lib32", "/lib64", "/libx32"];

/// What the programs need of `/etc`, without a user's secret in it.
const SETTINGS: [&str; 5] =
    ["/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl", "/etc/ca-certificates", "/etc/localtime"];

const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n";
const GROUP: &str = "root:x:0:\nnogroup:x:65534:\n";

/// Imports the image unless it is there, and returns its name.
pub(super) async fn prepare(engine: &Engine) -> Result<String, EngineError> {
    let name = format!("{REPOSITORY}:{VERSION}");
    if engine.docker.inspect_image(&name).await.is_ok() {
        return Ok(name);
    }
    let failed = |source| EngineError { doing: format!("import image {name}"), source };
    let tar = archive().map_err(|source| failed(source.into()))?;
    let options = CreateImageOptions {
        from_src: Some("-".to_owned()),
        repo: Some(REPOSITORY.to_owned()),
        tag: Some(VERSION.to_string()),
        ..CreateImageOptions::default()
    };
    let import = engine.docker.create_image(Some(options), Some(body_full(tar)), None);
    import.try_collect::<Vec<_>>().await.map_err(failed)?;
    Ok(name)
}

/// The host's programs and settings, as mounts. A place that is a link on the host is mounted where it leads.
pub(super) fn mounts() -> Vec<Mount> {
    let bind = |path: &&str| Mount {
        typ: Some(MountType::BIND),
        source: Some((*path).to_owned()),
        target: Some((*path).to_owned()),
        read_only: Some(true),
        ..Mount::default()
    };
    PROGRAMS.iter().chain(&SETTINGS).filter(|path| Path::new(path).exists()).map(bind).collect()
}

/// A file system with places for a job to write and a user to be.
fn archive() -> std::io::Result<Bytes> {
    let mut tar = tar::Builder::new(Vec::new());
    let mut entry = |kind, path: &str, mode, content: &str| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(content.len() as u64);
        tar.append_data(&mut header, path, content.as_bytes())
    };
    for (path, mode) in [("etc", 0o755), ("root", 0o700), ("tmp", 0o1777), ("var/tmp", 0o1777), ("run", 0o755)] {
        entry(tar::EntryType::Directory, path, mode, "")?;
    }
    entry(tar::EntryType::Regular, "etc/passwd", 0o644, PASSWD)?;
    entry(tar::EntryType::Regular, "etc/group", 0o644, GROUP)?;
    tar.into_inner().map(Bytes::from)
}
