//! The encodes of the proxy: the actions of [`triptych_proxy::request_machine::encodes`], answered by a store and by workers
//! whose times are drawn from curves.

use super::output::Output;
use super::proxy::{InFlight, Proxy, StoreQuestion, Waiting};
use super::request::{ItemState, Job, JobEnd};
use super::source::Source;
use super::worker::JobId;
use super::world::{Event, World, nanos};
use rand::rngs::StdRng;
use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};
use triptych_core::lifetime::{ItemSource, StageTimes};
use triptych_core::{ContentKey, Failure, FailureClass, ItemIdx, WorkerId};
use triptych_proxy::Roles;
use triptych_proxy::decisions::elastic::choose_elastic;
use triptych_proxy::decisions::in_time;
use triptych_proxy::decisions::score::{Choice, EncoderLoad, choose_encoder};
use triptych_proxy::decisions::view::{ItemSize, Sent};
use triptych_proxy::request_machine::action::{AttemptId, EncodeAction};
use triptych_proxy::request_machine::encode::EncodeTarget;
use triptych_proxy::request_machine::encodes::{EncodeId, Leave};
use triptych_proxy::request_machine::event::{ChosenWorker, EncodeEvent, LeaseAnswer, RequestEvent};
use triptych_proxy::request_machine::output::{Belief, Encoded, Origin, Outcome, Wanted};

/// The longest step in which an encode waits for another that holds its key's lease.
const WAIT_STEP: Duration = Duration::from_millis(50);

impl World<'_> {
    /// Joins the encode of an item, or begins it.
    pub(super) fn subscribe(&mut self, r: usize, i: usize, origin: Origin) {
        let (now, due) = (self.now(), self.deadline_of(r));
        let request = &mut self.requests[r];
        let (output, placed) = (request.items[i].output, request.placed);
        // As the product asks for a named output.
        let origin = if request.items[i].is_stored { Origin::Stored } else { origin };
        let Output { key, modality, tower, .. } = output;
        let wanted = Wanted { key, fingerprint: output.fingerprint(), modality, tower };
        let (model, tower_name) = (self.proxy.model.clone(), Default::default());
        let target = EncodeTarget { model, wanted, tower_name, origin };
        let subscribed = self.proxy.encodes.subscribe(target, due, &mut self.proxy.budget, now);
        let id = subscribed.id;
        request.items[i].state = ItemState::InFlight(id);
        let in_flight = self.proxy.in_flight.entry(id).or_insert_with(|| InFlight {
            output,
            waiting: Vec::new(),
            placed,
            chosen: None,
            jobs: HashMap::new(),
            holds_lease: false,
            kept: false,
            wake: None,
        });
        in_flight.waiting.push(Waiting { request: r, item: i, joined: subscribed.begun.is_none() });
        match subscribed.begun {
            Some(actions) => self.perform_encode(id, actions),
            None if self.proxy.encodes.get(id).is_some_and(|encode| encode.is_announced()) => {
                self.request_on(r, RequestEvent::ItemAnnounced(ItemIdx(i as u32)));
            }
            None => {}
        }
    }

    /// A request leaves the encodes that it waits for.
    pub(super) fn leave_items(&mut self, r: usize, leave: Leave) {
        for i in 0..self.requests[r].items.len() {
            let item = &mut self.requests[r].items[i];
            let ItemState::InFlight(id) = item.state else { continue };
            item.state = ItemState::Left;
            if let Some(in_flight) = self.proxy.in_flight.get_mut(&id) {
                in_flight.waiting.retain(|waiting| (waiting.request, waiting.item) != (r, i));
            }
            let actions = self.proxy.encodes.leave(id, leave);
            self.perform_encode(id, actions);
        }
    }

    /// Tells an encode what happened.
    pub(super) fn encode_on(&mut self, id: EncodeId, event: EncodeEvent) {
        let now = self.now();
        let actions = self.proxy.encodes.on(id, event, &mut self.proxy.budget, now);
        self.perform_encode(id, actions);
    }

    /// The store has answered.
    pub(super) fn store_answers(&mut self, id: EncodeId, question: StoreQuestion) {
        let Some(in_flight) = self.proxy.in_flight.get_mut(&id) else { return };
        let (output, key) = (in_flight.output, in_flight.output.key);
        let mut found = || self.store.has(&key).then(|| output.described());
        let event = match question {
            StoreQuestion::Probe => EncodeEvent::Probed(found()),
            StoreQuestion::Wait => EncodeEvent::Waited(Some(found())),
            StoreQuestion::Lease => EncodeEvent::Leased(Some(match self.proxy.leases.insert(key) {
                true => {
                    in_flight.holds_lease = true;
                    LeaseAnswer::Granted { token: id.0 + 1 }
                }
                false => LeaseAnswer::Held { left: WAIT_STEP },
            })),
        };
        self.encode_on(id, event);
    }

    /// Sees to it that an encode is woken in time.
    fn wake_encode(&mut self, id: EncodeId) {
        let Some(at) = self.proxy.encodes.wake_at(id) else { return };
        let Some(in_flight) = self.proxy.in_flight.get_mut(&id) else { return };
        if in_flight.wake.replace(at) != Some(at) {
            self.queue.at(nanos(at.saturating_duration_since(self.base)), Event::WakeEncode(id));
        }
    }

    fn perform_encode(&mut self, id: EncodeId, actions: Vec<EncodeAction>) {
        for action in actions {
            self.perform_one(id, action);
        }
        if self.proxy.encodes.get(id).is_some() {
            return self.wake_encode(id);
        }
        if let Some(in_flight) = self.proxy.in_flight.remove(&id) {
            self.serve_loaders(in_flight.output.key);
        }
    }

    fn perform_one(&mut self, id: EncodeId, action: EncodeAction) {
        let probe = nanos(self.spec.store.probe);
        match action {
            EncodeAction::Probe => self.queue.after(probe, Event::StoreAnswers(id, StoreQuestion::Probe)),
            EncodeAction::Acquire { .. } => {
                self.queue.after(probe, Event::StoreAnswers(id, StoreQuestion::Lease));
            }
            EncodeAction::Wait { patience } => {
                let pause = nanos(patience.min(WAIT_STEP)).max(probe);
                self.queue.after(pause, Event::StoreAnswers(id, StoreQuestion::Wait));
            }
            EncodeAction::Release(_) => self.release(id),
            EncodeAction::Charge => self.encode_on(id, EncodeEvent::Charged(Ok(()))),
            EncodeAction::Admit { due } => {
                let admitted = self.admit(id, due);
                self.encode_on(id, EncodeEvent::Admitted(admitted));
            }
            EncodeAction::Choose { tried } => {
                if let Some(worker) = self.choose_for(id, &tried) {
                    self.encode_on(id, EncodeEvent::Worker(worker));
                }
            }
            EncodeAction::ChooseSpare { tried } => {
                let worker = self.choose_spare(id, &tried);
                self.encode_on(id, EncodeEvent::Spare(worker));
            }
            EncodeAction::GiveBack => {
                if let Some(in_flight) = self.proxy.in_flight.get_mut(&id) {
                    in_flight.chosen = None;
                }
            }
            EncodeAction::Send { attempt, .. } => self.send_job(id, attempt),
            EncodeAction::Cancel { attempt, .. } => {
                let job = self.proxy.in_flight.get_mut(&id).and_then(|one| one.jobs.remove(&attempt));
                job.into_iter().for_each(|job| self.call_off(job));
            }
            EncodeAction::Announce(_) => self.announce(id),
            EncodeAction::Count(_) => {}
            EncodeAction::Finish(outcome) => self.finish_encode(id, outcome),
        }
    }

    fn release(&mut self, id: EncodeId) {
        let Some(in_flight) = self.proxy.in_flight.get_mut(&id) else { return };
        if std::mem::take(&mut in_flight.holds_lease) {
            self.proxy.leases.remove(&in_flight.output.key);
        }
    }

    /// Refuses an item that would not be encoded in time.
    fn admit(&self, id: EncodeId, due: Instant) -> Result<(), Failure> {
        let (now, proxy) = (self.now(), &self.proxy);
        let Some(in_flight) = proxy.in_flight.get(&id) else { return Ok(()) };
        let item = proxy.of_item(in_flight.output);
        let pool = proxy.encoder_pool(in_flight.output.tower);
        let all: Option<Vec<_>> = pool.iter().map(|w| proxy.views[*w].forecast(item, now)).collect();
        let best = all.and_then(|all| all.into_iter().min_by_key(|forecast| forecast.end()));
        let left = due.saturating_duration_since(now);
        in_time(best, self.spec.proxy.encode_slo.map_or(left, |slo| slo.min(left)))
    }

    /// A worker for the next attempt: new ones first, and of those the one at which the request is placed.
    fn choose_for(&mut self, id: EncodeId, tried: &[WorkerId]) -> Option<ChosenWorker> {
        let proxy = &self.proxy;
        let in_flight = proxy.in_flight.get(&id)?;
        let (placed, pool) = (in_flight.placed, proxy.encoder_pool(in_flight.output.tower));
        let fresh: Vec<_> = pool.iter().copied().filter(|w| !tried.contains(&proxy.ids[*w])).collect();
        let able = if fresh.is_empty() { pool } else { fresh };
        if proxy.roles == Roles::Fixed {
            let placed = placed.filter(|w| able.contains(w) && !proxy.views[*w].is_full());
            let able = placed.map_or(able, |placed| vec![placed]);
            return self.choose_among(id, &able, choose_encoder);
        }
        let home = placed.and_then(|placed| able.iter().position(|w| *w == placed));
        self.choose_among(id, &able, |loads, key, rng| choose_elastic(loads, home, key, rng))
    }

    /// An encoder worker that has not had the job. A PD worker has its own work.
    fn choose_spare(&mut self, id: EncodeId, tried: &[WorkerId]) -> Option<ChosenWorker> {
        let proxy = &self.proxy;
        let encoders = proxy.encoders_of(proxy.in_flight.get(&id)?.output.tower);
        let spare = encoders.into_iter().filter(|w| !tried.contains(&proxy.ids[*w]));
        let spare: Vec<_> = spare.collect();
        self.choose_among(id, &spare, choose_encoder)
    }

    fn choose_among(
        &mut self,
        id: EncodeId,
        able: &[usize],
        choose: impl FnOnce(&[EncoderLoad<'_>], Option<&ContentKey>, &mut StdRng) -> Option<Choice>,
    ) -> Option<ChosenWorker> {
        let (now, prefill) = (self.now(), self.proxy.prefill_time());
        let Proxy { views, ids, rng, in_flight, model, encoders, .. } = &mut self.proxy;
        let in_flight = in_flight.get_mut(&id)?;
        let output = in_flight.output;
        let item = ItemSize { model, encoder: output.encoder(), bytes: output.sized.bytes };
        let load = |w: &usize| match encoders.contains(w) {
            true => views[*w].encoder_load(&ids[*w], item, now),
            false => views[*w].colocated_load(&ids[*w], item, prefill, now),
        };
        let loads: Vec<_> = able.iter().map(load).collect();
        let choice = choose(&loads, Some(&output.key), rng)?;
        let worker = *able.get(choice.index)?;
        in_flight.chosen = Some(worker);
        let expected = views[worker].forecast(item, now).map(|f| f.queue.saturating_add(f.p95));
        Some(ChosenWorker { id: ids[worker].clone(), is_last_resort: false, expected })
    }

    /// Sends the job to the chosen worker.
    fn send_job(&mut self, id: EncodeId, attempt: AttemptId) {
        let (instant, now) = (self.now(), self.queue.now());
        let Proxy { views, in_flight, model, .. } = &mut self.proxy;
        let Some(in_flight) = in_flight.get_mut(&id) else { return };
        let Some(worker) = in_flight.chosen.take() else { return };
        let output = in_flight.output;
        let item = ItemSize { model, encoder: output.encoder(), bytes: output.sized.bytes };
        let forecast = views[worker].forecast(item, instant);
        let work = Sent { n: 1, encode_us: views[worker].cost_us(item), tokens: 0 };
        let epoch = views[worker].give(work);
        let job = self.n_jobs;
        self.n_jobs += 1;
        in_flight.jobs.insert(attempt, job);
        let (key, asker) = (output.key, in_flight.waiting.first().map(|waiting| waiting.request));
        let job_of = Job {
            encode: id,
            attempt,
            worker,
            output,
            asker,
            epoch,
            work,
            forecast,
            ticket: None,
            since: now,
            times: Default::default(),
            share: 0,
            cancelled: false,
            kept: false,
            is_answered: false,
        };
        self.jobs.insert(job, job_of);
        if let Some(asker) = asker {
            self.item_given(asker, &key);
        }
        self.proxy.divide();
        self.queue.after(self.hop(), Event::JobArrives(job));
    }

    /// The proxy hears what a job's output will be.
    pub(super) fn announced(&mut self, job: JobId) {
        let Some(job) = self.jobs.get(&job).filter(|job| !job.cancelled) else { return };
        let (id, attempt, tokens) = (job.encode, job.attempt, job.output.sized.tokens);
        let Proxy { views, in_flight, model, .. } = &self.proxy;
        let Some(in_flight) = in_flight.get(&id) else { return };
        let encoder = in_flight.output.encoder();
        let p95 = views[job.worker].p95_of_tokens(job.forecast, (model, encoder), tokens);
        let item = in_flight.output.described();
        self.encode_on(id, EncodeEvent::Announced { attempt, item, peers: Vec::new(), p95 });
    }

    fn announce(&mut self, id: EncodeId) {
        let Some(in_flight) = self.proxy.in_flight.get(&id) else { return };
        let waiting = in_flight.waiting.clone();
        for Waiting { request, item, .. } in waiting {
            self.request_on(request, RequestEvent::ItemAnnounced(ItemIdx(item as u32)));
        }
    }

    /// The proxy hears of a job's end.
    pub(super) fn job_ended(&mut self, job_id: JobId, end: JobEnd) {
        let Some(job) = self.jobs.get_mut(&job_id) else { return };
        if std::mem::replace(&mut job.is_answered, true) {
            // It was cancelled meanwhile.
            return self.drop_job(job_id);
        }
        let (id, attempt, times, kept) = (job.encode, job.attempt, job.times, job.kept);
        self.proxy.views[job.worker].done(job.epoch, job.work);
        self.drop_job(job_id);
        let now = self.now();
        let Some(in_flight) = self.proxy.in_flight.get_mut(&id) else { return };
        in_flight.jobs.remove(&attempt);
        let result = match end {
            JobEnd::Ready => {
                in_flight.kept = kept;
                let requests: BTreeSet<_> = in_flight.waiting.iter().map(|one| one.request).collect();
                requests.into_iter().for_each(|r| self.requests[r].waited_for(times));
                let item = in_flight.output.described();
                let (times, peers, holders) = (StageTimes::default(), Vec::new(), Vec::new());
                let (source, belief) = (ItemSource::Encoded, Belief::Made);
                Ok(Encoded { item, source, times, peers, holders, belief, at: now })
            }
            JobEnd::Full => Err(Failure::new(FailureClass::Overloaded, "the simulated encoder has no room")),
        };
        self.encode_on(id, EncodeEvent::Ended { attempt, result });
    }

    /// An encode has ended, for everybody who waits.
    fn finish_encode(&mut self, id: EncodeId, outcome: Outcome) {
        let Some(in_flight) = self.proxy.in_flight.get_mut(&id) else { return };
        let (waiting, kept) = (std::mem::take(&mut in_flight.waiting), in_flight.kept);
        for Waiting { request, item, joined } in waiting {
            if !matches!(self.requests[request].items[item].state, ItemState::InFlight(one) if one == id) {
                continue;
            }
            match &outcome {
                Ok(encoded) => {
                    let source = Source::of(encoded, joined, kept);
                    let encoded = if joined { encoded.clone().joined() } else { encoded.clone() };
                    self.item_ready(request, item, encoded, source);
                }
                Err(failure) => {
                    self.requests[request].items[item].state = ItemState::Left;
                    let (item, failure) = (ItemIdx(item as u32), failure.clone());
                    self.request_on(request, RequestEvent::ItemFailed { item, failure });
                }
            }
        }
    }

    /// PD workers that wait for an output which no encode is bringing any more: the store has it, or has lost it since.
    fn serve_loaders(&mut self, key: ContentKey) {
        let hop = self.hop();
        let has = self.store.has(&key);
        for worker in self.store.take_waiting(&key) {
            let event = if has { Event::Loadable { worker, key } } else { Event::Missing { worker, key } };
            self.queue.after(hop, event);
        }
    }

    /// True if an output is being encoded.
    pub(super) fn is_encoding(&self, key: &ContentKey) -> bool {
        [Origin::Any, Origin::Fresh].iter().any(|origin| self.proxy.encodes.of_key(key, *origin).is_some())
    }

    /// A job is not wanted any more.
    fn call_off(&mut self, job_id: JobId) {
        let hop = self.hop();
        let Some(job) = self.jobs.get_mut(&job_id) else { return };
        if std::mem::replace(&mut job.is_answered, true) {
            return;
        }
        self.proxy.views[job.worker].done(job.epoch, job.work);
        self.queue.after(hop, Event::Cancel(job_id));
    }
}
