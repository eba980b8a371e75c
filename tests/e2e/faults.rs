//! Requests that kill workers: a panic, an abort, an endless loop and a memory bomb, planted by request in PD workers and
//! encoder workers of the tests (`faulty-worker`), beside honest streams. None of those may be lost or stand still.

use parking_lot::Mutex;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tonic::transport::Channel;
use tonic::{Code, Status};
use triptych_proto::v1;
use triptych_proto::v1::generate_response::Kind;
use triptych_proto::v1::triptych_client::TriptychClient;
use triptych_runtime::watchdog::{MEMORY_EXIT_CODE, STUCK_EXIT_CODE};
use triptych_tests::client::{about_images, connect};
use triptych_tests::cluster::reqwest_client;
use triptych_tests::faults::{Fault, STEP_TIMEOUT};
use triptych_tests::process::{Process, eventually, free_port};
use triptych_tests::samples::heldout;

const N_STREAMS: usize = 40;
const N_PDS: usize = 3;
const N_ENCODERS: usize = 2;
/// Workers that one bad request may end: the first, the one that it is sent to next, and the one that has it alone.
const MAX_DEATHS: usize = 3;
/// Longest time of a bad request: far below the default limit of a request.
const BAD_PATIENCE: Duration = Duration::from_secs(60);
/// Longest pause of a stream beside a bad request, without the time after which a worker counts as stuck. A quiet machine
/// shows 2 s at most; how fast this one loads a successor beside 40 streams is not what is tested.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// Lines of each worker's log that a failed test shows.
const SHOWN_LINES: usize = 300;

/// A worker of the tests that is started again whenever it ends.
struct KeptWorker {
    address: String,
    /// Output of all its processes.
    log: PathBuf,
    /// Exit codes of its processes; `None`: a signal.
    ends: Arc<Mutex<Vec<Option<i32>>>>,
    stop: Arc<AtomicBool>,
    keeper: Option<JoinHandle<()>>,
}

impl KeptWorker {
    fn start(role: &str, store: &str, journal: &Path) -> Self {
        let address = format!("127.0.0.1:{}", free_port());
        let args = [role.to_owned(), address.clone(), store.to_owned(), journal.display().to_string()];
        let log = journal.with_extension("log");
        let output = File::create(&log).expect("a file");
        let spawn = move || -> Child {
            let mut command = Command::new(env!("CARGO_BIN_EXE_faulty-worker"));
            let output = || output.try_clone().expect("a handle");
            command.args(&args).stdin(Stdio::null()).stdout(output()).stderr(output());
            command.spawn().expect("it starts")
        };
        let (ends, stop) = (Arc::<Mutex<Vec<_>>>::default(), Arc::<AtomicBool>::default());
        let (seen, stopped) = (Arc::clone(&ends), Arc::clone(&stop));
        let keeper = std::thread::spawn(move || {
            let mut child = spawn();
            while !stopped.load(Ordering::Relaxed) {
                if let Some(status) = child.try_wait().expect("own child") {
                    seen.lock().push(status.code());
                    child = spawn();
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            let _ = child.kill();
            let _ = child.wait();
        });
        Self { address, log, ends, stop, keeper: Some(keeper) }
    }
}

impl Drop for KeptWorker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join();
        }
        if std::thread::panicking() {
            let log = std::fs::read_to_string(&self.log).unwrap_or_default();
            let lines: Vec<_> = log.lines().collect();
            let last = &lines[lines.len().saturating_sub(SHOWN_LINES)..];
            eprintln!("--- log of the worker at {}\n{}", self.address, last.join("\n"));
        }
    }
}

/// A cluster whose workers can be killed by request.
struct FaultyCluster {
    pds: Vec<KeptWorker>,
    encoders: Vec<KeptWorker>,
    grpc: String,
    metrics: String,
    _proxy: Process,
    _store: Process,
    _journals: tempfile::TempDir,
}

impl FaultyCluster {
    async fn start() -> Self {
        let [store, http, grpc] = [(); 3].map(|()| format!("127.0.0.1:{}", free_port()));
        let store_process = Process::start(&["store", "--grpc", &store]);
        eventually("the store listens", async || tokio::net::TcpStream::connect(&store).await.ok()).await;
        let journals = tempfile::tempdir().expect("a folder");
        let keep = |role: &str, n: usize| -> Vec<KeptWorker> {
            let journal = |i| journals.path().join(format!("{role}-{i}"));
            (0..n).map(|i| KeptWorker::start(role, &store, &journal(i))).collect()
        };
        let (pds, encoders) = (keep("pd", N_PDS), keep("encoder", N_ENCODERS));
        let ec = format!("grpc://{store}");
        let mut args = vec!["proxy", "--http", &http, "--grpc", &grpc, "--ec", &ec];
        pds.iter().for_each(|worker| args.extend(["--pd", &worker.address]));
        encoders.iter().for_each(|worker| args.extend(["--encoder", &worker.address]));
        let proxy = Process::start(&args);
        let (grpc, metrics) = (format!("http://{grpc}"), format!("http://{http}/metrics"));
        let (_proxy, _store, _journals) = (proxy, store_process, journals);
        let cluster = Self { pds, encoders, grpc, metrics, _proxy, _store, _journals };
        cluster.wait_ready().await;
        cluster
    }

    /// Waits until the proxy has all workers, so that every end of one was noticed.
    async fn wait_ready(&self) {
        eventually("all workers are ready", async || {
            let text = reqwest_client().get(&self.metrics).send().await.ok()?.text().await.ok()?;
            let ready = |role, n| {
                text.contains(&format!("triptych_fleet_workers{{role=\"{role}\",state=\"ready\"}} {n}"))
            };
            (ready("pd", N_PDS) && ready("encoder", N_ENCODERS)).then_some(())
        })
        .await;
    }

    fn ends(workers: &[KeptWorker]) -> Vec<Option<i32>> {
        workers.iter().flat_map(|worker| worker.ends.lock().clone()).collect()
    }
}

/// Text of an answer, and the longest pause between two of its pieces.
struct Read {
    text: String,
    pause: Duration,
}

async fn read(client: &mut TriptychClient<Channel>, request: v1::GenerateRequest) -> Result<Read, Status> {
    let mut stream = client.generate(request).await?.into_inner();
    let (mut read, mut latest) = (Read { text: String::new(), pause: Duration::ZERO }, None::<Instant>);
    loop {
        let message = stream.message().await?.ok_or_else(|| Status::unknown("it ended without a summary"))?;
        match message.kind {
            Some(Kind::Delta(delta)) => {
                let now = Instant::now();
                let since = latest.replace(now).map_or(Duration::ZERO, |latest| now - latest);
                read.pause = read.pause.max(since);
                read.text.push_str(&delta.text);
            }
            Some(Kind::Summary(_)) => return Ok(read),
            _ => {}
        }
    }
}

/// A greedy request with words and an image of its own; every tenth has a new image each time, so that it is encoded.
fn honest(stream: usize, round: usize) -> v1::GenerateRequest {
    let new_image = || [heldout("scene.png"), format!("{stream}.{round}").into_bytes()].concat();
    let images = if stream.is_multiple_of(10) { vec![new_image()] } else { Vec::new() };
    let mut request = about_images(&format!("Tell me about number {stream}."), images);
    request.sampling = Some(v1::Sampling {
        temperature: Some(0.0),
        max_tokens: Some(80),
        ignore_eos: true,
        ..v1::Sampling::default()
    });
    request
}

fn bad_prompt(fault: Fault) -> v1::GenerateRequest {
    let mut request = about_images("Please end.", Vec::new());
    request.sampling = Some(v1::Sampling { seed: Some(fault.seed()), ..v1::Sampling::default() });
    request
}

fn bad_item(fault: Fault) -> v1::GenerateRequest {
    about_images("What is in this picture?", vec![fault.item(heldout("scene.png"))])
}

/// Streams that are asked again and again until they are stopped: failures, rounds, and the longest pause.
struct HonestStreams {
    stop: Arc<AtomicBool>,
    tasks: Vec<tokio::task::JoinHandle<(usize, Duration)>>,
}

impl HonestStreams {
    /// `expected`: the text of each.
    fn start(client: &TriptychClient<Channel>, expected: &[String]) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let stream = |(i, expected): (usize, &String)| {
            let (mut client, expected, stop) = (client.clone(), expected.clone(), Arc::clone(&stop));
            tokio::spawn(async move {
                let (mut n_rounds, mut pause) = (0, Duration::ZERO);
                while n_rounds == 0 || !stop.load(Ordering::Relaxed) {
                    n_rounds += 1;
                    let read = read(&mut client, honest(i, n_rounds)).await;
                    let read = read.unwrap_or_else(|status| panic!("stream {i} is lost: {status:?}"));
                    assert_eq!(read.text, expected, "stream {i}, round {n_rounds}");
                    pause = pause.max(read.pause);
                }
                (n_rounds, pause)
            })
        };
        let tasks = expected.iter().enumerate().map(stream).collect();
        Self { stop, tasks }
    }

    /// The longest pause of any.
    async fn stop(self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        let mut longest = Duration::ZERO;
        for task in self.tasks {
            let (n_rounds, pause) = task.await.expect("nothing honest is lost");
            assert!(n_rounds > 0);
            longest = longest.max(pause);
        }
        longest
    }
}

/// Sends a bad request: it is refused, with a type, and so is the same again, which ends nobody. A worker that is stuck where
/// nothing loops is one that the machine gave no time.
async fn refused(
    cluster: &FaultyCluster,
    client: &TriptychClient<Channel>,
    (fault, request): (Fault, v1::GenerateRequest),
) -> Status {
    let mut client = client.clone();
    let is_of_fault = |code: &Option<i32>| fault == Fault::Loop || *code != Some(STUCK_EXIT_CODE.into());
    let n_ends = || {
        [&cluster.pds, &cluster.encoders]
            .map(|workers| FaultyCluster::ends(workers).into_iter().filter(is_of_fault).count())
    };
    let mut send = async || {
        let sent = tokio::time::timeout(BAD_PATIENCE, read(&mut client, request.clone())).await;
        sent.expect("it ends in time").err().expect("it is refused")
    };
    let before = n_ends();
    let status = send().await;
    cluster.wait_ready().await;
    let after = n_ends();
    let n: usize = after.iter().sum::<usize>() - before.iter().sum::<usize>();
    assert!(n <= MAX_DEATHS, "{n} workers ended for one request");
    let again = send().await;
    assert_eq!((again.code(), class(&again)), (status.code(), class(&status)), "the same again: {again}");
    assert_eq!(n_ends(), after, "workers ended for what had been refused");
    status
}

fn class(status: &Status) -> &str {
    status.metadata().get("triptych-class").and_then(|class| class.to_str().ok()).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_kill_workers_are_refused_and_hurt_nobody_else() {
    let cluster = FaultyCluster::start().await;
    let client = connect(&cluster.grpc).await;
    let undisturbed = futures::future::join_all((0..N_STREAMS).map(|i| {
        let mut client = client.clone();
        async move { read(&mut client, honest(i, 0)).await.expect("an answer") }
    }));
    let undisturbed = undisturbed.await;
    let usual = undisturbed.iter().map(|read| read.pause).max().unwrap_or_default();
    let expected: Vec<_> = undisturbed.into_iter().map(|read| read.text).collect();
    let streams = HonestStreams::start(&client, &expected);
    for fault in Fault::ALL {
        let status = refused(&cluster, &client, (fault, bad_prompt(fault))).await;
        assert_eq!((status.code(), class(&status)), (Code::Internal, "quarantined"), "{fault:?}: {status}");
        let status = refused(&cluster, &client, (fault, bad_item(fault))).await;
        let expected = if fault == Fault::Panic { "internal" } else { "quarantined" };
        assert_eq!((status.code(), class(&status)), (Code::Internal, expected), "{fault:?}: {status}");
    }
    let pause = streams.stop().await;
    println!("longest pause of a stream: {pause:?}, without faults {usual:?}");
    assert!(pause <= STEP_TIMEOUT + MAX_PAUSE, "{pause:?}, without faults {usual:?}");
    for workers in [&cluster.pds, &cluster.encoders] {
        let ends = FaultyCluster::ends(workers);
        for code in [STUCK_EXIT_CODE, MEMORY_EXIT_CODE] {
            assert!(ends.contains(&Some(code.into())), "{code} is among {ends:?}");
        }
        assert!(ends.contains(&None), "a signal is among {ends:?}");
    }
}
