//! Flights: an item's way to READY. The store is asked, an encoder is chosen and given the job, a second one where it is
//! slow, and whoever waits hears of it.

use super::agenda::Nanos;
use super::front::Front;
use super::prompts::{described, modality_of};
use super::request::{Job, JobEnd, Phase, PlaceState, Source};
use super::worker::JobId;
use super::world::{Event, World, nanos};
use std::collections::BTreeSet;
use std::time::Duration;
use triptych_bench::outcome::End;
use triptych_core::{ContentKey, Modality};
use triptych_proxy::decisions::score::choose_encoder;
use triptych_proxy::decisions::view::{ItemSize, Sent};
use triptych_proxy::decisions::{ATTEMPTS, backoff, in_time};

/// An item's way to READY, shared by all requests that need it at the same time.
pub(super) struct Flight {
    pub(super) key: ContentKey,
    pub(super) modality: Modality,
    pub(super) sized: crate::curves::Sized,
    /// Requests that wait.
    pub(super) waiting: Vec<usize>,
    pub(super) home: Option<usize>,
    pub(super) announced: bool,
    pub(super) jobs: Vec<JobId>,
    pub(super) seen: Vec<usize>,
    pub(super) n_failed: u32,
    pub(super) hedged: bool,
    pub(super) hedge_at: Option<Nanos>,
    pub(super) deadline: Nanos,
}

impl World<'_> {
    pub(super) fn board(&mut self, r: usize, i: usize, pause: Nanos) {
        let (place, item) = (self.requests[r].places[i].clone(), self.requests[r].offered.items[i]);
        let deadline = nanos(self.requests[r].offered.at.saturating_add(self.spec.request_time));
        if let Some(id) = self.front.by_key.get(&place.key).copied() {
            if let Some(flight) = self.front.flights.get_mut(&id) {
                flight.waiting.push(r);
                flight.deadline = flight.deadline.max(deadline);
            }
            self.requests[r].places[i].state = PlaceState::Flying { flight: id, shared: true };
            return;
        }
        let id = self.new_flight(place.key, (modality_of(&item), place.sized), deadline);
        if let Some(flight) = self.front.flights.get_mut(&id) {
            flight.waiting.push(r);
            flight.home = self.requests[r].home;
        }
        self.requests[r].places[i].state = PlaceState::Flying { flight: id, shared: false };
        self.agenda.after(pause.saturating_add(nanos(self.spec.store.probe)), Event::Probed(id));
    }

    fn new_flight(
        &mut self,
        key: ContentKey,
        (modality, sized): (Modality, crate::curves::Sized),
        deadline: Nanos,
    ) -> u64 {
        let id = self.front.n_flights;
        self.front.n_flights += 1;
        let flight = Flight {
            key,
            modality,
            sized,
            waiting: Vec::new(),
            home: None,
            announced: false,
            jobs: Vec::new(),
            seen: Vec::new(),
            n_failed: 0,
            hedged: false,
            hedge_at: None,
            deadline,
        };
        self.front.flights.insert(id, flight);
        self.front.by_key.insert(key, id);
        id
    }

    /// A PD worker did not find an output that it was told of: it is made again, for all who wait.
    pub(super) fn make_again(&mut self, r: usize, key: ContentKey) {
        if self.front.by_key.contains_key(&key) {
            return;
        }
        let request = &self.requests[r];
        let Some(i) = request.places.iter().position(|place| place.key == key) else { return };
        let (item, sized) = (request.offered.items[i], request.places[i].sized);
        let deadline = nanos(request.offered.at.saturating_add(self.spec.request_time));
        let id = self.new_flight(key, (modality_of(&item), sized), deadline);
        self.agenda.after(self.hop(), Event::Leased(id));
    }

    pub(super) fn probed(&mut self, id: u64) {
        let Some(key) = self.front.flights.get(&id).map(|flight| flight.key) else { return };
        if self.store.has(&key) {
            return self.land(id, (Source::Stored, Source::Shared));
        }
        // The lease, and another question.
        let pause = nanos(self.spec.store.probe).saturating_mul(2);
        self.agenda.after(pause, Event::Leased(id));
    }

    pub(super) fn leased(&mut self, id: u64) {
        let Some(key) = self.front.flights.get(&id).map(|flight| flight.key) else { return };
        if self.store.has(&key) {
            return self.land(id, (Source::Shared, Source::Shared));
        }
        if let Err(end) = self.admit(id) {
            return self.lose(id, &end);
        }
        self.front.budget.first_try(Duration::from_nanos(self.agenda.now()));
        self.send_job(id);
    }

    /// Whether an item would be encoded in time.
    fn admit(&self, id: u64) -> Result<(), End> {
        let (now, front) = (self.now(), &self.front);
        let Some(flight) = front.flights.get(&id) else { return Ok(()) };
        let item = front.of_item(flight.modality, flight.sized.bytes);
        let all: Option<Vec<_>> =
            front.encoder_pool().iter().map(|w| front.views[*w].forecast(item, now)).collect();
        let best = all.and_then(|all| all.into_iter().min_by_key(|forecast| forecast.end()));
        let left = Duration::from_nanos(flight.deadline.saturating_sub(self.agenda.now()));
        let left = self.spec.proxy.encode_slo.map_or(left, |slo| slo.min(left));
        in_time(best, left).map_err(|_| End::Refused)
    }

    /// Sends a flight's job to an encoder.
    pub(super) fn send_job(&mut self, id: u64) {
        let Some(flight) = self.front.flights.get(&id) else { return };
        let fresh: Vec<_> =
            self.front.encoder_pool().iter().copied().filter(|w| !flight.seen.contains(w)).collect();
        let able = if fresh.is_empty() { self.front.encoder_pool().to_vec() } else { fresh };
        let home = flight.home.filter(|w| able.contains(w) && !self.front.views[*w].is_full());
        let able = home.map_or(able, |home| vec![home]);
        match self.choose_encoder(id, &able) {
            Some(worker) => self.send_job_to(id, worker),
            None => self.lose(id, &End::Failed("unavailable".into())),
        }
    }

    fn choose_encoder(&mut self, id: u64, able: &[usize]) -> Option<usize> {
        let now = self.now();
        let Front { views, ids, rng, flights, model, .. } = &mut self.front;
        let flight = flights.get(&id)?;
        let item = ItemSize { model, modality: flight.modality, bytes: flight.sized.bytes };
        let loads: Vec<_> = able.iter().map(|w| views[*w].encoder_load(&ids[*w], item, now)).collect();
        choose_encoder(&loads, Some(&flight.key), rng).and_then(|choice| able.get(choice.index).copied())
    }

    fn send_job_to(&mut self, id: u64, worker: usize) {
        let (instant, now, policy) = (self.now(), self.agenda.now(), self.spec.proxy.encodes);
        let Front { views, flights, model, pace, .. } = &mut self.front;
        let Some(flight) = flights.get_mut(&id) else { return };
        let item = ItemSize { model, modality: flight.modality, bytes: flight.sized.bytes };
        let forecast = views[worker].forecast(item, instant);
        let work = Sent { n: 1, encode_us: views[worker].cost_us(item), tokens: 0 };
        let epoch = views[worker].give(work);
        let asker = flight.waiting.first().copied();
        let job = self.n_jobs;
        self.n_jobs += 1;
        if flight.jobs.is_empty() && !flight.hedged {
            let seen = pace.predict(model, flight.modality).map(|seen| seen.p95);
            let expected = forecast.map(|f| f.queue.saturating_add(f.p95)).or(seen);
            let patience = expected.unwrap_or(policy.hedge_after_unknown).max(policy.hedge_after_at_least);
            flight.hedge_at = Some(now.saturating_add(nanos(patience)));
        }
        flight.jobs.push(job);
        flight.seen.push(worker);
        let (key, sized, hedge_at) = (flight.key, flight.sized, flight.hedge_at);
        let job_of = Job {
            flight: id,
            worker,
            key,
            sized,
            epoch,
            work,
            forecast,
            sent: now,
            ticket: None,
            since: now,
            times: Default::default(),
            share: 0,
            cancelled: false,
            kept: false,
            is_answered: false,
        };
        self.jobs.insert(job, job_of);
        if let Some(at) = hedge_at.filter(|_| self.front.encoders.len() > 1) {
            self.agenda.at(at, Event::Hedge(id));
        }
        if let Some(asker) = asker {
            self.item_given(asker, &key);
        }
        self.agenda.after(self.hop(), Event::JobArrives(job));
    }

    /// What an output will be.
    pub(super) fn announced(&mut self, job: JobId) {
        let Some(job) = self.jobs.get(&job).filter(|job| !job.cancelled) else { return };
        let (id, worker, tokens) = (job.flight, job.worker, job.sized.tokens);
        let (forecast, sent) = (job.forecast, job.sent);
        let least = self.spec.proxy.encodes.hedge_after_at_least;
        let Front { views, flights, model, encoders, .. } = &mut self.front;
        let Some(flight) = flights.get_mut(&id) else { return };
        let p95 = views[worker].p95_of_tokens(forecast, (model, flight.modality), tokens);
        if let (Some(p95), false) = (p95, flight.announced) {
            let at = sent.saturating_add(nanos(p95.max(least)));
            flight.hedge_at = flight.hedge_at.map(|_| at);
            if encoders.len() > 1 {
                self.agenda.at(at, Event::Hedge(id));
            }
        }
        flight.announced = true;
        let waiting: BTreeSet<_> = flight.waiting.iter().copied().collect();
        waiting.into_iter().for_each(|r| self.give_if_announced(r, 0));
    }

    /// A second encoder, if the first has taken too long.
    pub(super) fn hedge(&mut self, id: u64) {
        let now = self.agenda.now();
        let Some(flight) = self.front.flights.get_mut(&id) else { return };
        if flight.hedged || flight.jobs.is_empty() || flight.hedge_at.is_none_or(|at| at > now) {
            return;
        }
        flight.hedge_at = None;
        // A PD worker has its own work.
        let spare =
            self.front.encoders.iter().copied().filter(|w| !flight.seen.contains(w)).collect::<Vec<_>>();
        let Some(worker) = self.choose_encoder(id, &spare) else { return };
        if self.front.budget.try_spend(Duration::from_nanos(now)) {
            if let Some(flight) = self.front.flights.get_mut(&id) {
                flight.hedged = true;
            }
            self.send_job_to(id, worker);
        }
    }

    /// The proxy hears of a job's end.
    pub(super) fn job_ended(&mut self, job_id: JobId, end: JobEnd) {
        let Some(job) = self.jobs.get_mut(&job_id) else { return };
        if std::mem::replace(&mut job.is_answered, true) {
            // It was called off meanwhile.
            return self.drop_job(job_id);
        }
        let (id, worker, epoch, work) = (job.flight, job.worker, job.epoch, job.work);
        let (times, kept, took) = (job.times, job.kept, self.agenda.now() - job.sent);
        self.front.views[worker].done(epoch, work);
        self.drop_job(job_id);
        let Some(flight) = self.front.flights.get_mut(&id) else { return };
        flight.jobs.retain(|job| *job != job_id);
        match end {
            JobEnd::Ready => {
                let (modality, waiting) = (flight.modality, flight.waiting.clone());
                self.front.pace.saw(&self.front.model, modality, Duration::from_nanos(took));
                waiting.into_iter().for_each(|r| self.requests[r].waited_for(times));
                self.land(id, (if kept { Source::Kept } else { Source::Encoded }, Source::Shared));
            }
            JobEnd::Full => self.job_failed(id),
        }
    }

    fn job_failed(&mut self, id: u64) {
        let now = Duration::from_nanos(self.agenda.now());
        let Some(flight) = self.front.flights.get_mut(&id) else { return };
        flight.n_failed += 1;
        let n_failed = flight.n_failed;
        if !flight.jobs.is_empty() {
            return;
        }
        if n_failed >= ATTEMPTS || !self.front.budget.try_spend(now) {
            return self.lose(id, &End::Refused);
        }
        self.agenda.after(nanos(backoff(n_failed)), Event::SendAgain(id));
    }

    /// The output is READY. `first` is where it comes from for the request that asked first, the other for the rest.
    fn land(&mut self, id: u64, (first, rest): (Source, Source)) {
        let Some(flight) = self.front.flights.remove(&id) else { return };
        self.front.by_key.remove(&flight.key);
        let (now, instant) = (self.agenda.now(), self.now());
        let item = described(flight.key, flight.modality, flight.sized.tokens);
        self.front.recents.note(&item, &[], instant);
        flight.jobs.iter().for_each(|job| self.call_off(*job));
        for r in flight.waiting.iter().copied() {
            let ended = self.requests[r].phase == Phase::Ended;
            for i in 0..self.requests[r].places.len() {
                let PlaceState::Flying { flight, shared } = self.requests[r].places[i].state else {
                    continue;
                };
                if flight == id && !ended {
                    self.requests[r].places[i].state = PlaceState::Ready;
                    self.requests[r].ready_at = now;
                    self.came_from(r, if shared { rest } else { first });
                }
            }
            self.give_if_announced(r, 0);
        }
        self.serve_loaders(flight.key);
    }

    /// PD workers that wait for an output which no flight is bringing any more: the store has it, or has lost it since.
    fn serve_loaders(&mut self, key: ContentKey) {
        let hop = self.hop();
        if self.store.has(&key) {
            for worker in self.store.told(&key) {
                self.agenda.after(hop, Event::Loadable { worker, key });
            }
            return;
        }
        let asks = self.store.waiting(&key).iter().find_map(|w| self.request_for(*w, &key));
        if let Some(r) = asks {
            self.make_again(r, key);
        }
    }

    /// The output will not come.
    pub(super) fn lose(&mut self, id: u64, end: &End) {
        let Some(flight) = self.front.flights.remove(&id) else { return };
        self.front.by_key.remove(&flight.key);
        flight.jobs.iter().for_each(|job| self.call_off(*job));
        flight.waiting.iter().for_each(|r| self.end(*r, end.clone()));
    }

    /// A job is not wanted any more.
    fn call_off(&mut self, job_id: JobId) {
        let hop = self.hop();
        let Some(job) = self.jobs.get_mut(&job_id) else { return };
        if std::mem::replace(&mut job.is_answered, true) {
            return;
        }
        self.front.views[job.worker].done(job.epoch, job.work);
        self.agenda.after(hop, Event::Cancel(job_id));
    }
}
