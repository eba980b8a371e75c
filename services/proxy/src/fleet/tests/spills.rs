//! Encodes that PD workers with encoders take over from others.

use super::*;

/// Encoder workers, and PD workers that all hold encoders, whose roles are elastic.
fn elastic(n_encoders: usize, n_pds: usize) -> Arc<FleetState> {
    let shared = with_roles(Roles::Auto, n_encoders, n_pds);
    for worker in all(&shared) {
        shared.set_up(&worker, describe(true));
        shared.report(&worker, measured(0), true);
    }
    shared
}

/// Encodes given to each worker, of so many.
fn given(shared: &Arc<FleetState>, n: usize, placement: Option<&WorkerId>) -> Vec<usize> {
    let size = || Size::Item { key: None, bytes: 1, placement: placement.cloned() };
    let leases: Vec<_> = (0..n).map(|_| lease(shared, &encode(), size(), &[]).unwrap()).collect();
    assert!(leases.iter().all(|lease| !lease.is_last_resort()));
    all(shared).iter().map(|worker| leases.iter().filter(|lease| *lease.id() == worker.id).count()).collect()
}

#[tokio::test(start_paused = true)]
async fn what_an_encoder_worker_would_do_later_spills_to_pd_workers() {
    let shared = elastic(1, 1);
    assert_eq!(given(&shared, 1, None), [1, 0]);
    assert_eq!(given(&shared, 6, None), [3, 3]);
    // With sixteen requests under way an encode there delays all of them.
    let pd = &all(&shared)[1];
    let mut busy = measured(0);
    busy.load.as_mut().unwrap().running = 16;
    shared.report(pd, busy, true);
    assert_eq!(given(&shared, 5, None), [5, 0]);
    let catalog = shared.catalog.borrow().clone();
    assert_eq!(shared.able(&catalog, &encode(), &[]).unwrap().1, None);
    shared.set_down(&all(&shared)[0]);
    let catalog = shared.catalog.borrow().clone();
    assert_eq!(shared.able(&catalog, &encode(), &[]).unwrap().1, Some(Reason::LastResort));
}

#[tokio::test(start_paused = true)]
async fn items_of_a_placed_request_are_shared_with_a_worker_that_has_nothing_to_do() {
    let shared = elastic(0, 2);
    let [one, two] = <[_; 2]>::try_from(all(&shared)).ok().unwrap();
    assert_eq!(given(&shared, 1, Some(&one.id)), [1, 0]);
    assert_eq!(given(&shared, 4, Some(&one.id)), [2, 2]);
    // Where somebody waits to encode, a text is answered by the other.
    shared.report(&one, measured(900_000), true);
    let text = || Size::Request { items: vec![], prompt: Prefixes::default(), holders: vec![] };
    for _ in 0..10 {
        assert_eq!(*lease(&shared, &decode(), text(), &[]).unwrap().id(), two.id);
    }
}
