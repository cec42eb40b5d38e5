//! One job from submit until its machine is gone, with one process killed on the way.

use std::fs;

use libtest_mimic::Failed;
use pilotlight_tests::{
    site::{Site, wait},
    store,
};
use serde_json::Value;

const LINES: usize = 40;

/// What marks a gap in the output.
const GAP: &str = "[pilotlight] output may be missing here";

/// Long enough to be in mid-stream when a process that died is back.
const JOB: &str = "echo ran >> /marks/ran; for i in $(seq 40); do echo line $i; sleep 0.02; done; exit 7";

/// A machine stays until it is told to go: some failpoints are reached only a while after the job has ended.
const CONFIG: &str = r#"
[label.cpu]
pool = "here"
[pool.here]
placements = ["here"]
idle_timeout = "1h"
[pool.here.volumes]
marks = { host = "MARKS", mount = "/marks", read_only = false }
[placement.here.local]
gpus = 0
"#;

/// Runs a job past a failpoint. The scaler is started again by this test, the agent by the local provider, the attach
/// process by the agent.
pub(super) fn survive(failpoint: &str) -> Result<(), Failed> {
    let marks = tempfile::tempdir()?;
    // An agent leaves of its own accord only when its scaler has been silent for longer than the lease.
    let leaves = failpoint.starts_with("agent.leave.");
    let lease = if leaves { "lease = \"8s\"\n" } else { "" };
    let mut site =
        Site::prepare(&format!("{lease}{}", CONFIG.replace("MARKS", &marks.path().to_string_lossy()))).unwrap();
    let reached = site.arm(failpoint);
    site.start().unwrap();

    let result = site.path("result.json");
    let mut job = site.begin(&["--result-file", result.to_str().unwrap(), "--", "bash", "-c", JOB]).unwrap();
    wait("the job is over", || {
        site.revive()?;
        job.has_ended()
    })
    .unwrap();
    let output = job.end().unwrap();
    // The agent goes on after the job is over, and does the last of it only while it is left alone.
    let agent = ["agent.", "attach."].iter().any(|of| failpoint.starts_with(of));
    wait("nothing of the job is left on the machine", || {
        site.revive()?;
        Ok((!agent || leaves || reached.exists()) && site.is_at_rest()?)
    })
    .unwrap_or_else(|error| panic!("failpoint {failpoint}, reached: {}: {error:#}", reached.exists()));
    if leaves {
        site.kill_scaler().unwrap();
        wait("the agent leaves", || Ok(reached.exists())).unwrap();
        site.start().unwrap();
    }
    let mut drained = false;
    wait("the machine is gone", || {
        // The scaler may die under any question.
        site.revive()?;
        drained = drained || site.call(&["drain", "--all"])?.status.success();
        let live = site.json(&["instances"]);
        Ok(drained && live.is_ok_and(|live| live.as_array().is_some_and(Vec::is_empty)))
    })
    .unwrap();
    // Dying may be the last thing that a scaler does for a job.
    site.revive().unwrap();
    assert!(reached.exists(), "failpoint {failpoint} was never reached");

    let told: Value = serde_json::from_slice(&fs::read(result)?)?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &told["exit_code"]), (Some(7), &7.into()), "{stderr}");
    assert_eq!(told["verdict"], "failure", "{stderr}");
    check_output(failpoint, &String::from_utf8_lossy(&output.stdout), told["log_gap"] == true);
    assert_eq!(fs::read_to_string(marks.path().join("ran"))?, "ran\n", "it ran exactly once");
    assert_eq!(site.json(&["jobs", "--all"]).unwrap().as_array().map(Vec::len), Some(1), "it is one job");
    assert_eq!(store::unsettled(&site.state().join("pilotlight.db")).unwrap(), 0, "nothing more happens to the job");
    site.finish().unwrap();
    Ok(())
}

/// Every line once and in order. Only where the process that reads the output was killed may some be missing, and then
/// the output and the result say so.
fn check_output(failpoint: &str, output: &str, gap: bool) {
    let all: Vec<String> = (1..=LINES).map(|n| format!("line {n}")).collect();
    let lines: Vec<&str> = output.lines().filter(|line| !line.starts_with(GAP)).collect();
    let gaps = output.lines().count() - lines.len();
    assert_eq!(gaps, usize::from(gap), "the result and the output agree on a gap: {output}");
    if gap {
        assert!(failpoint.starts_with("attach."), "a gap: {output}");
        let mut rest = all.iter();
        assert!(lines.iter().all(|line| rest.any(|known| known == line)), "not in order, or not the job's: {output}");
    } else {
        assert_eq!(lines, all);
    }
}
