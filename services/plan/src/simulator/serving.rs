//! A PD worker: what it lets in, loads, and its engine's loop around the product's own scheduler.

use super::event_queue::Nanos;
use super::output::{Output, for_engine, sealed};
use super::prompts::{OutputRows, Stream, laid_out};
use super::request::ns;
use super::worker::{Command, PdSide, Stepping, Task};
use super::world::{AnswerEnd, Event, World, from_us, nanos};
use crate::curves::StepShape;
use std::time::Duration;
use triptych_core::sampling::SamplingParams;
use triptych_core::{ContentKey, FailureClass, RequestId, TenantId};
use triptych_engine::plan::{Chunk, StepPlan};
use triptych_engine::scheduler::{DraftTokens, ScheduledStep};
use triptych_engine::{SequenceId, SequenceRequest, Stats};
use triptych_pd::lending;

impl World<'_> {
    /// A request is at its PD worker.
    pub(super) fn given(&mut self, r: usize, sequence: SequenceId) {
        let Some(at) = self.requests[r].at.filter(|at| at.sequence == sequence) else { return };
        let w = at.worker;
        let Some(pd) = &mut self.workers[w].pd else { return };
        if pd.n_requests >= pd.spec.engine.max_requests || pd.n_live >= pd.spec.engine.max_live() {
            let end = AnswerEnd::Full;
            return self.queue.after(self.hop(), Event::Answered { request: r, sequence, end });
        }
        pd.n_requests += 1;
        pd.n_live += 1;
        pd.requests.insert(at.sequence, r);
        self.workers[w].used.n_requests += 1;
        let arrival = self.arrival(r, at.sequence);
        let keys: Vec<ContentKey> = arrival.items.iter().map(|item| item.key).collect();
        self.command(w, Command::Arrive(Box::new(arrival)));
        for key in keys {
            let holder = RequestId::from_bits(at.sequence.0.into());
            let Some(pd) = &mut self.workers[w].pd else { return };
            pd.rows.hold(holder, key);
            match pd.rows.contains(&key) {
                true => {
                    self.items.loads_saved += 1;
                    self.deliver(w, key);
                }
                false => self.want(w, key),
            }
        }
        self.report_soon(w);
    }

    fn arrival(&mut self, r: usize, id: SequenceId) -> SequenceRequest {
        let costs = self.encoder_costs();
        let is_cross = |output: &Output| {
            costs.as_ref().is_some_and(|costs| costs.encoder(output.tower).is_cross_attended)
        };
        let request = &mut self.requests[r];
        let outputs = request.items.iter().map(|item| &item.output);
        let rows =
            outputs.map(|output| OutputRows { n: output.sized.tokens, is_cross_attended: is_cross(output) });
        let (prepared, place) = laid_out(&request.offered, &rows.collect::<Vec<_>>(), &self.spec.prompt);
        request.answer_place = place;
        let items = request.items.iter().map(|item| item.output.described());
        let sampling = SamplingParams {
            max_tokens: Some(request.offered.output_tokens.max(1)),
            temperature: 0.0,
            ignore_eos: true,
            ..SamplingParams::default()
        };
        let deadline = nanos(request.offered.at.saturating_add(self.spec.request_time));
        SequenceRequest {
            ids: vec![id],
            prepared,
            encoder_tokens: [].into(),
            items: items.collect(),
            sampling,
            constraint: None,
            priority: 0,
            adapter: None,
            tenant: TenantId::SHARED,
            deadline: self.base + Duration::from_nanos(deadline),
            resumed: None,
        }
    }

    /// Nobody wants this answer any more.
    pub(super) fn abort(&mut self, w: usize, sequence: SequenceId) {
        // As if it was reported at once: a hop is nothing beside a step.
        if self.request_of(w, sequence).is_some() {
            self.leave_pd(w, sequence);
            self.command(w, Command::Abort(sequence));
        }
    }

    /// A request is out of a PD worker's books, but for its engine's.
    fn leave_pd(&mut self, w: usize, sequence: SequenceId) -> Option<usize> {
        let pd = self.workers[w].pd.as_mut()?;
        let r = pd.requests.remove(&sequence)?;
        pd.n_requests -= 1;
        pd.n_live -= 1;
        pd.rows.release(RequestId::from_bits(sequence.0.into()));
        self.report_soon(w);
        Some(r)
    }

    /// Something for the engine, which hears of it between two steps.
    pub(super) fn command(&mut self, w: usize, command: Command) {
        let Some(pd) = &mut self.workers[w].pd else { return };
        pd.inbox.push(command);
        if !pd.is_busy {
            pd.is_busy = true;
            self.queue.after(0, Event::Turn(w));
        }
    }
}

/// The engine's loop.
impl World<'_> {
    /// Work between two steps: commands, then a step, in its turn.
    pub(super) fn turn(&mut self, w: usize) {
        self.apply_commands(w);
        if let Some(wait) = self.lends_for(w) {
            return self.lend(w, wait);
        }
        let worker = &mut self.workers[w];
        match &mut worker.turns {
            Some(taking) => {
                taking.turns.ask_step(taking.engine);
                taking.step_asked = true;
                self.take_turns(w);
            }
            None => self.step(w),
        }
    }

    /// Time for which the next decode step waits for encodes of others on the cores that this worker shares; it looks again then.
    fn lends_for(&self, w: usize) -> Option<Duration> {
        let worker = &self.workers[w];
        let pd = worker.pd.as_ref().filter(|_| worker.lent.is_some())?;
        lending::wait(pd.scheduler.spare_decode_slack(self.now()), || self.others_encode(w))
    }

    fn lend(&mut self, w: usize, wait: Duration) {
        let at = self.queue.now() + nanos(wait);
        let worker = &mut self.workers[w];
        if let Some(taking) = &mut worker.turns {
            taking.turns.rest(taking.engine);
        }
        if let Some(pd) = &mut worker.pd {
            pd.is_busy = false;
            pd.wake = Some(at);
            self.queue.at(at, Event::Wake { worker: w, at });
        }
        self.take_turns(w);
    }

    fn apply_commands(&mut self, w: usize) {
        let now = self.now();
        let Some(pd) = &mut self.workers[w].pd else { return };
        let commands = std::mem::take(&mut pd.inbox);
        let mut refused = Vec::new();
        for command in commands {
            let Some(pd) = &mut self.workers[w].pd else { return };
            pd.stalled = false;
            match command {
                Command::Arrive(arrival) => {
                    let id = arrival.ids[0];
                    // One that was aborted before it was heard of does not arrive.
                    if pd.requests.contains_key(&id)
                        && let Err(failure) = pd.scheduler.add(&arrival, now)
                    {
                        refused.push((id, failure.class));
                    }
                }
                Command::Item(key) => {
                    if let Some(kept) = pd.rows.get(&key) {
                        let output = sealed(for_engine(kept.item()));
                        pd.scheduler.items().deliver(&key, output);
                    }
                }
                Command::Abort(id) => {
                    pd.scheduler.abandon(id);
                }
            }
        }
        refused.into_iter().for_each(|(id, class)| self.fail(w, id, class));
    }

    /// A step, if anything can run.
    pub(super) fn step(&mut self, w: usize) {
        let (now, instant) = (self.queue.now(), self.now());
        let Some(pd) = &mut self.workers[w].pd else { return };
        let ScheduledStep { plan, failed, changed } = pd.scheduler.step(instant, &mut DraftTokens::new());
        pd.stalled = plan.is_empty() && failed.is_empty() && !changed;
        if plan.is_empty() {
            failed.into_iter().for_each(|(id, failure)| self.fail(w, id, failure.class));
            return self.after_step(w, 0);
        }
        let shape = shape_of(pd, &plan);
        pd.stepping = Some(Stepping { plan, began: now });
        failed.into_iter().for_each(|(id, failure)| self.fail(w, id, failure.class));
        let costs = self.costs_now(w);
        let mut work = self.draw(costs.step(shape));
        let worker = &mut self.workers[w];
        if worker.is_pipelined {
            let n_choosing = shape.decodes + u32::from(shape.prefill_tokens > 0);
            work = from_us(costs.curves().pipelined_us(work as f64 / 1e3, n_choosing));
        }
        let threads = worker.threads();
        worker.used.n_steps += 1;
        worker.used.n_rows += u64::from(shape.prefill_tokens + shape.decodes);
        self.compute(w, Task::Step(shape.stage()), (work, threads));
    }

    /// A step is done: tokens are there.
    pub(super) fn stepped(&mut self, w: usize) {
        let (now, instant) = (self.queue.now(), self.now());
        let Some(pd) = &mut self.workers[w].pd else { return };
        let Some(Stepping { plan, began }) = pd.stepping.take() else { return };
        pd.scheduler.commit(&plan);
        pd.scheduler.observe(&plan, Duration::from_nanos(now - began));
        let shape = shape_of(pd, &plan);
        let n_tokens = u64::from(shape.prefill_tokens + shape.decodes);
        self.span(w, shape.stage(), (began, plan.chunks.len(), n_tokens));
        if plan.chunks.iter().any(|chunk| chunk.n_choices() > 0) {
            self.worker_front_works(w, self.workers[w].costs.curves().front.wake_us);
        }
        for chunk in plan.chunks.iter().filter(|chunk| chunk.n_choices() > 0) {
            let Some(pd) = &mut self.workers[w].pd else { return };
            let Some(r) = pd.requests.get(&chunk.id).copied() else { continue };
            let request = &self.requests[r];
            let n_written = request.outcome.tokens.len() as u32;
            let token = Stream::of(&request.offered).token(request.answer_place + n_written);
            let fits_more = pd.scheduler.push(chunk.id, token, instant);
            let is_last = n_written + 1 >= self.requests[r].offered.output_tokens;
            let at = self.message(w, r, is_last || !fits_more);
            self.write(w, r, chunk.id, at);
            if is_last {
                self.finish(w, chunk.id, AnswerEnd::Whole);
            } else if !fits_more {
                self.finish(w, chunk.id, AnswerEnd::Short);
            }
        }
        self.after_step(w, now - began);
    }

    /// Time of the message that a token is in: now, or the next tick of the worker's streams. Messages that leave at the same
    /// time wake whoever reads them once.
    fn message(&mut self, w: usize, r: usize, is_last: bool) -> Nanos {
        let now = self.queue.now();
        let front = self.workers[w].costs.curves().front;
        let Some(pd) = &mut self.workers[w].pd else { return now };
        let interval = nanos(pd.spec.engine.stream_interval);
        let before = self.requests[r].message_at;
        let (at, is_new) = match before {
            Some(held) if held > now => (if is_last { now } else { held }, false),
            Some(sent) if !is_last && now - sent < interval => ((now / interval + 1) * interval, true),
            _ => (now, true),
        };
        self.requests[r].message_at = Some(at);
        if is_new {
            let last = if at > now { &mut pd.tick_at } else { &mut pd.sent_at };
            let writes = last.replace(at) != Some(at);
            self.front_works(front.message_us + if writes { front.write_us } else { 0.0 }, Some(w));
        }
        at
    }

    /// A token goes to the client, in a message at this time, and with it those that were held for longer.
    fn write(&mut self, w: usize, r: usize, id: SequenceId, at: Nanos) {
        let curves = self.workers[w].costs.curves();
        let token_us = curves.proxy.token_us;
        let (now, base) = (self.queue.now(), self.base);
        let way = self.hop().saturating_mul(2).saturating_add(from_us(token_us));
        let request = &mut self.requests[r];
        if request.outcome.tokens.is_empty()
            && let Some(sequence) = self.workers[w].pd.as_ref().and_then(|pd| pd.scheduler.get(id))
        {
            let milestones = sequence.milestones;
            let first_step = milestones.first_step.unwrap_or(milestones.arrived);
            request.stages.prefill_queue = first_step.saturating_duration_since(milestones.arrived);
            let since = ns(now).saturating_sub(first_step.saturating_duration_since(base));
            request.stages.prefill = since;
        }
        if request.outcome.tokens.is_empty() {
            self.queue.after(nanos(self.spec.hop), Event::Wrote(r));
        }
        let at = ns(at.saturating_add(way));
        for held in request.outcome.tokens.iter_mut().rev().take_while(|held| **held > at) {
            *held = at;
        }
        request.outcome.tokens.push(at);
    }

    fn finish(&mut self, w: usize, id: SequenceId, end: AnswerEnd) {
        if let Some(pd) = &mut self.workers[w].pd {
            pd.scheduler.retire(id);
        }
        self.ended_at_pd(w, id, end);
    }

    /// A sequence that the scheduler has let go of.
    fn fail(&mut self, w: usize, id: SequenceId, class: FailureClass) {
        let end = match class {
            FailureClass::Overloaded => AnswerEnd::Full,
            FailureClass::DeadlineExceeded => AnswerEnd::Late,
            _ => AnswerEnd::Failed,
        };
        self.ended_at_pd(w, id, end);
    }

    pub(super) fn ended_at_pd(&mut self, w: usize, id: SequenceId, end: AnswerEnd) {
        let Some(r) = self.leave_pd(w, id) else { return };
        let request = &mut self.requests[r];
        if let [first, .., last] = request.outcome.tokens[..] {
            request.stages.decode = last - first;
        }
        if request.is_at(w, id) {
            self.queue.after(nanos(self.spec.hop), Event::Answered { request: r, sequence: id, end });
        }
    }

    /// The end of a step, or of a try in which nothing could run.
    fn after_step(&mut self, w: usize, took: Nanos) {
        let now = self.now();
        let worker = &mut self.workers[w];
        let Some(pd) = &mut worker.pd else { return };
        pd.stats = Stats::of(&pd.scheduler);
        let goes_on = !pd.inbox.is_empty() || (!pd.stalled && pd.scheduler.next_deadline().is_some());
        pd.is_busy = goes_on;
        if let Some(taking) = &mut worker.turns {
            let slack = (pd.stats.decoding > 0).then(|| pd.scheduler.decode_slack(now));
            taking.turns.end_step(taking.engine, slack, Duration::from_nanos(took));
            if !goes_on {
                taking.turns.rest(taking.engine);
            }
        }
        // A try in which nothing could run has no outputs to give on.
        let has_pause = took > 0 && !worker.is_pipelined;
        let pause = if has_pause { from_us(worker.costs.curves().between_steps_us) } else { 0 };
        match goes_on {
            true => self.queue.after(pause, Event::Turn(w)),
            false => self.wake_at_deadline(w),
        }
        self.take_turns(w);
        self.report_soon(w);
    }

    fn wake_at_deadline(&mut self, w: usize) {
        let base = self.base;
        let Some(pd) = &mut self.workers[w].pd else { return };
        let at = pd.scheduler.next_deadline().map(|at| nanos(at.saturating_duration_since(base)));
        if let Some(at) = at.filter(|at| pd.wake != Some(*at)) {
            pd.wake = Some(at);
            self.queue.at(at, Event::Wake { worker: w, at });
        }
    }

    /// A deadline has passed while nothing could run.
    pub(super) fn wake(&mut self, w: usize, at: Nanos) {
        let Some(pd) = &mut self.workers[w].pd else { return };
        if pd.wake == Some(at) {
            pd.wake = None;
        }
        if !pd.is_busy && pd.scheduler.next_deadline().is_some() {
            pd.is_busy = true;
            self.queue.after(0, Event::Turn(w));
        }
    }
}

/// Shape of a plan, as far as its time depends on it.
fn shape_of(pd: &PdSide, plan: &StepPlan) -> StepShape {
    let rows = plan.projections.iter().map(|projection| projection.slots.len() as u32).sum();
    let mut shape = StepShape { projected_rows: rows, ..StepShape::default() };
    for chunk in &plan.chunks {
        let cross =
            pd.scheduler.get(chunk.id).map_or(0, |s| s.cross_keys().map(|key| u64::from(key.n_rows)).sum());
        add(&mut shape, chunk, cross);
    }
    shape
}

/// A chunk of `n` tokens after `c` others attends to `n * c + n * (n + 1) / 2` keys, and each of its tokens to all rows
/// of the encoder input.
fn add(shape: &mut StepShape, chunk: &Chunk, cross: u64) {
    let (n, c) = (chunk.tokens.len() as u64, chunk.tokens.start as u64);
    let keys = n * c + n * (n + 1) / 2 + n * cross;
    if n == 1 && chunk.samples {
        shape.decodes += 1;
        shape.decode_context += keys;
    } else {
        shape.prefill_tokens += n as u32;
        shape.prefill_context += keys;
    }
}
