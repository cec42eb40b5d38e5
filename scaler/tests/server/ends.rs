//! How machines and jobs end when something dies or is lost on the way.

use pilotlight_wire::agent::Directive;

use super::rig::{Rig, started};

#[tokio::test]
async fn a_machine_s_assignments_are_its_own() {
    let rig = Rig::new().await;
    // Two fill the first machine.
    for _ in 0..3 {
        rig.submit().await;
    }
    let bootstraps = rig.bootstraps(2).await;
    let (mut first, mut second) = (rig.enrol_as(&bootstraps[0]).await, rig.enrol_as(&bootstraps[1]).await);
    let starts = |directives: Vec<Directive>| -> Vec<_> {
        directives
            .into_iter()
            .filter_map(|one| if let Directive::Start(start) = one { Some(*start) } else { None })
            .collect()
    };
    let mine = starts(first.directives().await).remove(0);
    let other = starts(second.directives().await).remove(0);
    assert_ne!(mine.assignment, other.assignment);
    assert_eq!(second.event(mine.assignment, 1, started()).await.0, 404);
    assert_eq!(second.log(mine.assignment, 0, b"x").await.0, 404);
    assert_eq!(rig.job(mine.job.id).await["state"], "assigned");
    assert_eq!(rig.log(mine.job.id, "offset=0").await.0, b"");
    assert_eq!(first.event(mine.assignment, 1, started()).await.0, 200);
}
