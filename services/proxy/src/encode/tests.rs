//! Samples for the tests of the modules below.

use super::*;
use triptych_core::{DType, Extent, Fingerprint, Modality};

/// A READY output under the key `[seed; 32]`.
pub(super) fn encoded(seed: u8) -> Encoded {
    Encoded::cached(item(seed), Belief::Made)
}

pub(super) fn item(seed: u8) -> EncodedItem {
    EncodedItem {
        key: ContentKey::from_bytes([seed; 32]),
        fingerprint: Fingerprint::from_bytes([1; 32]),
        modality: Modality::Image,
        n_tokens: 4,
        hidden: 8,
        dtype: DType::F32,
        extent: Extent::Tokens,
        checksum: [seed; 32],
    }
}

#[test]
fn the_worker_that_holds_most_is_the_one_to_go_to() {
    let ids = |names: &[&str]| names.iter().map(|name| WorkerId::new(*name)).collect::<Vec<_>>();
    let cases: [(&[&[&str]], Option<&str>); 5] = [
        (&[], None),
        (&[&[], &[]], None),
        (&[&["b", "a"]], Some("a")),
        (&[&["a"], &["b"], &["b", "a"], &["b"]], Some("b")),
        (&[&["c"], &["b"]], Some("b")),
    ];
    for (held, expect) in cases {
        let held: Vec<_> = held.iter().map(|names| ids(names)).collect();
        let held: Vec<_> = held.iter().map(Vec::as_slice).collect();
        assert_eq!(holder_of_most(&held), expect.map(WorkerId::new), "{held:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_flight_is_due_when_its_most_patient_waiter_needs_it() {
    let (soon, late) = (Instant::now() + Duration::from_secs(1), Instant::now() + Duration::from_secs(9));
    let due = Due::new(soon);
    due.clone().extend(late);
    due.extend(soon);
    assert_eq!(due.latest(), late);
}
