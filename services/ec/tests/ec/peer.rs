//! The direct path: outputs read from the memory of the worker that encoded them, items that are still being made, and
//! every way in which either end can go away.

use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use triptych_core::{EncodedItem, EncoderOutput, RequestId};
use triptych_ec::conformance::{sample_output, sample_variant};
use triptych_ec::connector::{
    CacheStatus, Completions, ConnectorSettings, ItemHint, LoadError, Loaded, Publish, SchedulerRole,
    WorkerRole, connect,
};
use triptych_ec::fault::{Fault, Faults, Faulty};
use triptych_ec::metered::NoObserver;
use triptych_ec::object::encode;
use triptych_ec::server::serve;
use triptych_ec::store::lease::Acquired;
use triptych_ec::store::memory::MemoryStore;
use triptych_ec::store::peer::{PeerCache, PeerCacheSettings, PeerTuning, Peers};
use triptych_ec::store::{EcStore, Op, PutOutcome};
use triptych_ec::testing::free_port;

use crate::{LIMIT, key};

/// The store that all share, and its faults as one worker meets them.
fn shared_store() -> (Arc<MemoryStore>, Faults, Arc<dyn EcStore>) {
    let store = Arc::new(MemoryStore::new(64 << 20, &Default::default()));
    let faults = Faults::default();
    (store.clone(), faults.clone(), Arc::new(Faulty::new(store, faults)))
}

/// A worker that encodes: its connector, its peer cache, and the server in front of it.
struct Encoder {
    worker: WorkerRole,
    peer_cache: Arc<PeerCache>,
    authority: String,
    server: JoinHandle<()>,
}

impl Encoder {
    async fn start(store: Arc<dyn EcStore>, settings: PeerCacheSettings) -> Self {
        let peer_cache = Arc::new(PeerCache::new(settings, &Default::default()));
        let publish = Publish::WriteBehind(peer_cache.clone());
        let settings = ConnectorSettings { publish, local_budget_bytes: 0, ..ConnectorSettings::default() };
        let (_, worker) = connect(store, Arc::new(NoObserver), settings);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let authority = listener.local_addr().unwrap().to_string();
        let in_peer_cache = peer_cache.clone();
        let server = tokio::spawn(async move {
            serve(listener, in_peer_cache, &Default::default(), std::future::pending()).await.unwrap();
        });
        Self { worker, peer_cache, authority, server }
    }

    /// Like SIGKILL: its memory is gone, and readers are cut off.
    fn kill(self) -> String {
        self.server.abort();
        self.authority
    }
}

/// A worker that reads.
struct Reader {
    scheduler: SchedulerRole,
    worker: WorkerRole,
    loaded: mpsc::UnboundedReceiver<Loaded>,
}

impl Reader {
    fn new(store: Arc<dyn EcStore>) -> Self {
        Self::with(store, ConnectorSettings::default())
    }

    fn with(store: Arc<dyn EcStore>, settings: ConnectorSettings) -> Self {
        let (sender, loaded) = mpsc::unbounded_channel();
        let completions = Completions::Callback(Arc::new(move |l| drop(sender.send(l))));
        let peers = Some(Arc::new(Peers::new(None, PeerTuning::default(), &Default::default())));
        let settings = ConnectorSettings { completions, peers, local_budget_bytes: 0, ..settings };
        let (scheduler, worker) = connect(store, Arc::new(NoObserver), settings);
        Self { scheduler, worker, loaded }
    }

    fn ask(&self, n: u128, item: &EncodedItem, hint: &ItemHint) {
        self.scheduler.update_state_with_hint(RequestId::from_bits(n), item, hint);
        self.worker.start_load_caches(self.scheduler.build_connector_meta());
    }

    async fn next(&mut self) -> Result<EncoderOutput, LoadError> {
        tokio::time::timeout(LIMIT, self.loaded.recv()).await.expect("a load ends").unwrap().result
    }
}

fn at(authority: &str) -> ItemHint {
    ItemHint { peers: vec![authority.to_owned()], ..ItemHint::default() }
}

fn pending() -> ItemHint {
    ItemHint { pending: true, until: Some(Instant::now() + LIMIT), ..ItemHint::default() }
}

async fn until(what: &str, condition: impl AsyncFn() -> bool) {
    let wait = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    assert!(tokio::time::timeout(LIMIT, wait).await.is_ok(), "never: {what}");
}

#[tokio::test]
async fn an_output_is_read_from_its_encoder_while_the_stores_copy_hangs() {
    let (store, faults, faulty) = shared_store();
    faults.stand(Op::Put, Fault::Hang);
    let encoder = Encoder::start(faulty, PeerCacheSettings::default()).await;
    let mut reader = Reader::new(store.clone());
    for (n, bytes) in [(1, 64), (2, 64 << 10), (3, 3 << 20)] {
        let output = sample_output(key(n), bytes);
        let published = encoder.worker.save_caches(output.clone()).await.unwrap();
        assert!(published.in_peer_cache && published.item == *output.item());
        reader.ask(n.into(), output.item(), &at(&encoder.authority));
        assert_eq!(reader.next().await.unwrap().rows(), output.rows());
    }
    assert_eq!(store.n_objects(), 0, "nothing was read from there");
}

#[tokio::test]
async fn the_stores_copy_follows_through_failures_and_the_object_stays_pinned_for_a_while() {
    let (store, faults, faulty) = shared_store();
    faults.queue(Op::Put, Fault::Error);
    faults.queue(Op::Put, Fault::LostAnswer);
    // No room beside what is pinned.
    let settings = PeerCacheSettings { budget_bytes: 0, linger: LIMIT, ..PeerCacheSettings::default() };
    let encoder = Encoder::start(faulty, settings).await;
    let output = sample_output(key(1), 4096);
    encoder.worker.save_caches(output.clone()).await.unwrap();
    until("the copy is written", async || store.get(&key(1)).await.unwrap().is_some()).await;
    assert!(encoder.peer_cache.is_pinned(&key(1)) && encoder.peer_cache.object(&key(1)).is_some());
    encoder.worker.drain().await;
    assert!(!encoder.peer_cache.is_pinned(&key(1)), "drain does not wait for what is only kept");
    assert_eq!(store.get(&key(1)).await.unwrap(), Some(encode(&output)));
}

#[tokio::test]
async fn an_encoder_that_dies_before_the_copy_is_written_leaves_a_miss_and_no_error() {
    let (store, faults, faulty) = shared_store();
    faults.stand(Op::Put, Fault::Hang);
    let encoder = Encoder::start(faulty, PeerCacheSettings::default()).await;
    let output = sample_output(key(1), 4096);
    encoder.worker.save_caches(output.clone()).await.unwrap();
    let authority = encoder.kill();
    let mut reader = Reader::new(store.clone());
    reader.ask(1, output.item(), &at(&authority));
    assert_eq!(reader.next().await.unwrap_err(), LoadError::Missing);
    // Encoded again, elsewhere; the dead one is not asked.
    let (_, _, through) = shared_store();
    let second = Encoder::start(through, PeerCacheSettings::default()).await;
    second.worker.save_caches(output.clone()).await.unwrap();
    let hint = ItemHint { peers: vec![authority, second.authority.clone()], ..ItemHint::default() };
    reader.ask(1, output.item(), &hint);
    assert_eq!(reader.next().await.unwrap().rows(), output.rows());
}

#[tokio::test]
async fn an_encoder_that_dies_after_the_copy_is_written_costs_nothing() {
    let (store, _, faulty) = shared_store();
    let encoder = Encoder::start(faulty, PeerCacheSettings::default()).await;
    let output = sample_output(key(1), 4096);
    encoder.worker.save_caches(output.clone()).await.unwrap();
    until("the copy is written", async || store.n_objects() == 1).await;
    let mut reader = Reader::new(store.clone());
    reader.ask(1, output.item(), &at(&encoder.kill()));
    assert_eq!(reader.next().await.unwrap().rows(), output.rows());
}

#[tokio::test]
async fn publishing_waits_for_room_when_too_much_is_unwritten() {
    let (store, faults, faulty) = shared_store();
    faults.queue(Op::Put, Fault::Latency(Duration::from_millis(50)));
    let settings = PeerCacheSettings { unwritten_bytes: 4096, ..PeerCacheSettings::default() };
    let encoder = Encoder::start(faulty, settings).await;
    encoder.worker.save_caches(sample_output(key(1), 4096)).await.unwrap();
    assert_eq!(store.n_objects(), 0);
    encoder.worker.save_caches(sample_output(key(2), 4096)).await.unwrap();
    assert!(store.get(&key(1)).await.unwrap().is_some(), "the second came when the first was written");
}

#[tokio::test]
async fn a_peer_that_gives_rubbish_is_not_believed_and_the_store_is_not_blamed() {
    let (store, _, faulty) = shared_store();
    let output = sample_output(key(1), 4096);
    store.put_if_absent(&key(1), encode(&output)).await.unwrap();
    let liar = Encoder::start(faulty, PeerCacheSettings::default()).await;
    let _pin = liar.peer_cache.place(key(1), encode(&sample_output(key(2), 64)));
    let mut reader = Reader::new(store.clone());
    reader.ask(1, output.item(), &at(&liar.authority));
    assert_eq!(reader.next().await.unwrap().rows(), output.rows());
    assert!(store.get(&key(1)).await.unwrap().is_some(), "a peer's fault is not the store's");
}

#[tokio::test]
async fn a_lost_object_is_published_again_from_the_peer_cache() {
    let (store, faults, faulty) = shared_store();
    let encoder =
        Encoder::start(faulty, PeerCacheSettings { linger: Duration::ZERO, ..Default::default() }).await;
    let output = sample_output(key(1), 4096);
    assert_eq!(encoder.worker.ensure_published(&key(1)).await.unwrap(), None, "nobody encoded it");
    encoder.worker.save_caches(output.clone()).await.unwrap();
    until("the copy is written", async || !encoder.peer_cache.is_pinned(&key(1))).await;
    let found = encoder.worker.ensure_published(&key(1)).await.unwrap().unwrap();
    assert_eq!((found.outcome, faults.n_calls(Op::Put)), (PutOutcome::AlreadyThere, 1));
    store.delete(&key(1)).await.unwrap();
    let again = encoder.worker.ensure_published(&key(1)).await.unwrap().unwrap();
    assert_eq!(again.item, *output.item());
    until("it is there again", async || store.get(&key(1)).await.unwrap().is_some()).await;
}

#[tokio::test]
async fn a_pending_item_is_waited_for_until_it_is_in_the_store() {
    let (store, _, faulty) = shared_store();
    let mut reader = Reader::new(faulty);
    let output = sample_output(key(1), 4096);
    let announced = EncodedItem { checksum: [0; 32], ..output.item().clone() };
    let Acquired::Granted(_) = store.acquire(&key(1), LIMIT).await.unwrap() else { panic!() };
    reader.ask(1, &announced, &pending());
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(reader.scheduler.has_caches(std::slice::from_ref(&announced)), [CacheStatus::Pending]);
    store.put_if_absent(&key(1), encode(&output)).await.unwrap();
    assert_eq!(reader.next().await.unwrap().item(), output.item(), "its header says what it is");
}

#[tokio::test]
async fn a_pending_item_is_read_from_its_encoder_as_soon_as_it_exists() {
    let (store, faults, faulty) = shared_store();
    faults.stand(Op::Put, Fault::Hang);
    let encoder = Encoder::start(faulty, PeerCacheSettings::default()).await;
    let Acquired::Granted(_) = store.acquire(&key(1), LIMIT).await.unwrap() else { panic!() };
    let mut reader = Reader::new(store);
    let output = sample_output(key(1), 4096);
    reader.ask(1, output.item(), &ItemHint { peers: vec![encoder.authority.clone()], ..pending() });
    tokio::time::sleep(Duration::from_millis(20)).await;
    encoder.worker.save_caches(output.clone()).await.unwrap();
    assert_eq!(reader.next().await.unwrap().rows(), output.rows());
}

#[tokio::test(start_paused = true)]
async fn an_item_that_is_encoded_here_waits_for_nothing_however_many_others_are() {
    let (store, ..) = shared_store();
    let mut reader = Reader::new(store);
    let outputs = [1, 2, 3, 4].map(|n| sample_output(key(n), 64));
    let started = Instant::now();
    reader.ask(1, outputs[3].item(), &pending());
    for output in &outputs {
        reader.worker.save_caches(output.clone()).await.unwrap();
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }
    assert_eq!(reader.next().await.unwrap().rows(), outputs[3].rows());
    assert_eq!(started.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn an_orphaned_pending_item_is_missing_after_a_grace_period() {
    let (store, _, faulty) = shared_store();
    let Acquired::Granted(lease) = store.acquire(&key(1), LIMIT).await.unwrap() else { panic!() };
    let orphan_grace = Duration::from_secs(2);
    let mut reader = Reader::with(faulty, ConnectorSettings { orphan_grace, ..ConnectorSettings::default() });
    let start = Instant::now();
    reader.ask(1, sample_output(key(1), 64).item(), &pending());
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert!(reader.loaded.try_recv().is_err(), "someone makes it");
    store.release(&lease).await.unwrap();
    assert_eq!(reader.next().await.unwrap_err(), LoadError::Missing);
    let took = start.elapsed() - Duration::from_secs(20);
    assert!((Duration::from_secs(2)..Duration::from_secs(4)).contains(&took), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_pending_item_is_waited_for_no_longer_than_its_last_request_wants_it() {
    let (store, _, faulty) = shared_store();
    let Acquired::Granted(_) = store.acquire(&key(1), 10 * LIMIT).await.unwrap() else { panic!() };
    let mut reader = Reader::new(faulty);
    let item = sample_output(key(1), 64).item().clone();
    let (start, short) = (Instant::now(), Duration::from_secs(3));
    reader.ask(1, &item, &ItemHint { until: Some(start + short), ..pending() });
    reader.ask(2, &item, &ItemHint { until: Some(start + 3 * short), ..pending() });
    assert!(matches!(reader.next().await.unwrap_err(), LoadError::TimedOut { .. }));
    assert_eq!(start.elapsed(), 3 * short, "the longer of the two");
    // And one whose requests have all gone is not loaded any more.
    reader.ask(3, &item, &pending());
    tokio::time::sleep(short).await;
    reader.scheduler.request_finished(RequestId::from_bits(3));
    for n in [1, 2] {
        reader.scheduler.request_finished(RequestId::from_bits(n));
    }
    assert!(matches!(reader.next().await.unwrap_err(), LoadError::Unavailable { .. }));
    assert_eq!(reader.scheduler.has_caches(&[item]), [CacheStatus::Missing]);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_stays_away_ends_the_wait() {
    let (_, faults, faulty) = shared_store();
    for op in [Op::Get, Op::Wait] {
        faults.stand(op, Fault::Error);
    }
    let mut reader = Reader::new(faulty);
    reader.ask(1, sample_output(key(1), 64).item(), &pending());
    assert!(matches!(reader.next().await.unwrap_err(), LoadError::Unavailable { .. }));
}

/// Waits must not take the turns of those who only read.
#[tokio::test]
async fn items_that_are_waited_for_hold_up_no_others() {
    let (store, _, faulty) = shared_store();
    let mut reader = Reader::with(faulty, ConnectorSettings { max_loads: 1, ..ConnectorSettings::default() });
    for n in 1..=5 {
        let Acquired::Granted(_) = store.acquire(&key(n), LIMIT).await.unwrap() else { panic!() };
        reader.ask(n.into(), sample_output(key(n), 64).item(), &pending());
    }
    let here = sample_output(key(9), 4096);
    store.put_if_absent(&key(9), encode(&here)).await.unwrap();
    reader.ask(9, here.item(), &ItemHint::default());
    assert_eq!(reader.next().await.unwrap().item(), here.item());
}

#[tokio::test]
async fn malformed_addresses_of_peers_are_not_asked() {
    let peers = Peers::new(None, PeerTuning::default(), &Default::default());
    for address in ["169.254.169.254:80", "http://127.0.0.1:80", "nowhere", ""] {
        assert_eq!(peers.get(address, &key(1)).await.unwrap(), None, "{address}");
    }
}

#[tokio::test]
async fn a_dead_peer_is_forgotten_for_a_moment() {
    let peers = Peers::new(None, PeerTuning::default(), &Default::default());
    let dead = format!("127.0.0.1:{}", free_port());
    assert!(peers.get(&dead, &key(1)).await.is_err());
    assert_eq!(peers.get(&dead, &key(1)).await.unwrap(), None, "it is not asked again");
}

#[tokio::test]
async fn two_encoders_of_one_key_each_serve_their_own_output() {
    let (store, _, faulty) = shared_store();
    let (a, b) = (
        Encoder::start(faulty.clone(), PeerCacheSettings::default()).await,
        Encoder::start(faulty, PeerCacheSettings::default()).await,
    );
    let (ours, theirs) = (sample_variant(key(1), 4096, 1), sample_variant(key(1), 4096, 2));
    a.worker.save_caches(ours.clone()).await.unwrap();
    b.worker.save_caches(theirs.clone()).await.unwrap();
    for (encoder, output) in [(&a, &ours), (&b, &theirs)] {
        let mut reader = Reader::new(store.clone());
        reader.ask(1, output.item(), &at(&encoder.authority));
        assert_eq!(reader.next().await.unwrap().rows(), output.rows());
    }
}

#[tokio::test]
async fn a_peer_cache_is_read_only() {
    let (_, _, faulty) = shared_store();
    let encoder = Encoder::start(faulty, PeerCacheSettings::default()).await;
    let remote = triptych_ec::store::remote::RemoteStore::new(
        &encoder.authority,
        Default::default(),
        &Default::default(),
    )
    .unwrap();
    let output = sample_output(key(1), 64);
    let _pin = encoder.peer_cache.place(key(1), encode(&output));
    assert_eq!(remote.heads(&[key(1)]).await.unwrap(), [Some(output.item().clone())]);
    assert_eq!(remote.list(None, 10).await.unwrap().len(), 1);
    use triptych_ec::EcError::Unsupported;
    let put = remote.put_if_absent(&key(2), encode(&sample_output(key(2), 64))).await;
    assert!(matches!(put, Err(Unsupported { .. })), "{put:?}");
    assert!(matches!(remote.delete(&key(1)).await, Err(Unsupported { .. })));
    assert!(matches!(remote.acquire(&key(1), LIMIT).await, Err(Unsupported { .. })));
    assert_eq!(encoder.peer_cache.object(&key(1)), Some(encode(&output)));
}
