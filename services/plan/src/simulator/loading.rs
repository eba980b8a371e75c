//! Encoder outputs on their way to a PD worker: waited for, queued, under way, here.

use super::output::Output;
use super::prompts::sealed;
use super::request::{Request, ns};
use super::store::Transfer;
use super::worker::{Command, LoadStage, PdSide};
use super::world::{AnswerEnd, Event, World};
use triptych_core::{ContentKey, ItemIdx};

impl World<'_> {
    pub(super) fn want(&mut self, w: usize, key: ContentKey) {
        let Some(pd) = &mut self.workers[w].pd else { return };
        if pd.loading.contains_key(&key) {
            return;
        }
        if self.store.has(&key) {
            pd.loading.insert(key, LoadStage::Queued);
            pd.load_queue.push_back(key);
            return self.load_next(w);
        }
        pd.loading.insert(key, LoadStage::Waiting);
        self.store.wait(key, w);
        // It was there when the proxy looked, and nobody is making it.
        if !self.is_encoding(&key) {
            self.queue.after(0, Event::Missing { worker: w, key });
        }
    }

    /// An output that was waited for is nowhere: the requests that need it fail, and the proxy has it encoded again.
    pub(super) fn missing(&mut self, w: usize, key: ContentKey) {
        let Some(pd) = &mut self.workers[w].pd else { return };
        if pd.loading.get(&key) != Some(&LoadStage::Waiting) {
            return;
        }
        if self.store.has(&key) || pd.rows.contains(&key) {
            return self.loadable(w, key);
        }
        if self.is_encoding(&key) {
            return self.store.wait(key, w);
        }
        let Some(pd) = &mut self.workers[w].pd else { return };
        pd.loading.remove(&key);
        let requests = pd.requests.iter().map(|(sequence, r)| (*sequence, *r));
        let needs = |r: usize| self.requests[r].items.iter().position(|item| item.output.key == key);
        let mut lost: Vec<_> = requests.filter_map(|(sequence, r)| Some((sequence, needs(r)?))).collect();
        // The map has no order, and a run must be the same again.
        lost.sort_unstable();
        for (sequence, i) in lost {
            self.command(w, Command::Abort(sequence));
            self.ended_at_pd(w, sequence, AnswerEnd::Missing(ItemIdx(i as u32)));
        }
    }

    /// An output that was waited for can be loaded.
    pub(super) fn loadable(&mut self, w: usize, key: ContentKey) {
        let Some(pd) = &mut self.workers[w].pd else { return };
        if pd.loading.get(&key) == Some(&LoadStage::Waiting) {
            pd.loading.remove(&key);
            if pd.rows.contains(&key) { self.deliver(w, key) } else { self.want(w, key) }
        }
    }

    fn load_next(&mut self, w: usize) {
        loop {
            let costs = &self.workers[w].costs.clone();
            let Some(pd) = &mut self.workers[w].pd else { return };
            if pd.n_loading >= pd.spec.max_loads.max(1) {
                return;
            }
            let Some(key) = pd.load_queue.pop_front() else { return };
            let Some(output) = output_of(&self.requests, pd, key) else {
                // No request wants it any more.
                pd.loading.remove(&key);
                continue;
            };
            pd.n_loading += 1;
            pd.loading.insert(key, LoadStage::Coming);
            self.items.loads += 1;
            self.transfer(Transfer::Load { worker: w, key }, costs.load(output.bytes(costs)));
        }
    }

    /// An output is here.
    pub(super) fn loaded(&mut self, w: usize, key: ContentKey) {
        let Some(pd) = &mut self.workers[w].pd else { return };
        pd.n_loading -= 1;
        pd.loading.remove(&key);
        if let Some(output) = output_of(&self.requests, pd, key) {
            pd.rows.insert(sealed(output.kept()));
            self.workers[w].reports.rows_changed = true;
            self.deliver(w, key);
        }
        self.load_next(w);
    }

    /// Rows are on the worker: its engine hears of it.
    pub(super) fn deliver(&mut self, w: usize, key: ContentKey) {
        let now = self.queue.now();
        let Some(pd) = &self.workers[w].pd else { return };
        for r in pd.requests.values() {
            let request = &mut self.requests[*r];
            if request.items.iter().any(|place| place.output.key == key) {
                request.stages.load = request.stages.load.max(ns(now.saturating_sub(request.ready_at)));
            }
        }
        self.command(w, Command::Item(key));
    }
}

/// The output of a key that a request at the worker has.
fn output_of(requests: &[Request], pd: &PdSide, key: ContentKey) -> Option<Output> {
    let mut items = pd.requests.values().flat_map(|r| &requests[*r].items);
    items.find(|item| item.output.key == key).map(|item| item.output)
}
