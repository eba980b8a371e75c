//! An encoder: admission, preprocessing, batches, publishing. What a batch takes, what is reported and what is learned
//! of costs are the encoder's own code.

use super::event_queue::Nanos;
use super::output::sealed;
use super::request::{Job, JobEnd, JobTimes};
use super::store::Transfer;
use super::worker::{Batch, EncoderSide, JobId, LoadStage, Task, TowerQueue, TurnTaking};
use super::world::{Event, World};
use crate::curves::{BatchShape, Stage};
use std::collections::VecDeque;
use std::time::Duration;
use triptych_core::{RequestId, TowerIdx};
use triptych_encoder::load::EncodeTimes;
use triptych_encoder::n_in_batch;
use triptych_encoder::order::{JobOwner, take_next};

impl World<'_> {
    /// A job is at its encoder.
    pub(super) fn job_arrives(&mut self, id: JobId) {
        let now = self.queue.now();
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let (w, output, asker) = (job.worker, job.output, job.asker);
        let key = output.key;
        job.since = now;
        if job.cancelled {
            return self.drop_job(id);
        }
        if self.workers[w].rows().is_some_and(|rows| rows.get(&key).is_some()) {
            return self.give_kept(id);
        }
        let model = self.proxy.model.as_str().to_owned();
        let Some(encoder) = &mut self.workers[w].encoder else { return };
        if encoder.n_jobs >= encoder.spec.max_jobs {
            return self.tell(id, JobEnd::Full);
        }
        encoder.n_jobs += 1;
        let bytes = usize::try_from(output.sized.bytes).unwrap_or(usize::MAX);
        let owner = JobOwner {
            request: asker.map(|r| RequestId::from_bits(r as u128)),
            priority: 0,
            arrived: Duration::from_nanos(now),
        };
        let ticket = encoder.load.admit(&model, output.encoder(), bytes, owner);
        encoder.raw.push_back(id);
        if let Some(job) = self.jobs.get_mut(&id) {
            job.ticket = Some(ticket);
        }
        self.encode_items += 1;
        self.preprocess(w);
        self.report_soon(w);
    }

    /// The rows of an earlier job are here: the store may have lost them.
    fn give_kept(&mut self, id: JobId) {
        let hop = self.hop();
        self.queue.after(hop, Event::Announced(id));
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.kept = true;
        let (output, w) = (job.output, job.worker);
        if self.store.has(&output.key) {
            return self.tell(id, JobEnd::Ready);
        }
        let costs = &self.workers[w].costs;
        let spread = costs.publish(output.bytes(costs));
        self.transfer(Transfer::Publish(id), spread);
    }

    /// Preprocesses the next items in order, while there are threads.
    fn preprocess(&mut self, w: usize) {
        loop {
            let Some(encoder) = &mut self.workers[w].encoder else { return };
            if encoder.n_preprocessing >= encoder.preprocess_threads {
                return;
            }
            let ticket = |id: &JobId| self.jobs.get(id).and_then(|job| job.ticket.as_ref());
            let order = encoder.spec.batch.order;
            let ranks = encoder.raw.iter().find_map(ticket).map(|job| job.ranks(order));
            let rank = |id: &JobId| ranks.as_ref()?.of(ticket(id)?);
            let Some(id) = take_next(&mut encoder.raw, rank) else { return };
            let now = self.queue.now();
            let Some(job) = self.jobs.get_mut(&id) else { continue };
            job.times.queue += now - job.since;
            job.since = now;
            let output = job.output;
            encoder.n_preprocessing += 1;
            let costs = &self.workers[w].costs;
            let (spread, on_device) =
                (costs.encoder(output.tower).preprocess(output.sized), costs.curves().on_device);
            let work = self.draw(spread);
            if on_device {
                self.queue.after(work, Event::Preprocessed { worker: w, job: id });
            } else {
                self.compute(w, Task::Preprocess(id, output.tower), (work, 1.0));
            }
        }
    }

    /// An item is ready for its forward, and it is known how many rows come of it.
    pub(super) fn preprocessed(&mut self, w: usize, id: JobId) {
        let (now, hop) = (self.queue.now(), self.hop());
        if let Some(encoder) = &mut self.workers[w].encoder {
            encoder.n_preprocessing -= 1;
        }
        let tower = self.jobs.get(&id).map(|job| job.output.tower);
        if let Some((since, output)) = self.jobs.get(&id).map(|job| (job.since, job.output)) {
            self.span(w, Stage::Preprocess(output.tower), (since, 1, output.sized.tokens.into()));
        }
        if let Some(job) = self.jobs.get_mut(&id) {
            job.times.preprocess = now - job.since;
            job.since = now;
            if job.cancelled {
                self.leave(id);
                self.drop_job(id);
            } else {
                if let Some(ticket) = &job.ticket {
                    ticket.sized(job.output.sized.tokens);
                }
                if let Some(encoder) = &mut self.workers[w].encoder {
                    encoder.tower(job.output.tower).ready.push_back(id);
                }
                self.queue.after(hop, Event::Announced(id));
            }
        }
        self.preprocess(w);
        if let Some(tower) = tower {
            self.batch(w, tower);
        }
        self.report_soon(w);
    }

    /// Begins a forward of a tower if none of it is under way: each has a thread of its own.
    fn batch(&mut self, w: usize, tower: TowerIdx) {
        let Some(encoder) = &mut self.workers[w].encoder else { return };
        let limits = encoder.spec.batch;
        let TowerQueue { ready, running } = encoder.tower(tower);
        if running.is_some() {
            return;
        }
        let ticket = |id: &JobId| self.jobs.get(id).and_then(|job| job.ticket.as_ref());
        if ready.len() > 1
            && let Some(ranks) = ready.iter().find_map(ticket).map(|job| job.ranks(limits.order))
        {
            let rank = |id: &JobId| ticket(id).and_then(|job| ranks.of(job));
            ready.make_contiguous().sort_by_cached_key(rank);
        }
        let sizes: Vec<u32> =
            ready.iter().map(|id| self.jobs.get(id).map_or(0, |job| job.output.sized.tokens)).collect();
        let n = n_in_batch(sizes.iter().map(|n| *n as usize), limits);
        if n == 0 {
            return;
        }
        let jobs: Vec<JobId> = ready.drain(..n).collect();
        let shape = BatchShape::of(sizes[..n].iter().copied());
        let costs = self.costs_now(w);
        let work = self.draw(costs.encoder(tower).encode(shape));
        self.begin_forward((w, tower), jobs, (shape, work));
        self.report_soon(w);
    }

    fn begin_forward(
        &mut self,
        (w, tower): (usize, TowerIdx),
        jobs: Vec<JobId>,
        (shape, work): (BatchShape, Nanos),
    ) {
        let now = self.queue.now();
        for id in &jobs {
            if let Some(job) = self.jobs.get_mut(id) {
                job.times.queue += now - job.since;
                job.since = now;
                job.share =
                    (work as f64 * f64::from(job.output.sized.tokens) / shape.tokens.max(1) as f64) as Nanos;
                if let Some(ticket) = &job.ticket {
                    ticket.started();
                }
            }
        }
        let worker = &mut self.workers[w];
        let threads = worker.threads();
        worker.used.n_batches += 1;
        worker.used.n_encoded += jobs.len() as u64;
        let mut batch = Batch { jobs, began: now, parts: VecDeque::new(), part: None, compute_id: 0 };
        match &mut worker.turns {
            None => {
                if let Some(encoder) = &mut worker.encoder {
                    encoder.tower(tower).running = Some(batch);
                }
                self.compute(w, Task::Forward(tower), (work, threads));
            }
            Some(TurnTaking { turns, .. }) => {
                batch.parts = parts(shape.tokens, work, worker.costs.encoder(tower).encode_parts);
                batch.compute_id = turns.new_id();
                let first = batch.parts.front().map_or(0, |part| part.0);
                turns.ask_part(batch.compute_id, first);
                if let Some(encoder) = &mut worker.encoder {
                    encoder.tower(tower).running = Some(batch);
                }
                self.take_turns(w);
            }
        }
    }

    /// Gives the cores to the next in turn, where encoder and engine take turns.
    pub(super) fn take_turns(&mut self, w: usize) {
        let now = self.queue.now();
        let worker = &mut self.workers[w];
        let threads = worker.threads();
        let Some(taking) = &mut worker.turns else { return };
        let turn = worker.encoder.as_mut().and_then(|encoder| next_part(encoder, taking, now));
        if let Some((tower, work)) = turn {
            return self.compute(w, Task::Forward(tower), (work, threads));
        }
        if taking.step_asked && taking.turns.take_step(taking.engine) {
            taking.step_asked = false;
            self.step(w);
        }
    }

    /// A forward, or a part of one, is done.
    pub(super) fn forwarded(&mut self, w: usize, tower: TowerIdx) {
        let now = self.queue.now();
        let worker = &mut self.workers[w];
        let Some(encoder) = &mut worker.encoder else { return };
        let queue = encoder.tower(tower);
        if let (Some(taking), Some(batch)) = (&mut worker.turns, &mut queue.running)
            && let Some((tokens, since)) = batch.part.take()
        {
            taking.turns.end_part(batch.compute_id, tokens, Duration::from_nanos(now - since));
            match batch.parts.front() {
                Some((tokens, _)) => {
                    taking.turns.ask_part(batch.compute_id, *tokens);
                    return self.take_turns(w);
                }
                None => taking.turns.end_forward(batch.compute_id),
            }
        }
        let Some(batch) = queue.running.take() else { return };
        let jobs = batch.jobs.iter().filter_map(|id| self.jobs.get(id));
        let n_tokens = jobs.map(|job| u64::from(job.output.sized.tokens)).sum();
        self.span(w, Stage::Encode(tower), (batch.began, batch.jobs.len(), n_tokens));
        for id in batch.jobs {
            if let Some(job) = self.jobs.get_mut(&id) {
                job.times.encode = now - batch.began;
                job.since = now;
            }
            self.publish(w, id);
        }
        self.batch(w, tower);
        self.take_turns(w);
        self.report_soon(w);
    }

    /// The rows of a job are there: a PD worker of the same process has them, and they are published.
    fn publish(&mut self, w: usize, id: JobId) {
        let Some(job) = self.jobs.get(&id) else { return };
        if job.cancelled {
            self.leave(id);
            return self.drop_job(id);
        }
        let output = job.output;
        let key = output.key;
        let advertise = self.workers[w].encoder.as_ref().is_some_and(|encoder| encoder.spec.advertise);
        self.keep(w, id);
        let bytes = output.bytes(&self.workers[w].costs);
        let spread = self.workers[w].costs.publish(bytes);
        if !advertise {
            return self.transfer(Transfer::Publish(id), spread);
        }
        self.store.hold_in_peer_cache(key);
        self.tell_loaders(id);
        self.done(id);
        self.tell(id, JobEnd::Ready);
        self.transfer(Transfer::Behind { key, bytes }, spread);
    }

    /// Rows stay where they were made.
    fn keep(&mut self, w: usize, id: JobId) {
        let Some(job) = self.jobs.get(&id) else { return };
        let (output, key) = (sealed(job.output.kept()), job.output.key);
        if let Some(rows) = self.workers[w].rows() {
            rows.insert(output);
        }
        self.workers[w].reports.rows_changed = true;
        if let Some(pd) = &mut self.workers[w].pd
            && pd.loading.get(&key) == Some(&LoadStage::Waiting)
        {
            pd.loading.remove(&key);
            self.deliver(w, key);
        }
    }

    /// Rows are in the store.
    pub(super) fn published(&mut self, id: JobId) {
        let now = self.queue.now();
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.times.publish = now - job.since;
        let (output, w, kept) = (job.output, job.worker, job.kept);
        self.store.put(output.key, output.bytes(&self.workers[w].costs));
        self.tell_loaders(id);
        if !kept {
            self.done(id);
        }
        self.tell(id, JobEnd::Ready);
    }

    /// PD workers that wait for an output hear of it.
    fn tell_loaders(&mut self, id: JobId) {
        let hop = self.hop();
        let Some(job) = self.jobs.get(&id) else { return };
        let key = job.output.key;
        for worker in self.store.take_waiting(&key) {
            self.queue.after(hop, Event::Loadable { worker, key });
        }
    }

    /// The encoder has done its part: it learns what it took.
    fn done(&mut self, id: JobId) {
        let Some(job) = self.jobs.get(&id) else { return };
        let Job { times: JobTimes { preprocess, encode, publish, .. }, share, output, worker, .. } = *job;
        let of = |nanos: Nanos| Duration::from_nanos(nanos);
        if let Some(ticket) = &job.ticket {
            let n_threads = self.workers[worker].encoder.as_ref().map_or(1, |e| e.preprocess_threads);
            let times = EncodeTimes {
                forward: of(share),
                encode: of(encode),
                preprocess: of(preprocess),
                publish: of(publish),
                n_threads: u32::try_from(n_threads).unwrap_or(u32::MAX),
            };
            ticket.done(output.sized.tokens, times);
        }
        self.leave(id);
        self.report_soon(worker);
    }

    /// A job gives its place at the encoder back.
    fn leave(&mut self, id: JobId) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if job.ticket.take().is_some() {
            self.encode_items -= 1;
            if let Some(encoder) = &mut self.workers[job.worker].encoder {
                encoder.n_jobs -= 1;
            }
        }
    }

    fn tell(&mut self, id: JobId, end: JobEnd) {
        let hop = self.hop();
        self.queue.after(hop, Event::JobEnded(id, end));
    }

    /// Nobody wants a job any more: it is dropped, unless its forward has begun.
    pub(super) fn cancel(&mut self, id: JobId) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.cancelled = true;
        let w = job.worker;
        let Some(encoder) = &mut self.workers[w].encoder else { return };
        let ready = &mut encoder.tower(job.output.tower).ready;
        let n_ready = ready.len();
        ready.retain(|job| *job != id);
        let was_ready = ready.len() < n_ready;
        let n_raw = encoder.raw.len();
        encoder.raw.retain(|job| *job != id);
        if was_ready || encoder.raw.len() < n_raw {
            self.leave(id);
            self.drop_job(id);
            self.report_soon(w);
        }
    }

    /// A job is out of everybody's books.
    pub(super) fn drop_job(&mut self, id: JobId) {
        self.jobs.remove(&id);
    }
}

/// The part of a forward that has its turn now, with its tower and its time.
fn next_part(encoder: &mut EncoderSide, taking: &mut TurnTaking, now: Nanos) -> Option<(TowerIdx, Nanos)> {
    let running = encoder.towers().filter_map(|(tower, queue)| Some((tower, queue.running.as_mut()?)));
    for (tower, batch) in running {
        if batch.part.is_none()
            && taking.turns.take_part(batch.compute_id)
            && let Some((tokens, work)) = batch.parts.pop_front()
        {
            batch.part = Some((tokens, now));
            return Some((tower, work));
        }
    }
    None
}

/// A forward in parts of about equal cost, each worth its share of the output tokens.
fn parts(tokens: u64, work: Nanos, n_parts: usize) -> VecDeque<(u64, Nanos)> {
    let n = n_parts.max(1) as u64;
    let upto = |of: u64, i: u64| (u128::from(of) * u128::from(i) / u128::from(n)) as u64;
    (0..n).map(|i| (upto(tokens, i + 1) - upto(tokens, i), upto(work, i + 1) - upto(work, i))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lose_nothing() {
        assert_eq!(parts(5, 100, 2), [(2, 50), (3, 50)]);
        assert_eq!(parts(0, 7, 0), [(0, 7)]);
        let (tokens, work) =
            parts(529, 1_000_003, 13).into_iter().fold((0, 0), |sum, part| (sum.0 + part.0, sum.1 + part.1));
        assert_eq!((tokens, work), (529, 1_000_003));
    }
}
