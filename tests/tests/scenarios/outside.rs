//! What others see: who may ask, what is secret, which GPUs a job has, and what a second scaler is told.

use std::{fs, path::Path};

use pilotlight_tests::site::{ONE_POOL, Site};

use super::{code, err};

#[test]
fn every_route_but_the_open_ones_wants_a_token() {
    let site = Site::new(ONE_POOL).unwrap();
    let token = fs::read_to_string(site.state().join("admin.token")).unwrap();
    let token = token.trim();
    for path in ["/healthz", "/readyz"] {
        assert_eq!(site.get(path, None).unwrap().0, 200, "{path}");
    }
    let routes = [
        ("GET", "/api/v1/jobs"),
        ("GET", "/api/v1/instances"),
        ("GET", "/api/v1/pools"),
        ("GET", "/api/v1/status"),
        ("GET", "/api/v1/plan"),
        ("GET", "/api/v1/orphans"),
        ("POST", "/api/v1/reap"),
        ("POST", "/api/v1/drain"),
        ("POST", "/api/v1/resume"),
        ("GET", "/metrics"),
        ("POST", "/agent/v1/sync"),
    ];
    for (method, path) in routes {
        assert_eq!(site.http(method, path, None).unwrap().0, 401, "{path}");
        assert_eq!(site.http(method, path, Some("wrong")).unwrap().0, 401, "{path}");
    }
    assert_eq!(site.http("POST", "/agent/v1/sync", Some(token)).unwrap().0, 401, "the admin is no agent");
    assert_eq!(code(&site.submit(&["--", "true"]).unwrap()), 0);
    let (status, metrics) = site.get("/metrics", Some(token)).unwrap();
    assert_eq!(status, 200);
    for line in
        ["pilotlight_jobs_finished_total{label=\"cpu\",verdict=\"success\"} 1", "pilotlight_phase_seconds_bucket"]
    {
        assert!(metrics.contains(line), "{line} in {metrics}");
    }
    site.finish().unwrap();
}

#[test]
fn a_second_scaler_and_a_lost_key_are_refused() {
    let mut site = Site::new(ONE_POOL).unwrap();
    let second = site.run_command().output().unwrap();
    assert_eq!(second.status.code(), Some(75));
    assert!(err(&second).contains("another scaler runs"), "{}", err(&second));
    site.stop_scaler().unwrap();
    let key = site.state().join("key");
    let kept = fs::read(&key).unwrap();
    fs::remove_file(&key).unwrap();
    let keyless = site.run_command().output().unwrap();
    assert_eq!(keyless.status.code(), Some(78), "{}", err(&keyless));
    assert!(err(&keyless).contains("key"), "{}", err(&keyless));
    fs::write(&key, kept).unwrap();
    fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    site.finish().unwrap();
}

#[test]
fn a_bad_config_is_told_whole() {
    let site = Site::prepare("max_log = \"5\"\nnosuch = 1\n[label.x]\npool = \"none\"\ntimeout = \"-5m\"\n").unwrap();
    let output = site.run_command().output().unwrap();
    assert_eq!(output.status.code(), Some(78));
    for word in ["config.toml:", "max_log", "nosuch", "none", "-5m"] {
        assert!(err(&output).contains(word), "{word}: {}", err(&output));
    }
}

/// A CDI spec that Docker reads for as long as the test runs. Its GPUs are `/dev/null` and a variable.
struct Cdi(std::path::PathBuf);

impl Cdi {
    fn new(gpus: &[String]) -> Self {
        let devices: Vec<String> = gpus
            .iter()
            .map(|gpu| {
                format!(
                    r#"{{"name":"{gpu}","containerEdits":{{"env":["FAKE_{}=1"],"deviceNodes":[{{"path":"/dev/fake-{gpu}","hostPath":"/dev/null"}}]}}}}"#,
                    gpu.replace('-', "_")
                )
            })
            .collect();
        fs::create_dir_all("/etc/cdi").unwrap();
        let path = Path::new("/etc/cdi").join(format!("{}.json", gpus[0]));
        let spec = format!(r#"{{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[{}]}}"#, devices.join(","));
        fs::write(&path, spec).unwrap();
        Self(path)
    }
}

impl Drop for Cdi {
    fn drop(&mut self) {
        let _gone = fs::remove_file(&self.0);
    }
}

#[test]
fn jobs_get_exactly_their_gpus() {
    let gpus: Vec<String> = (0..2).map(|n| format!("GPU-test{}-{n}", std::process::id())).collect();
    let _cdi = Cdi::new(&gpus);
    let config = format!(
        "[label.cpu]\npool = \"here\"\ngpus = 1\n[label.both]\npool = \"here\"\ngpus = 2\n[label.none]\npool = \"here\"\n\
         [pool.here]\nplacements = [\"here\"]\ncpu_jobs = 1\n[placement.here.local]\ngpus = [{:?}, {:?}]\n",
        gpus[0], gpus[1]
    );
    let site = Site::new(&config).unwrap();
    let show = "ls /dev | grep fake-GPU; echo $NVIDIA_VISIBLE_DEVICES; while [ ! -e /tmp/go ]; do sleep 0.1; done";
    let first = site.begin(&["--", "bash", "-c", show]).unwrap();
    first.until("void").unwrap();
    let second = site.begin(&["--", "bash", "-c", show]).unwrap();
    second.until("void").unwrap();
    let mut seen = vec![first.stdout(), second.stdout()];
    seen.sort();
    assert_eq!(seen, [format!("fake-{}\nvoid\n", gpus[0]), format!("fake-{}\nvoid\n", gpus[1])]);
    let none = site
        .call(&[
            "submit",
            "--label",
            "none",
            "--image",
            "pilotlight/host",
            "--",
            "bash",
            "-c",
            "ls /dev | grep -c fake; echo $NVIDIA_VISIBLE_DEVICES",
        ])
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&none.stdout), "0\nvoid\n", "{}", err(&none));
    for job in site.json(&["jobs"]).unwrap().as_array().unwrap() {
        site.call(&["cancel", job["id"].as_str().unwrap()]).unwrap();
    }
    first.end().unwrap();
    second.end().unwrap();
    let both = site.call(&[
        "submit",
        "--label",
        "both",
        "--image",
        "pilotlight/host",
        "--",
        "bash",
        "-c",
        "ls /dev | grep -c fake",
    ]);
    assert_eq!(both.unwrap().stdout, b"2\n");
    site.finish().unwrap();
}
