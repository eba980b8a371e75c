//! Carries out the actions of one encode: asks the store, holds the lease, chooses workers, sends the job.
//!
//! Whatever is under way is a future or a guard of this task, so dropping the task cancels the attempts and gives the
//! lease back.

use super::attempt::Attempt;
use super::job::EncodeJob;
use super::lease::HeldLease;
use super::parts::Parts;
use super::progress::Progress;
use crate::fleet::{Lease, Size};
use crate::request_machine::action::{AttemptId, CancelReason, EncodeAction, Release, SendReason};
use crate::request_machine::encodes::EncodeId;
use crate::request_machine::event::{ChosenWorker, EncodeEvent, LeaseAnswer};
use crate::request_machine::output::Outcome;
use futures::future::{AbortHandle, BoxFuture, abortable};
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tracing::Instrument;
use triptych_core::{EncodedItem, Failure, WorkerId};
use triptych_proto::v1::encoder_worker_server::SERVICE_NAME;
use triptych_runtime::spans::{self, attribute};

/// Announcements that may wait: attempts under way at once, and one to spare.
const ANNOUNCEMENTS: usize = 4;

/// The store's answer to one question.
pub(super) type Probe = BoxFuture<'static, Option<EncodedItem>>;

/// The task of one encode.
pub(super) struct Driver {
    parts: Arc<Parts>,
    id: EncodeId,
    job: Arc<EncodeJob>,
    progress: watch::Sender<Progress>,
    /// The question that all items of a request share.
    first_probe: Option<Probe>,
    lease: Option<HeldLease>,
    /// The worker that was chosen and has not been sent the job.
    chosen: Option<Lease>,
    under_way: FuturesUnordered<BoxFuture<'static, Option<Happened>>>,
    /// The end of one of them that the machine has not heard of.
    ended: Option<Happened>,
    attempts: HashMap<AttemptId, RunningAttempt>,
    /// Failure of the attempt that ended last, for the log.
    last_failure: Option<Failure>,
    announcements: (mpsc::Sender<EncodeEvent>, mpsc::Receiver<EncodeEvent>),
}

struct RunningAttempt {
    worker: Arc<Lease>,
    abort: AbortHandle,
}

/// The end of something that was under way.
enum Happened {
    Event(EncodeEvent),
    /// The lease, or the time for which another has it; `None`: the store does not answer.
    Leased(Option<Result<HeldLease, Duration>>),
    Chosen(Lease),
}

/// Takes an encode out of the machine when its task ends, by itself, by a panic, or because nobody waits for it.
struct ForgetOnDrop(Arc<Parts>, EncodeId, Arc<EncodeJob>);

impl Drop for ForgetOnDrop {
    fn drop(&mut self) {
        self.0.forget(self.1);
        self.0.fleet.deaths().end_trial(&self.2.death_fingerprint(), self.2.request_id);
    }
}

impl Driver {
    pub(super) fn new(
        parts: Arc<Parts>,
        id: EncodeId,
        job: EncodeJob,
        progress: watch::Sender<Progress>,
        first_probe: Option<Probe>,
    ) -> Self {
        Self {
            parts,
            id,
            job: Arc::new(job),
            progress,
            first_probe,
            lease: None,
            chosen: None,
            under_way: FuturesUnordered::new(),
            ended: None,
            attempts: HashMap::new(),
            last_failure: None,
            announcements: mpsc::channel(ANNOUNCEMENTS),
        }
    }

    /// Carries out actions until the encode ends.
    pub(super) async fn run(mut self, begun: Vec<EncodeAction>) {
        let _forget = ForgetOnDrop(Arc::clone(&self.parts), self.id, Arc::clone(&self.job));
        let mut actions = VecDeque::from(begun);
        loop {
            while let Some(action) = actions.pop_front() {
                if let EncodeAction::Finish(outcome) = action {
                    return self.finish(outcome);
                }
                if let Some(event) = self.perform(action) {
                    actions.extend(self.parts.on(self.id, event));
                }
            }
            let event = self.next().await;
            actions.extend(self.parts.on(self.id, event));
        }
    }

    fn finish(self, outcome: Outcome) {
        self.progress.send_modify(|progress| progress.outcome = Some(outcome));
    }

    /// The next event: of what is under way, or of the time.
    async fn next(&mut self) -> EncodeEvent {
        loop {
            // An attempt announces before it ends, and may do both at once.
            if let Ok(announced) = self.announcements.1.try_recv() {
                return announced;
            }
            if let Some(event) = self.ended.take().and_then(|happened| self.event_of(happened)) {
                return event;
            }
            let wake_at = self.parts.in_flight().encodes.wake_at(self.id);
            let woken = async move {
                match wake_at {
                    Some(at) => sleep_until(Instant::from_std(at)).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // What has ended counts before what is due.
                biased;
                Some(announced) = self.announcements.1.recv() => return announced,
                Some(happened) = self.under_way.next() => self.ended = happened,
                () = woken => return EncodeEvent::Woken,
            }
        }
    }

    fn event_of(&mut self, happened: Happened) -> Option<EncodeEvent> {
        Some(match happened {
            Happened::Event(EncodeEvent::Ended { attempt, result }) => {
                self.attempts.remove(&attempt)?;
                self.last_failure = result.as_ref().err().cloned();
                if result.is_err() && self.lease.as_ref().is_some_and(HeldLease::is_lost) {
                    self.parts.on(self.id, EncodeEvent::LeaseLost);
                }
                EncodeEvent::Ended { attempt, result }
            }
            Happened::Event(event) => event,
            Happened::Leased(answer) => EncodeEvent::Leased(answer.map(|answer| match answer {
                Ok(lease) => {
                    let token = lease.fence();
                    self.lease = Some(lease);
                    LeaseAnswer::Granted { token }
                }
                Err(left) => LeaseAnswer::Held { left },
            })),
            Happened::Chosen(worker) => {
                let chosen = chosen(&worker);
                self.chosen = Some(worker);
                EncodeEvent::Worker(chosen)
            }
        })
    }

    /// Carries out an action; the event, if it has happened by then.
    fn perform(&mut self, action: EncodeAction) -> Option<EncodeEvent> {
        match action {
            EncodeAction::Probe => self.probe(),
            EncodeAction::Acquire { ttl } => {
                let (parts, wanted) = (Arc::clone(&self.parts), self.job.wanted);
                self.begin(async move { Happened::Leased(parts.leases.acquire(&wanted, ttl).await) });
            }
            EncodeAction::Wait { patience } => {
                let (cache, wanted) = (self.parts.cache.clone(), self.job.wanted);
                let wait = async move { EncodeEvent::Waited(cache.wait(&wanted, patience).await) };
                self.begin(wait.map(Happened::Event));
            }
            EncodeAction::Release(Release::Now) => self.lease = None,
            EncodeAction::Release(Release::WhenStored) => {
                if let Some(lease) = self.lease.take() {
                    lease.give_back_when_stored();
                }
            }
            EncodeAction::Charge => {
                let (account, n_bytes) = (Arc::clone(&self.job.account), self.job.charged_bytes);
                let charged = account.take_encode(n_bytes);
                if charged.is_err() || !account.is_shared() {
                    return Some(EncodeEvent::Charged(charged));
                }
                let charge = async move { EncodeEvent::Charged(account.take_shared_encode(n_bytes).await) };
                self.begin(charge.map(Happened::Event));
            }
            EncodeAction::Admit { due } => {
                let (encoder, due) = (self.job.encoder(), Instant::from_std(due));
                let admitted = self.parts.fleet.admit(&encoder, self.job.n_bytes(), due);
                return Some(EncodeEvent::Admitted(admitted));
            }
            EncodeAction::Choose { tried } => {
                let (fleet, size, encoder) = (Arc::clone(&self.parts.fleet), self.size(), self.job.encoder());
                let suspect = (self.job.death_fingerprint(), self.job.request_id);
                self.begin(async move {
                    Happened::Chosen(fleet.lease_by_verdict(&encoder, size, &tried, suspect).await)
                });
            }
            EncodeAction::ChooseSpare { tried } => {
                self.chosen = self.spare(&tried);
                return Some(EncodeEvent::Spare(self.chosen.as_ref().map(chosen)));
            }
            EncodeAction::GiveBack => self.chosen = None,
            EncodeAction::Send { attempt, fence, until, why } => self.send(attempt, (fence, until), why),
            EncodeAction::Cancel { attempt, why } => self.cancel(attempt, why),
            EncodeAction::Announce(announced) => {
                self.progress.send_modify(|progress| progress.announced = Some(announced));
            }
            EncodeAction::Count(counted) => self.parts.meters.count(counted),
            // The caller ends with it.
            EncodeAction::Finish(_) => {}
        }
        None
    }

    fn begin(&mut self, future: impl Future<Output = Happened> + Send + 'static) {
        self.under_way.push(future.map(Some).boxed());
    }

    fn probe(&mut self) {
        let found = self.first_probe.take().unwrap_or_else(|| {
            let (cache, wanted) = (self.parts.cache.clone(), self.job.wanted);
            async move { cache.probe(&[wanted]).await.pop().flatten() }.boxed()
        });
        self.begin(found.map(|found| Happened::Event(EncodeEvent::Probed(found))));
    }

    /// An encoder worker that has not had the job and is there now. A PD worker has its own work: it helps out when
    /// nobody else can. Where only PD workers encode, a job is slow because its worker decodes, and a second one would
    /// only slow another one's answers.
    fn spare(&self, tried: &[WorkerId]) -> Option<Lease> {
        if self.parts.fleet.deaths().is_suspect(&self.job.death_fingerprint()) {
            // Two at once would be two deaths.
            return None;
        }
        let worker = self.parts.fleet.lease(&self.job.encoder(), self.size(), tried).now_or_never();
        worker.filter(|worker| !tried.contains(worker.id()) && !worker.is_pd())
    }

    fn send(&mut self, id: AttemptId, (fence, until): (u64, std::time::Instant), why: SendReason) {
        let Some(worker) = self.chosen.take().map(Arc::new) else { return };
        self.parts.meters.sent(why);
        match why {
            SendReason::Retry => {
                let failure = self.last_failure.as_ref().map(tracing::field::display);
                tracing::warn!(encoder = %worker.id(), attempt = id.0, failure, "encoder job sent again");
            }
            SendReason::Hedge => {
                tracing::info!(encoder = %worker.id(), "a slow encoder job is sent to a second encoder");
            }
            SendReason::First | SendReason::Fallback => {}
        }
        if let Some(placement) = &self.job.placement {
            placement.given(&self.job.wanted.key);
        }
        let span = spans::rpc_client(SERVICE_NAME, "Encode", worker.address());
        spans::set(&span, attribute::WORKER, worker.id().to_string());
        spans::set(&span, attribute::ATTEMPT, i64::from(id.0));
        let attempt = Attempt {
            parts: Arc::clone(&self.parts),
            job: Arc::clone(&self.job),
            id,
            worker: Arc::clone(&worker),
            fence,
            until: Instant::from_std(until),
            announcements: self.announcements.0.clone(),
        };
        let (attempt, abort) = abortable(attempt.run().instrument(span));
        self.attempts.insert(id, RunningAttempt { worker, abort });
        self.under_way.push(attempt.map(|end| end.ok().map(Happened::Event)).boxed());
    }

    fn cancel(&mut self, id: AttemptId, why: CancelReason) {
        let Some(attempt) = self.attempts.remove(&id) else { return };
        if why == CancelReason::TimedOut {
            attempt.worker.report_timeout();
        }
        attempt.abort.abort();
    }

    fn size(&self) -> Size {
        Size::Item {
            key: Some(self.job.wanted.key),
            bytes: self.job.n_bytes(),
            placement: self.job.placement.as_ref().map(|placement| placement.id().clone()),
        }
    }
}

fn chosen(worker: &Lease) -> ChosenWorker {
    ChosenWorker {
        id: worker.id().clone(),
        is_last_resort: worker.is_last_resort(),
        expected: worker.forecast().map(|forecast| forecast.begin().saturating_add(forecast.p95)),
    }
}
