//! Calls that code outside tests does not make, with the reason and the files that may.
//!
//! `clippy::disallowed_methods` cannot tell a crate from another nor tests from the rest; this can.

use crate::files::{rust, without_test_module};

/// A call that is refused.
struct Refused {
    call: &'static str,
    /// Folders that it is refused in.
    within: &'static [&'static str],
    /// Files and folders that may.
    except: &'static [&'static str],
    why: &'static str,
}

const REFUSED: [Refused; 4] = [
    Refused {
        call: ".unwrap()",
        within: &["kernels/src/", "proto/", "services/", "benches/src/"],
        except: &[],
        why: "`expect` states the invariant, or the error has a type",
    },
    Refused {
        call: "thread::sleep(",
        within: &["kernels/src/", "services/"],
        except: &[
            // File locks and claims of other processes have nothing to wait on.
            "services/ec/src/store/disk/lock.rs",
            "services/ec/src/store/shm/slab.rs",
            // Its work is to take time.
            "services/bench/src/overhead/null_workers.rs",
            "services/models/src/compute/timed.rs",
        ],
        why: "a wait is a wait for something: a channel, a timer, a condition",
    },
    Refused {
        call: "Instant::now()",
        within: &["kernels/src/", "services/core/src/", "services/engine/src/", "services/models/src/"],
        except: &[
            "services/core/src/clock.rs",
            // They measure.
            "kernels/src/cpu/peak.rs",
            "kernels/src/cpu/pool/workers.rs",
            // Its forwards take as long as they are told.
            "services/models/src/compute/timed.rs",
        ],
        why: "time is an argument here",
    },
    Refused {
        call: "tokio::spawn(",
        within: &["services/proxy/", "services/encoder/", "services/pd/", "services/runtime/"],
        except: &[],
        why: "drain waits for the tasks of its group, and for no other",
    },
];

/// Folders and files of tests and of their support.
fn is_test(name: &str) -> bool {
    ["/tests/", "/testing/", "/conformance/", "/testing.rs", "/conformance.rs", "/fault.rs", "/tests.rs"]
        .iter()
        .any(|part| name.contains(part))
}

#[test]
fn refused_calls_stand_in_no_code_outside_tests() {
    let mut found = Vec::new();
    for (name, text) in rust().iter().filter(|(name, _)| !is_test(name)) {
        let code = without_test_module(text);
        for (i, line) in code.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//")) {
            for refused in &REFUSED {
                let starts = |folders: &[&str]| folders.iter().any(|folder| name.starts_with(folder));
                if line.contains(refused.call) && starts(refused.within) && !starts(refused.except) {
                    found.push(format!("{name}:{}: `{}`: {}", i + 1, refused.call, refused.why));
                }
            }
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}
