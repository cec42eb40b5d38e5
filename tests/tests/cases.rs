//! Field cases of queue and scaling races (C01 to C09) and of leaks (C10 to C15), as far as the planner decides them:
//! not the one input that somebody reported but its neighbours too. What reaches the planner over HTTP is tested with the
//! scaler whole (`scaler/tests/server/cases.rs`).

use pilotlight_tests::plans;

/// One placement and one pool of whole machines.
const ONE_POOL: &str = "placement rack gpus=8\npool h200 on=rack max=4 idle=10m\nlabel x8 pool=h200 gpus=8\n";

fn told(setup: &str, events: &str) -> String {
    plans::run(&format!("{setup}{events}")).unwrap_or_else(|error| panic!("{error:#}"))
}

fn count(told: &str, what: &str) -> usize {
    told.lines().filter(|line| line.starts_with('>') && line.contains(what)).count()
}

/// Whatever fails on the way, and whenever, no job's demand is lost and no machine is launched twice for it.
#[test]
fn c01_no_failure_of_the_provider_makes_a_queued_job_vanish() {
    let works = "10m created i1\n10m created i2\n10m created i3\n11m enrols i1\n11m enrols i2\n11m enrols i3\n";
    for submitted in 0..3 {
        let mut events = String::new();
        for (n, job) in ["a", "b", "c"].iter().enumerate() {
            events += if n == submitted { "1s list-fails\n" } else { "" };
            events += &format!("1s submit {job} x8\n");
        }
        let told = told(ONE_POOL, &format!("{events}1m look\n2m list-works\n{works}"));
        assert_eq!(count(&told, "launch instance"), 3, "{told}");
        assert_eq!(count(&told, "give job"), 3, "{told}");
    }
    // A create call that fails takes the demand nowhere either: the next one is made when the placement has rested.
    for failure in ["capacity no H200 left", "capacity quota exceeded", "capacity 503"] {
        let events =
            format!("0s submit a x8\n1s create-fails i1 {failure}\n2s destroyed i1\n10m created i2\n11m enrols i2\n");
        let told = told(ONE_POOL, &events);
        assert_eq!((count(&told, "launch instance"), count(&told, "give job a")), (2, 1), "{told}");
    }
}

/// Whoever gets the machine that was launched for whom: as many are launched as are needed, and both run.
#[test]
fn c05_machines_are_counted_and_never_paired_with_jobs() {
    let labels = format!("{ONE_POOL}label urgent pool=h200 gpus=8 priority=5\n");
    for second in ["x8", "urgent"] {
        let events = format!(
            "0s submit a x8\n1s submit b {second}\n2s created i1\n2s created i2\n30s enrols i1\n40s enrols i2\n1m look\n"
        );
        let told = told(&labels, &events);
        assert_eq!(count(&told, "launch instance"), 2, "{told}");
        assert_eq!((count(&told, "give job a"), count(&told, "give job b")), (1, 1), "{told}");
    }
    // A job that comes while the machine of another boots, and takes it.
    let events =
        "0s submit a x8\n1m created i1\n2m submit b urgent\n2m created i2\n3m enrols i1\n4m enrols i2\n5m look\n";
    let told = told(&labels, events);
    assert!(told.contains("give job b to instance i1") && told.contains("give job a to instance i2"), "{told}");
}

/// With a bound of two, five long jobs run two at a time until all are done, with no news coming in; a restart in the
/// middle changes nothing.
#[test]
fn c06_work_above_the_bound_is_never_forgotten() {
    let setup = "placement rack gpus=8\npool h200 on=rack max=2 idle=10m\nlabel x8 pool=h200 gpus=8\n";
    for restart in ["", "90m restart\n"] {
        let mut events: String = ["a", "b", "c", "d", "e"].map(|job| format!("0s submit {job} x8\n")).concat();
        events += "1m created i1\n1m created i2\n2m enrols i1\n2m enrols i2\n60m finishes a\n61m finishes b\n";
        events += restart;
        events += "120m finishes c\n121m finishes d\n180m finishes e\n";
        let told = told(setup, &events);
        assert_eq!(count(&told, "is over, success"), 5, "{told}");
        assert_eq!(count(&told, "launch instance"), 2, "the same two machines: {told}");
    }
}

/// Nothing that anybody else says ends a machine with a running job: neither a list that leaves it out once, nor lists
/// that fail, nor an agent that is silent for less than `lost_after`, nor all of it at once.
#[test]
fn c07_only_the_agent_and_long_silence_end_a_running_job() {
    let begin = "0s submit a x8\n1s created i1\n30s enrols i1\n31s starts a\n";
    for trouble in [
        "10m list-fails\n3h list-works\n",
        "10m silent i1\n60m speaks i1\n",
        "10m silent i1\n11m list-fails\n50m list-works\n51m speaks i1\n",
        "10m silent i1\n20m restart\n1h10m speaks i1\n",
    ] {
        let told = told(ONE_POOL, &format!("{begin}{trouble}5h finishes a\n"));
        assert_eq!(count(&told, "a is over, success"), 1, "{trouble}: {told}");
        assert_eq!(count(&told, "terminate") + count(&told, "destroy"), 0, "{trouble}: {told}");
    }
}

/// A machine that took long to boot has its whole idle time from when it is *ready*, though nobody wanted it for a moment.
#[test]
fn c08_a_slow_boot_is_not_culled_when_it_is_ready() {
    for history in [
        "2m cancel a\n8m enrols i1\n",
        "8m enrols i1\n8m30s cancel a\n8m31s finishes a 143\n",
        "8m enrols i1\n8m10s finishes a\n",
    ] {
        let events = format!("0s submit a x8\n1s created i1\n{history}17m59s submit b x8\n18m look\n");
        let told = told(ONE_POOL, &events);
        assert_eq!(count(&told, "give job b to instance i1"), 1, "{told}");
        assert_eq!(count(&told, "terminate"), 0, "{told}");
    }
}

/// Out of capacity on both rungs for half an hour: the job stays queued with the provider's own words, each try is a new
/// instance (a create call is never repeated with other arguments), and it runs once there is capacity.
#[test]
fn c09_no_capacity_ends_one_way_only() {
    let setup = "placement zone-a gpus=8\nplacement zone-b gpus=8\npool h200 on=zone-a,zone-b max=4\nlabel x8 pool=h200 gpus=8\n";
    let fails =
        |at: &str, n: u32| format!("{at} create-fails i{n} capacity insufficient capacity\n{at} destroyed i{n}\n");
    let events =
        ["0s submit a x8\n".to_owned(), fails("1s", 1), fails("2s", 2), fails("4m", 3), fails("4m1s", 4)].concat();
    let told = told(setup, &format!("{events}12m created i5\n13m enrols i5\n"));
    assert_eq!(count(&told, "launch instance"), 5, "{told}");
    assert_eq!(count(&told, "on zone-a"), 3, "the first rung is tried first each time: {told}");
    assert_eq!(count(&told, "is over"), 0, "never given up: {told}");
    assert_eq!(count(&told, "give job a to instance i5"), 1, "{told}");
    assert!(told.contains("a waits: placement zone-a is tried again at"), "{told}");
    // A person hears of it, with the label and the provider's words, once it has gone on for long.
    let setup = "placement zone-a gpus=8\npool h200 on=zone-a max=4\nlabel x8 pool=h200 gpus=8\n";
    let events =
        ["0s submit a x8\n".to_owned(), fails("1s", 1), fails("4m", 2), fails("11m", 3), "16m look\n".to_owned()];
    let told = plans::run(&format!("{setup}{}", events.concat())).unwrap();
    let alert = told.lines().find(|line| line.contains("alert jobs_waiting")).unwrap_or_default();
    assert!(alert.contains("1 job of label x8") && alert.contains("insufficient capacity"), "{told}");
}

/// The machine was made and the reply lost, at once or late: it is adopted, not made a second time, and not leaked when it
/// never comes up.
#[test]
fn c10_a_create_that_half_fails_has_an_owner() {
    for appears in ["2s appears i1\n", "1m appears i1\n", "19m appears i1\n"] {
        let lost = format!("0s submit a x8\n1s create-fails i1 unclear timeout\n{appears}");
        let adopted = told(ONE_POOL, &format!("{lost}19m30s enrols i1\n"));
        assert_eq!(
            (count(&adopted, "launch instance"), count(&adopted, "give job a to instance i1")),
            (1, 1),
            "{adopted}"
        );
        let dead = told(ONE_POOL, &format!("{lost}20m1s destroyed i1\n21m look\n"));
        assert_eq!(count(&dead, "instance i1 is gone"), 1, "{dead}");
        assert_eq!(count(&dead, "terminate instance i1: its agent did not enrol within boot_timeout"), 1, "{dead}");
    }
}

/// `gone` is said when the list says so and at no other time, however the destroy call goes.
#[test]
fn c11_terminated_is_said_when_the_cloud_agrees() {
    let begin = "0s submit a x8\n1s created i1\n30s enrols i1\n1m finishes a\n11m look\n";
    for (calls, gone_before) in [
        ("11m1s destroy-fails i1 500\n11m3s destroy-fails i1 500\n11m6s destroying i1\n", "20m"),
        ("11m1s destroying i1\n", "20m"),
        ("11m1s list-fails\n11m2s destroying i1\n19m list-works\n", "20m"),
    ] {
        let told = told(
            ONE_POOL,
            &format!("{begin}{calls}{gone_before} look\n21m vanishes i1\n21m destroying i1\n22m look\n"),
        );
        let gone: Vec<&str> = told.lines().filter(|line| line.contains("instance i1 is gone")).collect();
        assert_eq!(gone.len(), 1, "{told}");
        assert!(gone[0].trim_start_matches('>').trim_start().starts_with("21m"), "not before it is: {told}");
    }
}

/// A job is cancelled at every point of its machine's boot: the machine serves the next job or idles out, and its place
/// under the bound is free again.
#[test]
fn c12_a_cancel_while_booting_leaves_no_machine_busy() {
    let setup = "placement rack gpus=8\npool h200 on=rack max=1 idle=10m\nlabel x8 pool=h200 gpus=8\n";
    for (at, before, after) in [
        ("before the create returns", "", "2s created i1\n30s enrols i1\n"),
        ("while it boots", "1s created i1\n", "30s enrols i1\n"),
        ("when it is ready and the job on its way", "1s created i1\n1s enrols i1\n", ""),
    ] {
        let begin = format!("0s submit a x8\n{before}1s cancel a\n{after}");
        let end = if at.starts_with("when") { "40s finishes a\n" } else { "" };
        let served = told(setup, &format!("{begin}{end}1m submit b x8\n"));
        assert_eq!(count(&served, "give job b to instance i1"), 1, "{at}: {served}");
        let idle = told(setup, &format!("{begin}{end}10m41s destroyed i1\n11m submit b x8\n"));
        assert_eq!(count(&idle, "instance i1 is gone"), 1, "{at}: {idle}");
        assert_eq!(count(&idle, "launch instance i2"), 1, "{at}: {idle}");
    }
}

/// The scaler dies in every phase of a machine; the next one brings it to `ready` or to `gone` by itself.
#[test]
fn c14_there_is_no_state_that_nobody_looks_after() {
    let whole = ["0s submit a x8", "1s created i1", "30s enrols i1", "1m finishes a", "11m1s destroyed i1"];
    for died in 1..=whole.len() {
        let mut events: Vec<&str> = whole[..died].to_vec();
        events.extend(["12m restart"]);
        let rest = match died {
            // It never enrols, and its destroy comes back once it was asked for.
            1 | 2 => "25m silent i1\n33m destroyed i1\n34m look\n",
            3 => "25m finishes a\n36m destroyed i1\n37m look\n",
            4 => "12m1s destroyed i1\n13m look\n",
            _ => "13m look\n",
        };
        let told = told(ONE_POOL, &format!("{}\n{rest}", events.join("\n")));
        assert_eq!(count(&told, "instance i1 is gone"), 1, "died after {:?}: {told}", whole[died - 1]);
    }
    // It reported that it is unfit, and the scaler died.
    let told = told(
        ONE_POOL,
        "0s submit a x8\n1s created i1\n30s enrols i1 no Docker\n31s restart\n32s destroyed i1\n33s look\n",
    );
    assert_eq!(count(&told, "instance i1 is gone"), 1, "{told}");
}

/// Idle is a ready machine without work. A boot is not idle however long, nor is a job that prepares, nor one that does
/// nothing for hours; an agent that is silent is not idle but lost.
#[test]
fn c15_idle_is_not_boot_nor_setup_nor_silence() {
    let setup = "placement rack gpus=8\npool h200 on=rack max=1 idle=60s\nlabel x8 pool=h200 gpus=8 timeout=12h\n";
    let boots = told(setup, "0s submit a x8\n1s created i1\n5m look\n6m enrols i1\n");
    assert_eq!((count(&boots, "terminate"), count(&boots, "give job a")), (0, 1), "{boots}");
    let prepares = told(setup, "0s submit a x8\n1s created i1\n30s enrols i1\n20m starts a\n4h look\n5h finishes a\n");
    assert_eq!((count(&prepares, "terminate"), count(&prepares, "a is over, success")), (0, 1), "{prepares}");
    let silent = "0s submit a x8\n1s created i1\n30s enrols i1\n31s finishes a\n32s silent i1\n";
    let told = told(setup, &format!("{silent}1m40s destroyed i1\n2m look\n"));
    assert_eq!(count(&told, "instance i1 is gone"), 1, "idle and silent: {told}");
}
