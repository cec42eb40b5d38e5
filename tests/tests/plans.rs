//! Every script of `tests/plans` says what the planner does.

use std::{fs, path::Path};

#[test]
fn scripts_say_what_the_planner_does() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("plans");
    let mut scripts: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    scripts.sort();
    assert!(scripts.len() >= 29, "the scripts are there");
    let mut stale = Vec::new();
    for path in scripts {
        let script = fs::read_to_string(&path).unwrap();
        let now = pilotlight_tests::plans::run(&script).unwrap_or_else(|error| panic!("{}: {error:#}", path.display()));
        if now == script {
            continue;
        }
        if std::env::var_os("UPDATE_PLANS").is_some() {
            fs::write(&path, &now).unwrap();
        }
        stale.push(format!("--- {}\n{now}", path.display()));
    }
    assert!(stale.is_empty(), "run with UPDATE_PLANS=1 and read the difference:\n{}", stale.join("\n"));
}
