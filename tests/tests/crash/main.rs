//! The crash matrix: one test per failpoint of the programs' sources. Each kills one process at that step of a job's
//! life, with SIGKILL, and looks whether the job, its output and its machine come out as if nothing had happened.
//!
//! There is no list to keep: a `failpoint!` in the sources of the scaler or the agent is a test here.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod life;

use std::{collections::BTreeSet, fs, path::Path, process::ExitCode};

use libtest_mimic::{Arguments, Trial};

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let trials = if cfg!(feature = "failpoints") {
        failpoints().into_iter().map(|name| Trial::test(name.clone(), move || life::survive(&name))).collect()
    } else {
        vec![Trial::test("failpoints_are_built_in", || {
            Err("the programs die nowhere: build these tests with `--features failpoints`".into())
        })]
    };
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// The names of all failpoints in the sources.
fn failpoints() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for program in ["scaler", "agent"] {
        let before = names.len();
        scan(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(program).join("src"), &mut names);
        assert!(names.len() > before, "no failpoint in the sources of the {program}");
    }
    names
}

fn scan(dir: &Path, names: &mut BTreeSet<String>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            scan(&path, names);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            for call in fs::read_to_string(&path).unwrap().split("failpoint!(").skip(1) {
                let name = call.trim_start().strip_prefix('"').and_then(|rest| rest.split('"').next());
                let name = name.unwrap_or_else(|| panic!("a failpoint without a name in {}", path.display()));
                assert!(names.insert(name.to_owned()), "failpoint {name} is there twice");
            }
        }
    }
}
