//! Whether what Docker says of a container's end is how the job ended.
//!
//! Measured on Docker 26.1, when dockerd is away for a while:
//!
//! | dockerd | live-restore | what it says of the container afterwards |
//! |---|---|---|
//! | stopped | off | 143, or what the job makes of SIGTERM; a wait that was under way answers it just before |
//! | killed | off | 143, or the job's own code if it ended meanwhile; ended by the dockerd that starts |
//! | stopped, killed | on | the job's own code |
//! | stopped | on, the job ends while dockerd waits for its last callers | 255; the wait answers the job's own code |
//! | killed with everything else, as by a power cut | either | 255, ended when dockerd starts |

use jiff::{SignedDuration, Timestamp};

use crate::container::Exit;

/// The code that Docker makes up for a container that it does not find any more.
const MADE_UP: i32 = 255;

/// How far dockerd's look at its containers may lie before it answers again.
const START_UP: SignedDuration = SignedDuration::from_secs(2);

/// How the end of a container was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sight {
    /// Docker was there from the last look at the running container to its end.
    Whole,
    /// Docker was away in between, or may have been.
    Broken {
        /// What a wait answered before Docker went.
        waited: Option<i32>,
        /// When it last did not answer, if somebody was there to ask.
        away: Option<Timestamp>,
    },
}

/// The job's own exit code, or why nobody knows it.
pub(super) fn own_code(exit: &Exit, sight: Sight, live_restore: bool) -> Result<Option<i32>, String> {
    let Sight::Broken { waited, away } = sight else { return Ok(exit.code) };
    if !live_restore {
        let code = exit.code.map(|code| format!(" (exit code {code})")).unwrap_or_default();
        return Err(format!(
            "Docker was stopped or died while the job ran, which ends containers unless live-restore is set{code}"
        ));
    }
    if waited.is_some() {
        return Ok(waited);
    }
    // A job that ended with this code by itself did so before Docker came back.
    let while_starting = away.is_none_or(|away| exit.finished_at.saturating_add(START_UP).is_ok_and(|at| at >= away));
    if exit.code == Some(MADE_UP) && while_starting {
        return Err("Docker died and lost sight of the job; nobody knows how it ended".to_owned());
    }
    Ok(exit.code)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn exit(code: i32, finished_at: i64) -> Exit {
        Exit { code: Some(code), out_of_memory: false, started_at: at(0), finished_at: at(finished_at) }
    }

    fn broken(waited: Option<i32>, away: i64) -> Sight {
        Sight::Broken { waited, away: Some(at(away)) }
    }

    #[test]
    fn a_code_counts_when_docker_saw_the_end() {
        for code in [0, 1, 137, 143, 255] {
            assert_eq!(own_code(&exit(code, 50), Sight::Whole, false), Ok(Some(code)));
        }
    }

    #[test]
    fn without_live_restore_docker_takes_jobs_along() {
        for code in [0, 1, 137, 143, 255] {
            for waited in [None, Some(code)] {
                let reason = own_code(&exit(code, 50), broken(waited, 60), false).unwrap_err();
                assert!(reason.contains(&format!("(exit code {code})")), "{reason}");
            }
        }
    }

    #[test]
    fn with_live_restore_the_code_is_the_jobs_own_unless_docker_made_it_up() {
        for code in [0, 1, 137, 143] {
            assert_eq!(own_code(&exit(code, 99), broken(None, 100), true), Ok(Some(code)));
        }
        assert_eq!(own_code(&exit(255, 50), broken(None, 100), true), Ok(Some(255)), "long before Docker came back");
        assert!(own_code(&exit(255, 99), broken(None, 100), true).is_err());
        assert!(own_code(&exit(255, 50), Sight::Broken { waited: None, away: None }, true).is_err(), "nobody looked");
        assert_eq!(own_code(&exit(255, 99), broken(Some(7), 100), true), Ok(Some(7)), "the wait had it");
    }
}
