//! The requests that the proxy works on: the actions of [`triptych_proxy::request_machine::request`], on a simulated network.

use super::event_queue::Nanos;
use super::output::Output;
use super::prompts::{chat, is_stored};
use super::proxy::Proxy;
use super::request::{At, Item, ItemState, Request};
use super::source::Source;
use super::world::{AnswerEnd, Event, World, from_us, nanos};
use crate::curves::{FrontCost, ProxyCost};
use std::time::{Duration, Instant};
use triptych_bench::outcome::End;
use triptych_core::{ContentKey, Failure, FailureClass, ItemIdx, RequestId, TowerIdx, WorkerId};
use triptych_engine::SequenceId;
use triptych_proto::v1;
use triptych_proxy::Roles;
use triptych_proxy::decisions::elastic::place_elastic;
use triptych_proxy::decisions::prefix::Prefixes;
use triptych_proxy::decisions::reservation::Reservation;
use triptych_proxy::decisions::score::{PdLoad, choose_pd, choose_placement};
use triptych_proxy::decisions::view::{ItemSize, Sent};
use triptych_proxy::request_machine::action::{LeftItems, RequestAction};
use triptych_proxy::request_machine::deaths::RequestFingerprint;
use triptych_proxy::request_machine::encodes::{Leave, Renewal};
use triptych_proxy::request_machine::event::{BrokenCall, RequestEvent};
use triptych_proxy::request_machine::output::{Encoded, Origin};
use triptych_proxy::request_machine::request::{RequestFacts, RequestMachine};
use triptych_proxy::request_machine::surroundings::RequestSurroundings;

/// Requests.
impl World<'_> {
    /// A request is at the proxy, which reads it.
    pub(super) fn arrive(&mut self, r: usize) {
        self.in_flight += 1;
        let items = self.items_of(r);
        // An item comes with the request once, whatever number of towers reads it.
        let is_first = |item: &&Item| item.output.tower == TowerIdx::default();
        self.requests[r].outcome.items.n = items.iter().filter(is_first).count() as u32;
        let Ok(permit) = self.proxy.admission.enter() else {
            self.items.failed += u64::from(self.requests[r].outcome.items.n);
            return self.end(r, End::Refused);
        };
        self.requests[r].permit = Some(permit);
        let bytes: u64 = items.iter().filter(is_first).map(|item| item.output.sized.bytes).sum();
        let (proxy, front) = self.front_cost();
        // Key, probe, lease and job are each output's own.
        let (n_outputs, bytes) = (items.len() as f64, bytes as f64);
        let us = proxy.request_us + proxy.item_us * n_outputs + proxy.item_byte_us * bytes;
        self.front_works(front.request_us + front.item_us * n_outputs + front.item_byte_us * bytes, None);
        self.requests[r].items = items;
        self.queue.after(from_us(us), Event::Supply(r));
    }

    fn front_cost(&self) -> (ProxyCost, FrontCost) {
        let curves = self.workers.first().map(|w| w.costs.curves());
        curves.map(|c| (c.proxy, c.front)).unwrap_or_default()
    }

    fn items_of(&mut self, r: usize) -> Vec<Item> {
        let mut items = Vec::new();
        let Some(costs) = self.encoder_costs() else { return items };
        for (i, item) in self.requests[r].offered.items.clone().into_iter().enumerate() {
            let mut sizes = self.sizes(item.shape, &costs);
            let is_stored = is_stored(&item, self.spec.store.named);
            if is_stored {
                sizes.iter_mut().for_each(|size| size.bytes = 0);
            }
            for output in Output::all_of(&item, &sizes, &costs) {
                if is_stored {
                    self.store.hold_from_start(output.key, output.bytes(&costs));
                }
                items.push(Item::new(i, output, is_stored));
            }
        }
        items
    }

    /// Looks for the outputs or has them made.
    pub(super) fn supply(&mut self, r: usize) {
        let request = &self.requests[r];
        let has_items = request.items.iter().any(|item| !item.is_stored);
        if has_items && request.permit.as_ref().is_some_and(|permit| permit.with_items().is_err()) {
            return self.end(r, End::Refused);
        }
        self.place(r);
        let (now, deadline) = (self.now(), self.deadline_of(r));
        let request = &self.requests[r];
        let keys: Vec<_> = request.items.iter().map(|item| item.output.key).collect();
        let proxy = &mut self.proxy;
        let known = proxy.encodes.known(&keys, |key| proxy.holders(key), now);
        let id = RequestId::from_bits(r as u128);
        let facts = RequestFacts {
            id,
            // Simulated workers do not die.
            fingerprint: RequestFingerprint::from_bytes([0; 32]),
            model: proxy.model.clone(),
            n_items: keys.len(),
            placed: request.placed.map(|w| proxy.ids[w].clone()),
            is_resumable: true,
            arrived: now,
            deadline,
        };
        let mut around = RequestSurroundings { now, budget: &mut proxy.budget, deaths: &mut proxy.deaths };
        let (machine, actions) = RequestMachine::new(facts, &mut around);
        self.requests[r].machine = Some(machine);
        self.requests[r].ready_at = self.queue.now();
        self.perform(r, actions);
        for (i, known) in known.into_iter().enumerate() {
            match known {
                Some(encoded) => {
                    let source = Source::known(&encoded);
                    self.item_ready(r, i, encoded, source);
                }
                None => self.subscribe(r, i, Origin::Any),
            }
        }
        self.wake_request(r);
    }

    /// Chooses the PD worker that encodes a request's items and answers it, and reserves there what it will.
    fn place(&mut self, r: usize) {
        let (now, request) = (self.now(), &self.requests[r]);
        if request.items.iter().all(|item| item.is_stored) || !self.proxy.encoders.is_empty() {
            return;
        }
        self.proxy.divide();
        let request = &self.requests[r];
        let colocated = self.proxy.answering(&self.proxy.colocated);
        let prefill = self.proxy.prefill_time();
        let Proxy { views, model, rng, ids, roles, .. } = &mut self.proxy;
        let size = |output: Output| ItemSize { model, encoder: output.encoder(), bytes: output.sized.bytes };
        let unplaced = |item: &Item| (item.output.key, (!item.is_stored).then(|| size(item.output)));
        let sizes: Vec<_> = request.items.iter().map(unplaced).collect();
        let open: Vec<_> = colocated.iter().copied().filter(|w| !views[*w].is_full()).collect();
        let placed = match roles {
            Roles::Auto => {
                let site = |w: &usize| views[*w].placement_site(&ids[*w], &sizes, prefill, now);
                place_elastic(&open.iter().map(site).collect::<Vec<_>>(), rng)
            }
            Roles::Fixed => {
                let load = |w: &usize| views[*w].placement_load(&sizes, prefill, now);
                choose_placement(&open.iter().map(load).collect::<Vec<_>>(), rng)
            }
        };
        let Some(placed) = placed.and_then(|index| open.get(index).copied()) else { return };
        let reservation = Reservation::new(views[placed].missing_us(&sizes));
        views[placed].reserve(reservation.left_us());
        (self.requests[r].placed, self.requests[r].reservation) = (Some(placed), reservation);
    }

    /// An item was given to a worker, which counts it from now on.
    pub(super) fn item_given(&mut self, r: usize, key: &ContentKey) {
        let Request { placed, reservation, .. } = &mut self.requests[r];
        if let Some(placed) = placed {
            self.proxy.views[*placed].release(reservation.given(key));
        }
    }

    /// All that had to be given was.
    fn settle(&mut self, r: usize) {
        let Request { placed, reservation, .. } = &mut self.requests[r];
        if let Some(placed) = placed {
            self.proxy.views[*placed].release(reservation.settle());
        }
    }

    pub(super) fn deadline_of(&self, r: usize) -> Instant {
        self.instant(nanos(self.requests[r].offered.at.saturating_add(self.spec.request_time)))
    }

    /// Tells a request what happened.
    pub(super) fn request_on(&mut self, r: usize, event: RequestEvent) {
        let now = self.now();
        let Some(machine) = &mut self.requests[r].machine else { return };
        let Proxy { budget, deaths, .. } = &mut self.proxy;
        let actions = machine.on(event, &mut RequestSurroundings { now, budget, deaths });
        self.perform(r, actions);
        self.wake_request(r);
    }

    /// Sees to it that a request is woken in time.
    fn wake_request(&mut self, r: usize) {
        let Some(at) = self.requests[r].machine.as_ref().and_then(RequestMachine::wake_at) else { return };
        let at = self.nanos_of(at);
        if self.requests[r].wake != Some(at) {
            self.requests[r].wake = Some(at);
            self.queue.at(at, Event::WakeRequest(r));
        }
    }

    fn perform(&mut self, r: usize, actions: Vec<RequestAction>) {
        for action in actions {
            match action {
                RequestAction::Supplied => self.settle(r),
                RequestAction::Choose { tried, holders } => self.choose(r, &tried, &holders),
                RequestAction::ChooseIdle { tried } => self.choose(r, &tried, &[]),
                RequestAction::GiveBack => self.requests[r].chosen = None,
                RequestAction::Send { .. } => self.send(r),
                RequestAction::Retry { .. } => {}
                RequestAction::Renew { item, .. } => self.renew(r, item),
                RequestAction::Finish => {
                    self.leave_items(r, Leave::GiveUp);
                    let end = self.requests[r].answer_end.clone();
                    self.end(r, end);
                }
                RequestAction::Fail { failure, items, .. } => {
                    let leave = match items {
                        LeftItems::GoOn => Leave::GoOn,
                        LeftItems::Dropped => Leave::GiveUp,
                    };
                    self.leave_items(r, leave);
                    self.end(r, end_of(&failure));
                }
            }
        }
    }

    /// Chooses a PD worker.
    fn choose(&mut self, r: usize, tried: &[WorkerId], holders: &[WorkerId]) {
        let request = &self.requests[r];
        let n_towers = (request.items.len() / request.offered.items.len().max(1)).max(1);
        let keys: Vec<_> = request.items.iter().step_by(n_towers).map(|item| item.output.key).collect();
        let prompt = Prefixes::of(b"", &chat(&request.offered, &self.spec.prompt), &keys);
        if let Some(worker) = self.choose_pd(r, &prompt, tried, holders) {
            let id = self.proxy.ids[worker].clone();
            self.proxy.prefixes.read(&prompt, &id);
            self.requests[r].chosen = Some((worker, prompt.n_tokens()));
            self.request_on(r, RequestEvent::Worker(id));
        }
    }

    fn choose_pd(
        &mut self,
        r: usize,
        prompt: &Prefixes,
        tried: &[WorkerId],
        holders: &[WorkerId],
    ) -> Option<usize> {
        let now = self.now();
        self.proxy.divide();
        let (proxy, request) = (&mut self.proxy, &self.requests[r]);
        let among = |w: &usize, ids: &[WorkerId]| ids.contains(&proxy.ids[*w]);
        let fresh: Vec<_> = proxy.pds.iter().copied().filter(|w| !among(w, tried)).collect();
        let mut able = proxy.answering(if fresh.is_empty() { &proxy.pds } else { &fresh });
        let holds = |w: &usize| among(w, holders) && !proxy.views[*w].is_full();
        if able.iter().any(holds) {
            able.retain(holds);
        }
        let row_bytes = |item: &Item| {
            let bytes = self.workers.first().map_or(0, |w| item.output.bytes(&w.costs));
            (item.output.key, bytes)
        };
        let items: Vec<_> = request.items.iter().map(row_bytes).collect();
        let prefill = proxy.prefill_time();
        let reader = proxy.prefixes.reader(prompt).map(|(id, n)| (id.clone(), n));
        let load = |w: &usize| {
            let read = reader.as_ref().filter(|(id, _)| *id == proxy.ids[*w]).map_or(0, |(_, n)| *n);
            let encode_us = match proxy.roles {
                Roles::Auto if proxy.colocated.contains(w) => proxy.views[*w].queued_us(now),
                _ => 0,
            };
            let own_tokens = prompt.n_tokens().saturating_sub(read);
            let load = proxy.views[*w].pd_load(&items, own_tokens, prefill);
            PdLoad { encode_us, ..load }
        };
        let loads: Vec<_> = able.iter().map(load).collect();
        choose_pd(&loads, &mut proxy.rng).and_then(|choice| able.get(choice.index).copied())
    }

    /// Sends the request to the chosen PD worker.
    fn send(&mut self, r: usize) {
        let Some((worker, tokens)) = self.requests[r].chosen.take() else { return };
        let work = Sent { n: 1, encode_us: 0, tokens };
        let epoch = self.proxy.views[worker].give(work);
        let sequence = self.next_sequence();
        self.requests[r].at = Some(At { worker, sequence, epoch, work });
        self.queue.after(self.hop(), Event::Given(r, sequence));
    }

    /// Has an item encoded again that a PD worker did not find, if it was READY.
    fn renew(&mut self, r: usize, idx: ItemIdx) {
        let (i, now) = (idx.0 as usize, self.now());
        let Some(lost) = self.requests[r].items.get_mut(i).and_then(|item| item.encoded.take()) else {
            return;
        };
        match self.proxy.encodes.renewal(&lost, now) {
            Renewal::Ready(encoded) => self.item_ready(r, i, *encoded, Source::Shared),
            Renewal::Encode(origin) => self.subscribe(r, i, origin),
        }
    }

    /// An item of a request is READY.
    pub(super) fn item_ready(&mut self, r: usize, i: usize, encoded: Encoded, source: Source) {
        let (now, holders) = (self.queue.now(), encoded.holders.clone());
        let request = &mut self.requests[r];
        let item = &mut request.items[i];
        (item.state, item.encoded) = (ItemState::Ready, Some(encoded));
        request.ready_at = now;
        if let Some(source) = request.found(i, source) {
            self.items.count(source);
        }
        self.request_on(r, RequestEvent::ItemReady { item: ItemIdx(i as u32), holders });
    }

    /// The PD worker's part is over.
    pub(super) fn answered(&mut self, r: usize, sequence: SequenceId, end: AnswerEnd) {
        if self.requests[r].at.is_none_or(|at| at.sequence != sequence) {
            return;
        }
        self.take_back(r);
        let broke = |class, missing| {
            let failure = Failure::new(class, "as the simulated worker says");
            RequestEvent::Broke(BrokenCall { failure, missing, lost: None })
        };
        let event = match end {
            AnswerEnd::Whole | AnswerEnd::Short => {
                self.requests[r].answer_end = if end == AnswerEnd::Whole { End::Whole } else { End::Short };
                RequestEvent::Answered
            }
            AnswerEnd::Full => broke(FailureClass::Overloaded, None),
            AnswerEnd::Late => broke(FailureClass::DeadlineExceeded, None),
            AnswerEnd::Failed => broke(FailureClass::Internal, None),
            AnswerEnd::Missing(item) => broke(FailureClass::Unavailable, Some(item)),
        };
        self.request_on(r, event);
    }

    /// Takes the request off the load of the worker that has it.
    fn take_back(&mut self, r: usize) -> Option<At> {
        let at = self.requests[r].at.take()?;
        self.proxy.views[at.worker].done(at.epoch, at.work);
        Some(at)
    }

    /// The end, for the client.
    fn end(&mut self, r: usize, end: End) {
        if let Some(at) = self.take_back(r) {
            self.abort(at.worker, at.sequence);
        }
        self.settle(r);
        let (now, hop) = (self.queue.now(), self.hop());
        let request = &mut self.requests[r];
        request.permit = None;
        request.outcome.ended =
            Duration::from_nanos(now + hop).max(request.outcome.tokens.last().copied().unwrap_or_default());
        request.outcome.end = end;
        self.in_flight -= 1;
        self.items.failed += request.n_failed();
    }

    /// A report.
    pub(super) fn reported(&mut self, worker: usize, state: v1::WorkerState) {
        let now = self.now();
        let done = self.proxy.views[worker].take_report(state, false, now);
        self.proxy.work.add(now, done);
    }

    /// The request that a PD worker knows under this name.
    pub(super) fn request_of(&self, worker: usize, sequence: SequenceId) -> Option<usize> {
        self.workers[worker].pd.as_ref()?.requests.get(&sequence).copied()
    }

    fn nanos_of(&self, at: Instant) -> Nanos {
        nanos(at.saturating_duration_since(self.base))
    }
}

/// The end that a client sees in a failure.
fn end_of(failure: &Failure) -> End {
    match failure.class {
        FailureClass::Overloaded => End::Refused,
        class => End::Failed(class.as_str().into()),
    }
}
