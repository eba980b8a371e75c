//! The proxy: the door, what it remembers, flights for what is missing, and who gets the request.

use super::agenda::Nanos;
use super::flights::Flight;
use super::prompts::{chat, key_of, modality_of};
use super::request::{At, Phase, Place, PlaceState, Request, Source};
use super::spec::ClusterSpec;
use super::worker::Worker;
use super::world::{AnswerEnd, Event, World, from_us, nanos};
use crate::curves::{FrontCost, ProxyCost};
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::collections::HashMap;
use std::time::Duration;
use triptych_bench::outcome::End;
use triptych_core::{ContentKey, Modality, ModelName, WorkerId};
use triptych_engine::SequenceId;
use triptych_proto::v1;
use triptych_proxy::decisions::prefix::{PrefixTable, Prefixes};
use triptych_proxy::decisions::score::{choose_home, choose_pd};
use triptych_proxy::decisions::view::{ItemSize, Sent, View};
use triptych_proxy::decisions::{ATTEMPTS, Gate, Pace, Recents, Window, backoff, holder_of_most};

/// The proxy.
pub(super) struct Front {
    /// Whether there are requests to come.
    pub(super) is_offering: bool,
    pub(super) ids: Vec<WorkerId>,
    pub(super) views: Vec<View>,
    pub(super) encoders: Vec<usize>,
    pub(super) pds: Vec<usize>,
    /// PD workers that encode, where nobody else does.
    pub(super) homes: Vec<usize>,
    pub(super) gate: Gate,
    pub(super) recents: Recents,
    pub(super) pace: Pace,
    pub(super) budget: Window,
    pub(super) prefixes: PrefixTable,
    pub(super) flights: HashMap<u64, Flight>,
    pub(super) by_key: HashMap<ContentKey, u64>,
    pub(super) n_flights: u64,
    pub(super) model: ModelName,
    /// Of choices.
    pub(super) rng: StdRng,
    /// Workers by their names, and theirs that they hold.
    pub(super) by_id: HashMap<WorkerId, usize>,
}

impl Front {
    pub(super) fn new(spec: &ClusterSpec, workers: &[Worker], seed: u64) -> Self {
        let with = |which: &dyn Fn(&Worker) -> bool| -> Vec<usize> {
            (0..workers.len()).filter(|i| which(&workers[*i])).collect()
        };
        let encoders = with(&|w| w.encoder.is_some() && w.pd.is_none());
        let homes = if encoders.is_empty() { with(&|w| w.encoder.is_some()) } else { Vec::new() };
        let name = |i: usize| {
            WorkerId::new(format!("{}@10.0.0.1:{i}", if workers[i].pd.is_some() { "pd" } else { "encoder" }))
        };
        let ids: Vec<_> = (0..workers.len()).map(name).collect();
        let policy = spec.proxy.encodes;
        Self {
            is_offering: false,
            by_id: ids.iter().enumerate().map(|(i, id)| (id.clone(), i)).collect(),
            ids,
            views: workers.iter().map(|_| View { is_up: true, ..View::default() }).collect(),
            encoders,
            pds: with(&|w| w.pd.is_some()),
            homes,
            gate: Gate::new(spec.proxy.max_in_flight),
            recents: Recents::new(policy.remembered, policy.believed_for),
            pace: Pace::default(),
            budget: Window::new(policy.retries),
            prefixes: PrefixTable::default(),
            flights: HashMap::new(),
            by_key: HashMap::new(),
            n_flights: 0,
            model: ModelName::new("m"),
            rng: StdRng::seed_from_u64(seed ^ 0x0005_eed0_fc40_1ce5),
        }
    }

    /// The encoders' name for the model.
    pub(super) fn model(&self) -> &ModelName {
        &self.model
    }

    pub(super) fn of_item<'a>(&'a self, modality: Modality, bytes: u64) -> ItemSize<'a> {
        ItemSize { model: &self.model, modality, bytes }
    }

    /// Encoders, or what stands in for them.
    pub(super) fn encoder_pool(&self) -> &[usize] {
        if self.encoders.is_empty() { &self.homes } else { &self.encoders }
    }
}

/// Requests.
impl World<'_> {
    pub(super) fn arrive(&mut self, r: usize) {
        self.in_flight += 1;
        let Ok(permit) = self.front.gate.enter() else {
            self.items.failed += self.requests[r].offered.items.len() as u64;
            return self.end(r, End::Refused);
        };
        self.requests[r].permit = Some(permit);
        let places = self.places(r);
        let bytes: u64 = places.iter().map(|place| place.sized.bytes).sum();
        let (proxy, front) = self.front_cost();
        let (n_items, bytes) = (places.len() as f64, bytes as f64);
        let us = proxy.request_us + proxy.item_us * n_items + proxy.item_byte_us * bytes;
        self.front_works(front.request_us + front.item_us * n_items + front.item_byte_us * bytes, None);
        self.requests[r].places = places;
        self.choose_home(r);
        let deadline = nanos(self.requests[r].offered.at.saturating_add(self.spec.request_time));
        self.agenda.at(deadline, Event::Deadline(r));
        self.supply(r, from_us(us));
    }

    fn front_cost(&self) -> (ProxyCost, FrontCost) {
        let curves = self.workers.first().map(|w| w.costs.curves());
        curves.map(|c| (c.proxy, c.front)).unwrap_or_default()
    }

    fn places(&mut self, r: usize) -> Vec<Place> {
        let items = self.requests[r].offered.items.clone();
        let place = |item: &triptych_bench::offered::OfferedItem| {
            let (key, sized) = (key_of(item), self.size(item.shape));
            Place { key, sized, state: PlaceState::Ready, holder: None }
        };
        items.iter().map(place).collect()
    }

    /// Chooses the PD worker that encodes a request's items and answers it, and reserves there what it will.
    fn choose_home(&mut self, r: usize) {
        let (now, request) = (self.now(), &self.requests[r]);
        if request.places.is_empty() || !self.front.encoders.is_empty() {
            return;
        }
        let Front { views, homes, model, rng, .. } = &mut self.front;
        let items = request.places.iter().zip(&request.offered.items);
        let size = |modality, bytes| ItemSize { model, modality, bytes };
        let sizes: Vec<_> =
            items.map(|(place, item)| (place.key, size(modality_of(item), place.sized.bytes))).collect();
        let open: Vec<_> = homes.iter().copied().filter(|w| !views[*w].is_full()).collect();
        let loads: Vec<_> = open.iter().map(|w| views[*w].home_load(&sizes, now)).collect();
        let chosen = choose_home(&loads, rng).and_then(|place| open.get(place).copied());
        let missing = chosen.map(|home| views[home].missing_us(&sizes)).unwrap_or_default();
        if let Some(home) = chosen {
            missing.iter().for_each(|(_, us)| views[home].reserve(*us));
        }
        (self.requests[r].home, self.requests[r].reserved) = (chosen, missing);
    }

    /// An item was given to a worker, which counts it from now on.
    pub(super) fn item_given(&mut self, r: usize, key: &ContentKey) {
        let Request { home, reserved, .. } = &mut self.requests[r];
        let at = reserved.iter().position(|(one, _)| one == key);
        if let (Some(home), Some(at)) = (home, at) {
            let (_, us) = reserved.swap_remove(at);
            self.front.views[*home].release(us);
        }
    }

    /// All that had to be given was.
    fn settle(&mut self, r: usize) {
        let Request { home, reserved, .. } = &mut self.requests[r];
        if let Some(home) = home {
            reserved.drain(..).for_each(|(_, us)| self.front.views[*home].release(us));
        }
    }

    /// Looks for the outputs or has them made; `pause` is what the proxy takes for it.
    fn supply(&mut self, r: usize, pause: Nanos) {
        let known = self.known(r);
        for (i, known) in known.into_iter().enumerate() {
            match known {
                Some((source, holder)) => {
                    self.requests[r].places[i].holder = holder;
                    self.came_from(r, source);
                }
                None => self.board(r, i, pause),
            }
        }
        if self.requests[r].places.iter().all(|place| place.state == PlaceState::Ready) {
            self.requests[r].ready_at = self.agenda.now();
        }
        self.give_if_announced(r, pause);
    }

    /// What needs no question to the store.
    fn known(&self, r: usize) -> Vec<Option<(Source, Option<usize>)>> {
        let (now, front) = (self.now(), &self.front);
        let places = &self.requests[r].places;
        let young =
            places.iter().map(|p| front.recents.young(&p.key, now).map(|_| (Source::Remembered, None)));
        let mut known: Vec<_> = young.collect();
        let held = |place: &Place| match front.recents.described(&place.key) {
            Some(_) => self.holders(&place.key),
            None => Vec::new(),
        };
        let held: Vec<_> = places
            .iter()
            .zip(&known)
            .map(|(p, known)| if known.is_some() { Vec::new() } else { held(p) })
            .collect();
        let all: Vec<_> = held.iter().map(Vec::as_slice).collect();
        let Some(best) = holder_of_most(&all) else { return known };
        for (known, _) in known.iter_mut().zip(&held).filter(|(_, held)| held.contains(&best)) {
            *known = Some((Source::Resident, front.by_id.get(&best).copied()));
        }
        known
    }

    fn holders(&self, key: &ContentKey) -> Vec<WorkerId> {
        let holds = |w: &&usize| self.front.views[**w].resident.contains(key);
        self.front.pds.iter().filter(holds).map(|w| self.front.ids[*w].clone()).collect()
    }

    pub(super) fn came_from(&mut self, r: usize, source: Source) {
        let items = &mut self.items;
        *match source {
            Source::Remembered => &mut items.remembered,
            Source::Resident => &mut items.resident,
            Source::Stored => &mut items.stored,
            Source::Shared => &mut items.shared,
            Source::Encoded => &mut items.encoded,
            Source::Kept => &mut items.kept,
        } += 1;
        self.requests[r].found(source);
    }

    /// Gives the request to a PD worker as soon as each of its items is announced.
    pub(super) fn give_if_announced(&mut self, r: usize, pause: Nanos) {
        let request = &self.requests[r];
        if request.phase != Phase::Supplying {
            return;
        }
        let is_announced = |place: &Place| match place.state {
            PlaceState::Ready => true,
            PlaceState::Flying { flight, .. } => self.front.flights.get(&flight).is_some_and(|f| f.announced),
        };
        if request.places.iter().all(is_announced) {
            self.settle(r);
            self.front.budget.first_try(Duration::from_nanos(self.agenda.now()));
            self.requests[r].phase = Phase::Answering;
            match pause {
                0 => self.give(r),
                _ => self.agenda.after(pause, Event::GiveAgain(r)),
            }
        }
    }

    /// Chooses a PD worker and sends the request there.
    pub(super) fn give(&mut self, r: usize) {
        let request = &self.requests[r];
        if request.phase != Phase::Answering {
            return;
        }
        let keys: Vec<_> = request.places.iter().map(|place| place.key).collect();
        let prompt = Prefixes::of(b"", &chat(&request.offered, &self.spec.prompt), &keys);
        let Some(worker) = self.choose_pd(r, &prompt) else {
            return self.end(r, End::Failed("unavailable".into()));
        };
        self.front.prefixes.read(&prompt, &self.front.ids[worker]);
        let work = Sent { n: 1, encode_us: 0, tokens: prompt.n_tokens() };
        let epoch = self.front.views[worker].give(work);
        let sequence = self.next_sequence();
        self.requests[r].at = Some(At { worker, sequence, epoch, work, is_in: false });
        self.agenda.after(self.hop(), Event::Given(r));
    }

    fn choose_pd(&mut self, r: usize, prompt: &Prefixes) -> Option<usize> {
        let (front, request) = (&mut self.front, &self.requests[r]);
        let fresh: Vec<_> = front.pds.iter().copied().filter(|w| !request.tried.contains(w)).collect();
        let mut able = if fresh.is_empty() { front.pds.clone() } else { fresh };
        let holder = request.places.iter().find_map(|place| place.holder).or(request.home);
        if let Some(holder) = holder.filter(|w| able.contains(w) && !front.views[*w].is_full()) {
            able = vec![holder];
        }
        let row_bytes = |place: &Place| {
            let bytes = self.workers.first().map_or(0, |w| w.costs.row_bytes(place.sized.tokens));
            (place.key, bytes)
        };
        let items: Vec<_> = request.places.iter().map(row_bytes).collect();
        let reader = front.prefixes.reader(prompt).map(|(id, n)| (id.clone(), n));
        let load = |w: &usize| {
            let read = reader.as_ref().filter(|(id, _)| *id == front.ids[*w]).map_or(0, |(_, n)| *n);
            front.views[*w].pd_load(&items, prompt.n_tokens().saturating_sub(read))
        };
        let loads: Vec<_> = able.iter().map(load).collect();
        choose_pd(&loads, &mut front.rng).and_then(|choice| able.get(choice.index).copied())
    }

    /// The PD worker's part is over.
    pub(super) fn answered(&mut self, r: usize, end: AnswerEnd) {
        self.take_back(r);
        match end {
            AnswerEnd::Whole => self.end(r, End::Whole),
            AnswerEnd::Short => self.end(r, End::Short),
            AnswerEnd::Late => self.end(r, End::Failed("deadline_exceeded".into())),
            AnswerEnd::Failed => self.end(r, End::Failed("internal".into())),
            AnswerEnd::Full => self.try_elsewhere(r),
        }
    }

    fn try_elsewhere(&mut self, r: usize) {
        let now = Duration::from_nanos(self.agenda.now());
        let n_tried = self.requests[r].tried.len() as u32;
        if self.requests[r].phase != Phase::Answering {
            return;
        }
        if n_tried >= ATTEMPTS || !self.front.budget.try_spend(now) {
            return self.end(r, End::Refused);
        }
        self.agenda.after(nanos(backoff(n_tried)), Event::GiveAgain(r));
    }

    /// Takes the request off the load of the worker that has it.
    fn take_back(&mut self, r: usize) -> Option<At> {
        let at = self.requests[r].at.take()?;
        self.front.views[at.worker].done(at.epoch, at.work);
        Some(at)
    }

    /// A request's time is over.
    pub(super) fn deadline(&mut self, r: usize) {
        if self.requests[r].phase != Phase::Ended {
            self.end(r, End::Failed("deadline_exceeded".into()));
        }
    }

    /// The end, for the client.
    pub(super) fn end(&mut self, r: usize, end: End) {
        if self.requests[r].phase == Phase::Ended {
            return;
        }
        if let Some(at) = self.take_back(r) {
            self.abort(at.worker, at.sequence);
        }
        self.settle(r);
        let (now, hop) = (self.agenda.now(), self.hop());
        let request = &mut self.requests[r];
        request.phase = Phase::Ended;
        request.permit = None;
        request.outcome.ended =
            Duration::from_nanos(now + hop).max(request.outcome.tokens.last().copied().unwrap_or_default());
        request.outcome.end = end;
        self.in_flight -= 1;
        let flying = self.requests[r].places.iter().filter_map(|place| match place.state {
            PlaceState::Flying { flight, .. } => Some(flight),
            PlaceState::Ready => None,
        });
        self.items.failed += flying.count() as u64;
    }

    /// A report.
    pub(super) fn told(&mut self, worker: usize, state: v1::WorkerState) {
        let now = self.now();
        self.front.views[worker].take_report(state, false, now);
    }

    /// Requests that wait, as somebody at a PD worker knows them.
    pub(super) fn request_of(&self, worker: usize, sequence: SequenceId) -> Option<usize> {
        self.workers[worker].pd.as_ref()?.requests.get(&sequence).copied()
    }
}

impl Request {
    /// Whether a PD worker still has it under this name.
    pub(super) fn is_at(&self, worker: usize, sequence: SequenceId) -> bool {
        self.at.is_some_and(|at| at.worker == worker && at.sequence == sequence)
    }
}
