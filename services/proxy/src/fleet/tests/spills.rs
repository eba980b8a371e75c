//! Encodes that PD workers with encoders take over from others.

use super::*;
use crate::fleet::roles::ElasticRole;

/// Encoder workers, and PD workers that all hold encoders, whose roles are elastic.
fn elastic(n_encoders: usize, n_pds: usize) -> Arc<FleetState> {
    let shared = with_roles(Roles::Auto, n_encoders, n_pds);
    for worker in all(&shared) {
        shared.set_up(&worker, describe(true), Instant::now());
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
    assert_eq!(given(&shared, 6, None), [4, 2]);
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
    assert_eq!(given(&shared, 4, Some(&one.id)), [3, 1]);
    // Where somebody waits to encode, a text is answered by the other.
    shared.report(&one, measured(900_000), true);
    let text = || Size::Request { items: vec![], prompt: Prefixes::default(), holders: vec![] };
    for _ in 0..10 {
        assert_eq!(*lease(&shared, &decode(), text(), &[]).unwrap().id(), two.id);
    }
}

/// Requests given to each worker, of so many, one after the other.
fn answered(shared: &Arc<FleetState>, n: usize) -> Vec<usize> {
    let size = || Size::Request { items: vec![], prompt: Prefixes::default(), holders: vec![] };
    let leases: Vec<_> = (0..n).map(|_| lease(shared, &decode(), size(), &[]).unwrap()).collect();
    all(shared).iter().map(|worker| leases.iter().filter(|lease| *lease.id() == worker.id).count()).collect()
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_was_given_a_role_gets_that_half_alone() {
    for roles in Roles::ALL {
        let shared = with_roles(roles, 0, 2);
        for worker in all(&shared) {
            shared.set_up(&worker, describe(true), Instant::now());
            shared.report(&worker, measured(0), true);
        }
        let [one, two] = <[_; 2]>::try_from(all(&shared)).ok().unwrap();
        assert_eq!(answered(&shared, 6), [3, 3]);
        let fleet = Fleet { shared: Arc::clone(&shared), _members: JoinSet::new() };
        fleet.assign(&two.id, ElasticRole::Encoder).unwrap();
        assert_eq!(answered(&shared, 6), [6, 0], "{roles:?}");
        assert_eq!(
            given(&shared, 6, Some(&one.id)),
            [0, 6],
            "{roles:?}: not even where the request is placed"
        );
        assert_eq!(fleet.assign(&one.id, ElasticRole::Encoder), Err(RoleError::LastPd));
        assert_eq!(fleet.assign(&WorkerId::new("pd@x"), ElasticRole::Pd), Err(RoleError::Unknown));
        // Rather than none.
        shared.set_down(&one);
        assert_eq!(answered(&shared, 2), [0, 2]);
        shared.set_up(&one, describe(true), Instant::now());
        fleet.assign(&two.id, ElasticRole::Both).unwrap();
        assert_eq!(answered(&shared, 6), [3, 3], "{roles:?}");
        shared.set_up(&one, describe(false), Instant::now());
        assert_eq!(fleet.assign(&one.id, ElasticRole::Pd), Err(RoleError::OneHalf));
    }
}
