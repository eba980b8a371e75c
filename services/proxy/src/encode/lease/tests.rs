//! Leases over a store in memory, on a paused clock: who waits, who takes over, and when they are given back.

use super::*;
use crate::cache::EncoderCache;
use crate::request_machine::action::LeaseOutcome;
use crate::request_machine::event::LeaseAnswer;
use crate::request_machine::lease::{LeaseRequest, LeaseStep};
use crate::request_machine::output::Origin;
use crate::request_machine::policy::{TTL, lease_ttl};
use crate::request_machine::tests::{item, wanted};
use bytes::Bytes;
use parking_lot::Mutex;
use triptych_core::EncodedItem;
use triptych_core::item::{EncoderOutput, from_f32};
use triptych_core::limits::Limits;
use triptych_ec::fault::{Fault, Faults, Faulty};
use triptych_ec::store::memory::MemoryStore;
use triptych_ec::store::{EcStore, Op};

type Counted = Arc<Mutex<Vec<LeaseOutcome>>>;

struct Fleet {
    store: Arc<MemoryStore>,
    faults: Faults,
}

impl Fleet {
    fn new() -> Self {
        Self { store: Arc::new(MemoryStore::new(1 << 20, &Limits::default())), faults: Faults::default() }
    }

    /// The leases of one more proxy.
    fn proxy(&self) -> (Leases, Counted) {
        let store = Arc::new(Faulty::new(self.store.clone(), self.faults.clone()));
        let counted = Counted::default();
        let count = Arc::clone(&counted);
        let leases = Leases {
            cache: EncoderCache::new(store, 1 << 20),
            tasks: TaskTracker::new(),
            runtime: Handle::current(),
            count: Arc::new(move |outcome| count.lock().push(outcome)),
        };
        (leases, counted)
    }

    async fn publish(&self, wanted: &Wanted) {
        self.store.put_if_absent(&wanted.key, object()).await.unwrap();
    }
}

fn object() -> Bytes {
    let output = EncoderOutput::seal(item(1), from_f32(&[0.5; 32], triptych_core::DType::F32)).unwrap();
    triptych_ec::object::encode(&output)
}

const COST: Duration = Duration::from_millis(100);

/// The end of asking for a lease, as the machine is driven by it.
enum Turn {
    Ours(HeldLease, bool),
    Anyones,
    Done(EncodedItem),
}

async fn turn(leases: &Leases) -> Turn {
    let (mut request, mut step) = LeaseRequest::new(Origin::Any, lease_ttl(Some(COST)));
    let mut held = None;
    loop {
        let next = match step {
            LeaseStep::Acquire(ttl) => {
                let answer = leases.acquire(&wanted(1), ttl).await.map(|answer| match answer {
                    Ok(lease) => {
                        let token = lease.fence();
                        held = Some(lease);
                        LeaseAnswer::Granted { token }
                    }
                    Err(left) => LeaseAnswer::Held { left },
                });
                request.answered(answer, Instant::now().into_std())
            }
            LeaseStep::Wait(patience) => {
                let found = leases.cache.wait(&wanted(1), patience).await;
                request.waited(found, Instant::now().into_std())
            }
            LeaseStep::Pause => {
                tokio::time::sleep_until(Instant::from_std(request.wake_at().unwrap())).await;
                request.woken(Instant::now().into_std())
            }
            LeaseStep::Granted { followed, .. } => return Turn::Ours(held.unwrap(), followed),
            LeaseStep::Without => return Turn::Anyones,
            LeaseStep::Found(item) => return Turn::Done(item),
        };
        step = next.expect("it was asked");
    }
}

#[tokio::test(start_paused = true)]
async fn a_follower_gets_the_result_the_moment_it_is_there() {
    let fleet = Fleet::new();
    let ((one, _), (two, _)) = (fleet.proxy(), fleet.proxy());
    let Turn::Ours(lease, false) = turn(&one).await else { panic!("it was free") };
    let began = Instant::now();
    let follows = turn(&two);
    let holds = async {
        // Far longer than an unrenewed lease: it is renewed.
        sleep(Duration::from_secs(30)).await;
        assert!(!lease.is_lost());
        fleet.publish(&wanted(1)).await;
        drop(lease);
        began.elapsed()
    };
    let (followed, published) = futures::join!(follows, holds);
    assert!(matches!(followed, Turn::Done(item) if item.key == wanted(1).key));
    assert!(began.elapsed() - published < Duration::from_millis(150), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn the_lease_of_a_holder_that_died_is_taken_over_when_it_ends() {
    let fleet = Fleet::new();
    let ((one, _), (two, _)) = (fleet.proxy(), fleet.proxy());
    let Turn::Ours(lease, _) = turn(&one).await else { panic!("it was free") };
    let began = Instant::now();
    // Dead: it neither renews nor gives back.
    lease.renewing.abort();
    let first = lease.fence();
    std::mem::forget(lease);
    let Turn::Ours(second, true) = turn(&two).await else { panic!("nobody holds it any more") };
    assert!(second.fence() > first);
    assert!(began.elapsed() >= TTL.0 && began.elapsed() < TTL.0 + Duration::from_millis(500));
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_gives_up_is_followed_at_once() {
    let fleet = Fleet::new();
    let ((one, _), (two, _)) = (fleet.proxy(), fleet.proxy());
    let Turn::Ours(lease, _) = turn(&one).await else { panic!("it was free") };
    let began = Instant::now();
    let gives_up = async {
        sleep(Duration::from_millis(700)).await;
        drop(lease);
    };
    let (next, ()) = futures::join!(turn(&two), gives_up);
    assert!(matches!(next, Turn::Ours(_, true)));
    assert!(began.elapsed() < Duration::from_millis(900), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_store_that_does_not_answer_or_has_no_leases_stops_nobody() {
    let fleet = Fleet::new();
    let (one, _) = fleet.proxy();
    fleet.faults.stand(Op::Lease, Fault::Hang);
    let began = Instant::now();
    assert!(matches!(turn(&one).await, Turn::Anyones));
    let first = began.elapsed();
    assert!(matches!(turn(&one).await, Turn::Anyones));
    assert_eq!(began.elapsed(), first, "the second does not wait for it again");
    fleet.faults.clear();
    sleep(Duration::from_secs(2)).await;
    assert!(matches!(turn(&one).await, Turn::Ours(..)), "it is asked again after a while");
}

#[tokio::test(start_paused = true)]
async fn a_lease_outlives_the_answer_until_the_durable_copy_is_there() {
    let fleet = Fleet::new();
    let ((one, _), (two, _)) = (fleet.proxy(), fleet.proxy());
    let Turn::Ours(lease, _) = turn(&one).await else { panic!("it was free") };
    lease.give_back_when_stored();
    let began = Instant::now();
    let written_behind = async {
        sleep(Duration::from_secs(5)).await;
        fleet.publish(&wanted(1)).await;
    };
    let (followed, ()) = futures::join!(turn(&two), written_behind);
    assert!(matches!(followed, Turn::Done(_)), "nobody encodes what is being written");
    assert!(began.elapsed() >= Duration::from_secs(5));
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_another_took_is_noticed() {
    let fleet = Fleet::new();
    let (one, counted) = fleet.proxy();
    let Turn::Ours(lease, _) = turn(&one).await else { panic!("it was free") };
    let token = lease.lease;
    fleet.store.release(&token).await.unwrap();
    sleep(TTL.0).await;
    assert!(lease.is_lost());
    assert_eq!(counted.lock().last(), Some(&LeaseOutcome::Lost));
}
