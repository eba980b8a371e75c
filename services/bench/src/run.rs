//! One run: requests are sent when their time has come, whoever is slow, and each becomes an outcome.
//!
//! ```text
//!  0        warm-up         from        window         to      tail      drain
//!  |──────── load ───────────|────────── load ──────────|─ load ─|────────|
//! ```
//!
//! Load goes on behind the window until all that was due in it has ended, so that the last of them meet the same load
//! as the first; then what is left is let go. Bytes are made ahead of their time, on other threads, in a bounded
//! number; if they are late all the same, that is measured and told.

mod finish;

use crate::arrivals::Arrivals;
use crate::client::{Clock, Kit, Ready, Reply, Target};
use crate::judge::Window;
use crate::offered::{ItemShape, Offered};
use crate::outcome::{End, ItemCounts, Outcome};
use crate::result::Sample;
use crate::scrape::{Scraped, Scraper};
use crate::workload::{Requests, Workload};
use futures::{StreamExt, stream};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout_at};

pub use finish::run_result;

/// Requests whose bytes are ready before their time.
const N_AHEAD: usize = 48;
/// Threads that make them.
const N_MAKERS: usize = 4;
/// Time between two samples of the timeline.
const SAMPLE_EVERY: Duration = Duration::from_secs(1);

/// What a run is to be.
#[derive(Clone, Debug)]
pub struct RunPlan {
    /// Requests a second, in the mean.
    pub rate: f64,
    /// How they are spread.
    pub arrivals: Arrivals,
    /// Of the workload.
    pub seed: u64,
    /// Before the window.
    pub warm_up: Duration,
    /// Requests that are judged.
    pub n_requests: u64,
    /// The longest window, whatever number that is.
    pub max_window: Duration,
    /// How long after the window what was due in it may take.
    pub drain: Duration,
    /// The 99th percentile of the bench's own lateness that is allowed. None: a tenth of the promised time to first
    /// token, and at least 20 ms.
    pub max_late: Option<Duration>,
}

impl RunPlan {
    /// From the end of the warm-up until so many requests were due.
    pub fn window(&self, workload: &Workload) -> Window {
        let requests = workload.requests(self.rate, self.arrivals, self.seed);
        let end = self.warm_up + self.max_window;
        let mut judged =
            requests.map(|o| o.at).skip_while(|at| *at < self.warm_up).take_while(|at| *at < end);
        // The first one behind the window is where it ends.
        let behind = judged.nth(usize::try_from(self.n_requests).unwrap_or(usize::MAX));
        Window { from: self.warm_up, to: behind.unwrap_or(end) }
    }
}

/// What is told while it runs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// Since its start.
    pub elapsed: Duration,
    /// Until the end of its window.
    pub window_end: Duration,
    /// Requests that were sent.
    pub n_sent: u64,
    /// Requests that ended.
    pub n_ended: u64,
}

/// What became of a run.
#[derive(Debug)]
pub struct Ran {
    /// Every request that was sent.
    pub outcomes: Vec<Outcome>,
    /// What is judged.
    pub window: Window,
    /// What was sent, and what the server said beside the tokens.
    pub asked: Vec<Asked>,
    /// One sample a second.
    pub timeline: Vec<Sample>,
    /// The server's counters before and after.
    pub scraped: (Scraped, Scraped),
}

/// A request that ended, beside its outcome; by the same index.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Its index.
    pub index: u64,
    /// Pictures.
    pub n_images: u32,
    /// Sound.
    pub audio: Duration,
    /// What the server said.
    pub reply: Reply,
}

/// Sends a run's requests to a target and waits for them. `progress` hears how far it is.
pub async fn run(
    target: &Arc<dyn Target>,
    workload: &Workload,
    kit: &Kit,
    plan: &RunPlan,
    observers: (&Scraper, &watch::Sender<Progress>),
) -> Ran {
    let (scraper, progress) = observers;
    let window = plan.window(workload);
    let before = scraper.scrape().await;
    let mut ready =
        make_ahead(Arc::clone(target), kit.clone(), workload.requests(plan.rate, plan.arrivals, plan.seed));
    // The first ones are made before the clock starts.
    let mut first = ready.recv().await;
    let mut run = Running::new(window, plan.drain, progress);
    let (in_flight, watched) = watch::channel(0u64);
    let samples = tokio::spawn(sample(scraper.clone(), run.clock, watched));
    while let Some((offered, send)) = first.take() {
        if !run.wait_until(offered.at).await {
            break;
        }
        run.send(offered, send);
        let _ = in_flight.send(run.waiting.len() as u64);
        first = ready.recv().await;
    }
    drop(ready);
    run.drain().await;
    drop(in_flight);
    let timeline = samples.await.unwrap_or_default();
    let after = scraper.scrape().await;
    Ran { outcomes: run.outcomes, window, asked: run.asked, timeline, scraped: (before, after) }
}

/// Makes requests ready in their order, some ahead of when they are taken.
fn make_ahead(target: Arc<dyn Target>, kit: Kit, requests: Requests) -> mpsc::Receiver<(Offered, Ready)> {
    let (sender, receiver) = mpsc::channel(N_AHEAD);
    let made = stream::iter(requests).map(move |offered| {
        let (target, kit) = (Arc::clone(&target), kit.clone());
        tokio::task::spawn_blocking(move || {
            let ready = target.prepare(&offered, &kit);
            (offered, ready)
        })
    });
    let mut made = made.buffered(N_MAKERS);
    tokio::spawn(async move {
        while let Some(Ok(one)) = made.next().await {
            if sender.send(one).await.is_err() {
                return;
            }
        }
    });
    receiver
}

/// A request that was sent and has not ended.
struct Waiting {
    due: Duration,
    sent: Duration,
    n_items: u32,
    n_images: u32,
    audio: Duration,
}

struct Running<'a> {
    clock: Clock,
    window: Window,
    drain: Duration,
    waiting: HashMap<u64, Waiting>,
    /// Of those, the judged ones.
    n_judged_waiting: u64,
    tasks: JoinSet<(u64, Reply)>,
    outcomes: Vec<Outcome>,
    asked: Vec<Asked>,
    progress: &'a watch::Sender<Progress>,
}

impl<'a> Running<'a> {
    fn new(window: Window, drain: Duration, progress: &'a watch::Sender<Progress>) -> Self {
        Self {
            clock: Clock::started(),
            window,
            drain,
            waiting: HashMap::new(),
            n_judged_waiting: 0,
            tasks: JoinSet::new(),
            outcomes: Vec::new(),
            asked: Vec::new(),
            progress,
        }
    }

    fn end(&self) -> Instant {
        self.clock.start + self.window.to + self.drain
    }

    /// Waits until `at`, taking in what ends before. False: behind the window everything judged has ended, or its
    /// time is over.
    async fn wait_until(&mut self, at: Duration) -> bool {
        let due = self.clock.start + at;
        loop {
            while let Some(ended) = self.tasks.try_join_next() {
                self.ended(ended.ok());
            }
            if at >= self.window.to && (self.n_judged_waiting == 0 || Instant::now() >= self.end()) {
                return false;
            }
            tokio::select! {
                // Sending comes first: what ended waits, what is due does not.
                biased;
                () = sleep_until(due.min(self.end())) => {
                    if due <= Instant::now() && (at < self.window.to || self.n_judged_waiting > 0) {
                        return true;
                    }
                }
                Some(ended) = self.tasks.join_next() => self.ended(ended.ok()),
            }
        }
    }

    fn send(&mut self, offered: Offered, ready: Ready) {
        let (clock, index) = (self.clock, offered.index);
        let images = offered.items.iter().filter(|i| matches!(i.shape, ItemShape::Image { .. }));
        let audio = offered.items.iter().map(|i| match i.shape {
            ItemShape::Audio { millis } => Duration::from_millis(millis.into()),
            ItemShape::Image { .. } => Duration::ZERO,
        });
        let waiting = Waiting {
            due: offered.at,
            sent: clock.now(),
            n_items: offered.items.len() as u32,
            n_images: images.count() as u32,
            audio: audio.sum(),
        };
        self.n_judged_waiting += u64::from(self.window.has(waiting.due));
        self.waiting.insert(index, waiting);
        self.tasks.spawn(async move { (index, ready(clock).await) });
        self.tell();
    }

    /// A task ended; one that panicked is found among those that still wait, at the end.
    fn ended(&mut self, ended: Option<(u64, Reply)>) {
        let Some((index, reply)) = ended else { return };
        let Some(waiting) = self.waiting.remove(&index) else { return };
        self.settle(index, waiting, reply);
        self.tell();
    }

    fn settle(&mut self, index: u64, waiting: Waiting, reply: Reply) {
        self.n_judged_waiting -= u64::from(self.window.has(waiting.due));
        let found = reply.sources.map_or(0, |s| s.shared + s.cached);
        self.outcomes.push(Outcome {
            index,
            due: waiting.due,
            sent: waiting.sent,
            tokens: reply.tokens.clone(),
            ended: reply.ended,
            end: reply.end.clone(),
            items: ItemCounts { n: waiting.n_items, n_found: u32::try_from(found).unwrap_or(u32::MAX) },
        });
        self.asked.push(Asked { index, n_images: waiting.n_images, audio: waiting.audio, reply });
    }

    /// Waits for what was due in the window, and lets go of the rest.
    async fn drain(&mut self) {
        let end = self.end();
        while self.n_judged_waiting > 0 {
            match timeout_at(end, self.tasks.join_next()).await {
                Ok(Some(ended)) => self.ended(ended.ok()),
                Ok(None) | Err(_) => break,
            }
        }
        self.tasks.shutdown().await;
        let now = self.clock.now();
        let left: Vec<u64> = self.waiting.keys().copied().collect();
        for index in left {
            let Some(waiting) = self.waiting.remove(&index) else { continue };
            self.settle(index, waiting, Reply::without_tokens(End::Unended, now));
        }
        self.outcomes.sort_unstable_by_key(|o| o.index);
        self.asked.sort_unstable_by_key(|a| a.index);
    }

    fn tell(&self) {
        let n_ended = self.outcomes.len() as u64;
        let _ = self.progress.send(Progress {
            elapsed: self.clock.now(),
            window_end: self.window.to,
            n_sent: n_ended + self.waiting.len() as u64,
            n_ended,
        });
    }
}

/// A sample a second, until the run is over.
async fn sample(scraper: Scraper, clock: Clock, mut in_flight: watch::Receiver<u64>) -> Vec<Sample> {
    let mut ticks = tokio::time::interval_at(clock.start, SAMPLE_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    let mut samples = Vec::new();
    loop {
        tokio::select! {
            _ = ticks.tick() => {
                let now = *in_flight.borrow();
                samples.push(scraper.scrape().await.sample(clock.now(), now));
            }
            changed = in_flight.changed() => if changed.is_err() { return samples },
        }
    }
}

#[cfg(test)]
mod tests;
