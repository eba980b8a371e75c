//! One run: requests are sent when they are due, in an open loop, and each becomes an outcome.
//!
//! ```text
//!  0        warm-up         from        window         to      tail      drain
//!  |──────── load ───────────|────────── load ──────────|─ load ─|────────|
//! ```
//!
//! Load goes on behind the window until all that was due in it has ended, so that the last of them meet the same load
//! as the first; then what is left is let go. Bytes are made ahead of their time, on other threads, in a bounded
//! number; lateness of the bench itself is measured and reported.

mod finish;

use crate::arrivals::Arrivals;
use crate::client::{Clock, ContentSource, PreparedRequest, Reply, Target};
use crate::judge::JudgedWindow;
use crate::offered::{ItemShape, Offered};
use crate::outcome::{End, ItemCounts, Outcome};
use crate::result::TimelineSample;
use crate::scrape::{Scraped, Scraper};
use crate::slo::Slo;
use crate::workload::{Requests, Workload};
use futures::{StreamExt, stream};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;

pub use finish::run_result;

/// Requests whose bytes are ready before their time.
const N_AHEAD: usize = 48;
/// Threads that make them.
const N_MAKERS: usize = 4;
/// Time between two samples of the timeline.
const SAMPLE_EVERY: Duration = Duration::from_secs(1);

/// Parameters of a run.
#[derive(Clone, Debug)]
pub struct RunPlan {
    /// Requests a second, in the mean.
    pub rate: f64,
    /// Arrival process.
    pub arrivals: Arrivals,
    /// Seed of the workload.
    pub seed: u64,
    /// Length of the warm-up.
    pub warm_up: Duration,
    /// Requests that are judged.
    pub n_requests: u64,
    /// The longest window.
    pub max_window: Duration,
    /// Time after the window in which its requests may end.
    pub drain: Duration,
    /// Allowed 99th percentile of the bench's own lateness. `None`: a tenth of the TTFT limit, and at least 20 ms.
    pub max_late: Option<Duration>,
}

impl RunPlan {
    /// The window: from the end of the warm-up until `n_requests` were due.
    pub fn window(&self, workload: &Workload) -> JudgedWindow {
        let requests = workload.requests(self.rate, self.arrivals, self.seed);
        let end = self.warm_up + self.max_window;
        let mut judged =
            requests.map(|o| o.at).skip_while(|at| *at < self.warm_up).take_while(|at| *at < end);
        // The first one behind the window is where it ends.
        let behind = judged.nth(usize::try_from(self.n_requests).unwrap_or(usize::MAX));
        JudgedWindow { from: self.warm_up, to: behind.unwrap_or(end) }
    }
}

/// Progress of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// Time since the start.
    pub elapsed: Duration,
    /// End of the window.
    pub window_end: Duration,
    /// Requests that were sent.
    pub n_sent: u64,
    /// Requests that ended.
    pub n_ended: u64,
}

/// Observers of a run.
#[derive(Clone, Copy)]
pub struct RunObservers<'a> {
    /// Reader of the server's metrics.
    pub scraper: &'a Scraper,
    /// Receives the progress.
    pub progress: &'a watch::Sender<Progress>,
    /// Ends the window at once, and the run when what was due in it has ended.
    pub stop: &'a CancellationToken,
}

/// A run that has ended.
#[derive(Debug)]
pub struct Ran {
    /// Outcome of every request.
    pub outcomes: Vec<Outcome>,
    /// Judged window.
    pub window: JudgedWindow,
    /// Items of each request, and its response.
    pub asked: Vec<RequestRecord>,
    /// One sample a second.
    pub timeline: Vec<TimelineSample>,
    /// The server's counters before and after.
    pub scraped: (Scraped, Scraped),
}

/// A request that ended, beside its outcome; by the same index.
#[derive(Clone, Debug)]
pub struct RequestRecord {
    /// Its index.
    pub index: u64,
    /// Number of images.
    pub n_images: u32,
    /// Length of audio.
    pub audio: Duration,
    /// The response.
    pub reply: Reply,
}

/// Sends a run's requests to a target and waits for them.
pub async fn run(
    target: &Arc<dyn Target>,
    workload: &Workload,
    content: &ContentSource,
    plan: &RunPlan,
    observers: RunObservers<'_>,
) -> Ran {
    let RunObservers { scraper, .. } = observers;
    let before = scraper.scrape().await;
    let mut makers = JoinSet::new();
    let mut ready = make_ahead(
        &mut makers,
        Arc::clone(target),
        content.clone(),
        workload.requests(plan.rate, plan.arrivals, plan.seed),
    );
    // The first ones are made before the clock starts.
    let mut first = ready.recv().await;
    let mut run = Running::new(plan.window(workload), plan.drain, observers);
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
    makers.shutdown().await;
    run.drain().await;
    drop(in_flight);
    let timeline = samples.await.unwrap_or_default();
    let after = scraper.scrape().await;
    let Running { outcomes, window, asked, .. } = run;
    Ran { outcomes, window, asked, timeline, scraped: (before, after) }
}

/// Makes requests ready in their order, some ahead of when they are taken.
fn make_ahead(
    makers: &mut JoinSet<()>,
    target: Arc<dyn Target>,
    content: ContentSource,
    requests: Requests,
) -> mpsc::Receiver<(Offered, PreparedRequest)> {
    let (sender, receiver) = mpsc::channel(N_AHEAD);
    let made = stream::iter(requests).map(move |offered| {
        let target = Arc::clone(&target);
        let content = content.clone();
        tokio::task::spawn_blocking(move || {
            let ready = target.prepare(&offered, &content);
            (offered, ready)
        })
    });
    let mut made = made.buffered(N_MAKERS);
    makers.spawn(async move {
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
    slo: Option<Slo>,
}

struct Running<'a> {
    clock: Clock,
    window: JudgedWindow,
    drain: Duration,
    waiting: HashMap<u64, Waiting>,
    /// Judged requests among those.
    n_judged_waiting: u64,
    tasks: JoinSet<(u64, Reply)>,
    outcomes: Vec<Outcome>,
    asked: Vec<RequestRecord>,
    observers: RunObservers<'a>,
}

impl<'a> Running<'a> {
    fn new(window: JudgedWindow, drain: Duration, observers: RunObservers<'a>) -> Self {
        Self {
            clock: Clock::started(),
            window,
            drain,
            waiting: HashMap::new(),
            n_judged_waiting: 0,
            tasks: JoinSet::new(),
            outcomes: Vec::new(),
            asked: Vec::new(),
            observers,
        }
    }

    fn end(&self) -> Instant {
        self.clock.start + self.window.to + self.drain
    }

    /// Ends the window at this moment. All that was sent was due before it.
    fn cut_window(&mut self) {
        self.window.to = self.window.to.min(self.clock.now() + Duration::from_nanos(1));
    }

    /// Waits until `at`, taking in what ends before. False: behind the window everything judged has ended, its time is
    /// over, or the run was stopped.
    async fn wait_until(&mut self, at: Duration) -> bool {
        let due = self.clock.start + at;
        let stop = self.observers.stop;
        loop {
            while let Some(ended) = self.tasks.try_join_next() {
                self.ended(ended.ok());
            }
            if stop.is_cancelled() {
                self.cut_window();
                return false;
            }
            if at >= self.window.to && (self.n_judged_waiting == 0 || Instant::now() >= self.end()) {
                return false;
            }
            tokio::select! {
                // ResponseFuture comes first: what ended waits, what is due does not.
                biased;
                () = stop.cancelled() => {}
                () = sleep_until(due.min(self.end())) => {
                    if due <= Instant::now() && (at < self.window.to || self.n_judged_waiting > 0) {
                        return true;
                    }
                }
                Some(ended) = self.tasks.join_next() => self.ended(ended.ok()),
            }
        }
    }

    fn send(&mut self, offered: Offered, ready: PreparedRequest) {
        let clock = self.clock;
        let index = offered.index;
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
            slo: offered.slo,
        };
        self.n_judged_waiting += u64::from(self.window.has(waiting.due));
        self.waiting.insert(index, waiting);
        self.tasks.spawn(async move { (index, ready(clock).await) });
        self.report();
    }

    /// A task ended; one that panicked is found among those that still wait, at the end.
    fn ended(&mut self, ended: Option<(u64, Reply)>) {
        let Some((index, reply)) = ended else { return };
        let Some(waiting) = self.waiting.remove(&index) else { return };
        self.settle(index, waiting, reply);
        self.report();
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
            slo: waiting.slo,
        });
        self.asked.push(RequestRecord { index, n_images: waiting.n_images, audio: waiting.audio, reply });
    }

    /// Waits for the requests of the window, and cancels the others.
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

    fn report(&self) {
        let n_ended = self.outcomes.len() as u64;
        let _ = self.observers.progress.send(Progress {
            elapsed: self.clock.now(),
            window_end: self.window.to,
            n_sent: n_ended + self.waiting.len() as u64,
            n_ended,
        });
    }
}

/// Samples once a second, until the run is over.
async fn sample(scraper: Scraper, clock: Clock, mut in_flight: watch::Receiver<u64>) -> Vec<TimelineSample> {
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
