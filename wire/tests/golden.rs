//! The JSON of the contract, to the letter: agents and clients of another version rely on it.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fmt::Debug;

use pilotlight_wire::{
    ErrorBody,
    agent::{AssignmentEvent, Bootstrap, EnrolRequest, EnrolResponse, EventAck, LogSize, SyncRequest, SyncResponse},
    api::{DrainRequest, DrainResponse, InstanceView, JobView, Orphan, PlanView, StatusView, SubmitJob},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

const ID: &str = "018f0000-0000-7000-8000-000000000001";
const NOW: &str = "2026-01-02T03:04:05Z";

/// The JSON is read, and written again as it was.
fn golden<T: Serialize + DeserializeOwned + PartialEq + Debug>(value: Value) -> T {
    let parsed: T = serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{error}: {value:#}"));
    assert_eq!(serde_json::to_value(&parsed).unwrap(), value);
    parsed
}

/// JSON that lacks what is optional, or has what is not known yet, is read as well.
fn read<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{error}: {value:#}"))
}

fn inventory() -> Value {
    json!({
        "gpus": [{"uuid": "GPU-1", "model": "NVIDIA H200", "pci": "0000:05:00.0"}], "driver": "580.1", "cpus": 2,
        "memory_bytes": 1, "disk_free_bytes": 2, "docker": "26.1.5", "kernel": "6.1"
    })
}

#[test]
fn bootstrap_and_enrolment() {
    golden::<Bootstrap>(json!({
        "scaler_url": "http://127.0.0.1:8470", "instance": ID, "secret": "s", "power": "poweroff", "gpus": ["GPU-1"],
        "host_image": true
    }));
    let old: Bootstrap = read(json!({"scaler_url": "u", "instance": ID, "secret": "s", "power": "exit"}));
    assert_eq!((old.gpus, old.host_image), (None, false));
    assert_eq!(format!("{:?}", old.secret), "[redacted]");
    golden::<EnrolRequest>(json!({
        "instance": ID, "secret": "s", "nonce": "n", "agent_version": "0.1.0", "agent_started_at": NOW,
        "inventory": inventory(), "health": {"problems": ["Docker does not answer"]}
    }));
    let bare = json!({"gpus": [], "cpus": 2, "memory_bytes": 1, "disk_free_bytes": 2, "kernel": "6.1"});
    let old: EnrolRequest = read(json!({
        "instance": ID, "secret": "s", "nonce": "n", "agent_version": "0.1.0", "agent_started_at": NOW,
        "inventory": bare, "health": {"problems": []}
    }));
    assert_eq!((old.inventory.driver, old.inventory.docker), (None, None));
    golden::<EnrolResponse>(json!({
        "bearer": "b", "server_time": NOW,
        "policy": {"lease_seconds": 600, "result_grace_seconds": 3600, "sample_seconds": 5, "cpu_jobs": 1}
    }));
}

#[test]
fn sync() {
    golden::<SyncRequest>(json!({
        "seq": {"run": 1, "n": 2},
        "assignments": [{
            "id": ID, "job": {"id": ID, "forge": "direct", "label": "x1", "name": "train"}, "gpus": ["GPU-1"],
            "remaining_seconds": 60, "stage": "preparing", "detail": "pulling x: 45%"
        }],
        "sample": {"at": NOW, "cpu_percent": 1.5, "memory_used_bytes": 1, "disk_free_bytes": 2, "load1": 0.5},
        "note": "bye"
    }));
    read::<SyncRequest>(json!({"seq": {"run": 1, "n": 2}, "assignments": [{"id": ID, "stage": "finished"}], "new": 1}));
    golden::<SyncResponse>(json!({
        "directives": [
            {
                "do": "start", "assignment": ID, "job": {"id": ID, "forge": "direct", "label": "x1", "name": "train"},
                "work": {
                    "kind": "job", "image": "x", "entrypoint": ["a"], "command": ["b"], "env": {"K": "v"}, "user": "1:2",
                    "workdir": "/w"
                },
                "gpus": ["GPU-1"], "volumes": [{"name": "d", "host": "/h", "mount": "/m", "read_only": true}],
                "remaining_seconds": 60, "max_log_bytes": 100, "stop_grace_seconds": 10
            },
            {
                "do": "start", "assignment": ID, "job": {"id": ID, "forge": "acme", "label": "x1", "name": "train"},
                "work": {
                    "kind": "runner", "forge": "gitea", "url": "https://git.example", "id": 7, "uuid": "u",
                    "token": "t", "name": "n", "labels": ["x1"], "image": "x", "price_per_hour": 1.5,
                    "preface": ["a line"]
                },
                "gpus": [], "volumes": [], "remaining_seconds": 60, "max_log_bytes": 100, "stop_grace_seconds": 10
            },
            {"do": "withdraw", "assignment": ID},
            {"do": "cancel", "assignment": ID},
            {"do": "terminate", "reason": "idle"}
        ],
        "lease_seconds": 600, "server_time": NOW
    }));
}

#[test]
fn events_and_logs() {
    for event in [
        json!({"kind": "started", "image_ready_at": NOW, "image_id": "sha256:1"}),
        json!({"kind": "refused", "reason": "disk full"}),
        json!({
            "kind": "finished", "verdict": "infrastructure", "exit_code": 7, "reason": "r", "log_bytes": 5,
            "log_gap": true,
            "usage": {"wall_seconds": 1.5, "cpu_seconds": 0.5, "memory_peak_bytes": 9, "out_of_memory": true}
        }),
    ] {
        golden::<AssignmentEvent>(json!({"n": 1, "at": NOW, "event": event}));
    }
    read::<AssignmentEvent>(json!({"n": 1, "at": NOW, "event": {"kind": "started", "image_ready_at": NOW}}));
    read::<AssignmentEvent>(
        json!({"n": 2, "at": NOW, "event": {"kind": "finished", "verdict": "cancelled", "log_bytes": 0}}),
    );
    golden::<EventAck>(json!({"expected": 2}));
    golden::<LogSize>(json!({"size": 7}));
    golden::<ErrorBody>(json!({"code": "offset", "message": "the log has 7 bytes", "size": 7}));
    golden::<ErrorBody>(json!({"code": "gap", "message": "m", "expected": 3}));
}

#[test]
fn clients() {
    golden::<SubmitJob>(json!({
        "label": "x1", "name": "train", "spec": {"image": "x", "command": ["a"]}, "timeout_seconds": 60, "priority": 5
    }));
    read::<SubmitJob>(json!({"label": "x1", "spec": {"image": "x"}}));
    let unknown = serde_json::from_value::<SubmitJob>(json!({"label": "x1", "spec": {"image": "x"}, "prio": 1}));
    assert!(unknown.unwrap_err().to_string().contains("prio"), "a misspelt field is named");
    golden::<JobView>(json!({
        "id": ID, "forge": "direct", "name": "train", "label": "x1", "state": "finished", "verdict": "timeout",
        "exit_code": 137, "reason": "r", "instance": ID, "gpus": 1, "queued_at": NOW, "started_at": NOW,
        "finished_at": NOW, "detail": null, "cost": 0.5, "log_gap": false,
        "usage": {"wall_seconds": 1.0, "out_of_memory": false},
        "phases": {
            "queued": NOW, "planned": NOW, "launched": NOW, "booted": NOW, "enrolled": NOW, "assigned": NOW,
            "image_ready": NOW, "started": NOW, "finished": null
        }
    }));
    golden::<InstanceView>(json!({
        "id": ID, "pool": "h200", "placement": "rack", "provider": "local", "phase": "ready", "gpus": 8,
        "assignments": [{"id": ID, "job": ID, "gpus": 1, "deadline": NOW}], "created_at": NOW, "ready_at": NOW,
        "expires_at": NOW, "held_until": NOW, "cause": null, "last_sync_at": NOW,
        "sample": {"at": NOW, "cpu_percent": 1.5, "memory_used_bytes": 1, "disk_free_bytes": 2, "load1": 0.5}
    }));
    golden::<StatusView>(json!({
        "instances": 1, "jobs_queued": 2, "jobs_running": 3, "version": "0.1.0",
        "alerts": [{"code": "orphan", "message": "m", "since": NOW}],
        "pools": [{
            "name": "h200", "labels": ["x1"], "instances": 1, "max_instances": 4, "min_idle": 1, "gpus": 8,
            "gpus_used": 1,
            "jobs_queued": 2, "jobs_running": 3,
            "placements": [{
                "name": "rack", "provider": "local", "health": "cooling", "reason": "r", "until": NOW, "instances": 1,
                "max_instances": null
            }]
        }]
    }));
    let line = json!({"what": "wait", "subject": ID, "reason": "pool_full", "text": "t"});
    golden::<PlanView>(json!({"actions": [line], "waiting": [line], "instances": [line], "wake_at": NOW}));
    for target in [json!("all"), json!({"instance": ID}), json!({"pool": "h200"})] {
        golden::<DrainRequest>(json!({"target": target, "now": true}));
    }
    golden::<DrainResponse>(json!({"instances": [ID]}));
    golden::<Orphan>(json!({"provider": "local", "instance": ID, "since": NOW}));
}
