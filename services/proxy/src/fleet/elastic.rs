//! Elastic roles: the worker that encodes an item, and the one that answers a request, where PD workers hold encoders too.
//!
//! Work moves, processes do not. [`WorkSplit`] measures the part of all work that is encodes: their predicted times, beside the
//! time of engine steps without what every step takes. As long as that is less than a worker's worth, all workers do both. From
//! then on as many whole workers are left to encodes: decodes of the others run in larger batches, and nothing stands beside
//! them (DistServe, <https://arxiv.org/abs/2401.09670>, says why that pays; here the split follows the load, as Splitwise's
//! mixed pool does, <https://arxiv.org/abs/2311.18677>). What is less than a whole worker is shared. A part is the same at any
//! rate, and arrivals by chance are in both of its terms.
//!
//! An item has a home: the worker at which its request is placed, or the best of those that are left to encodes. Another
//! worker takes it (it spills) when it would be done there sooner, the delay of what runs there counted, by more than a part of
//! the item's own cost: encoder workers are a floor and not a wall. Both margins are amounts of work and no pauses. Functions
//! of what is known of each worker, without clock, locks or network.

use super::roles::ElasticRole;
use super::score::{Choice, EncoderLoad, PlacementLoad, Reason, choose_encoder, choose_placement};
use rand::Rng;
use std::time::{Duration, Instant};
use triptych_core::ContentKey;

/// The part of an item's cost by which another worker must be better than its home.
const MARGIN_PARTS: u64 = 4;

/// Part of all work by which a worker's worth of encodes has to be exceeded before a worker is left to them: a whole one that
/// answers alone has to be able to.
const ENCODES_OF_A_WORKER: f64 = 1.09;
/// The same work less that at which it does both again, so that chance changes nothing.
const HYSTERESIS: f64 = 0.04;
/// Time in which work that ended is forgotten, but for a third: some hundred requests.
const MEMORY: Duration = Duration::from_secs(20);
/// The same for the latest work, by which a change of mixes is noticed.
const LATEST: Duration = Duration::from_secs(5);
/// Difference of the parts of encodes in the latest and in all remembered work by which the mix has changed, and what was before
/// is forgotten: three standard deviations of the former with some requests a second.
const CHANGE: f64 = 0.12;
/// Part of the weight that has to be there before anything is decided.
const LEAST_WEIGHT: f64 = 0.4;
/// Utilisation of the workers below which all do both: there is room, and an idle worker's cores help with encodes.
const LEAST_UTILISATION: f64 = 0.4;

/// Work of the workers whose roles are elastic: encodes that were asked for, and steps of their engines.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WorkSplit {
    all: RecentWork,
    latest: RecentWork,
    at: Option<Instant>,
    n_encoders: usize,
}

/// Work that is forgotten in some time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct RecentWork {
    /// Seconds of encodes.
    encodes_s: f64,
    /// Seconds of steps, without the fixed time of each.
    answers_s: f64,
    /// Seconds that were seen: a mean over these alone is right from the start (Adam's correction,
    /// <https://arxiv.org/abs/1412.6980>).
    seen_s: f64,
}

impl RecentWork {
    fn forget(&mut self, since: Duration, memory: Duration) {
        let left = (-since.as_secs_f64() / memory.as_secs_f64()).exp();
        self.encodes_s *= left;
        self.answers_s *= left;
        self.seen_s = memory.as_secs_f64() * (1.0 - left) + self.seen_s * left;
    }

    /// Part of it that is encodes. Workers that report no steps, of an earlier version, say nothing of it.
    fn encode_share(&self) -> f64 {
        if self.answers_s > 0.0 { self.encodes_s / (self.encodes_s + self.answers_s) } else { 0.0 }
    }
}

impl WorkSplit {
    /// Encodes of this predicted time are asked for.
    pub fn add_encodes(&mut self, now: Instant, us: u64) {
        self.forget(now);
        self.all.encodes_s += us as f64 / 1e6;
        self.latest.encodes_s += us as f64 / 1e6;
    }

    /// Steps of engines took so much more than the fixed time of a step.
    pub fn add_answers(&mut self, now: Instant, us: u64) {
        self.forget(now);
        self.all.answers_s += us as f64 / 1e6;
        self.latest.answers_s += us as f64 / 1e6;
    }

    fn forget(&mut self, now: Instant) {
        let since = self.at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        self.at = Some(self.at.map_or(now, |at| at.max(now)));
        self.all.forget(since, MEMORY);
        self.latest.forget(since, LATEST);
    }

    /// Workers to leave to encodes, of so many. With hysteresis: what was returned before counts.
    pub fn n_encoders(&mut self, n_workers: usize) -> usize {
        let is_seen =
            |work: &RecentWork, memory: Duration| work.seen_s >= LEAST_WEIGHT * memory.as_secs_f64();
        let change = (self.latest.encode_share() - self.all.encode_share()).abs();
        if change > CHANGE && is_seen(&self.latest, LATEST) && self.all.seen_s > self.latest.seen_s {
            self.all = self.latest;
        }
        if !is_seen(&self.all, MEMORY) {
            return self.n_encoders;
        }
        let share = self.encode_share() * n_workers as f64;
        // A cast from a float saturates.
        let bound = |share: f64| (share / ENCODES_OF_A_WORKER) as usize;
        let (least, most) = match self.busy_workers() < LEAST_UTILISATION * n_workers as f64 {
            true => (0, 0),
            false => (bound(share), bound(share + HYSTERESIS)),
        };
        self.n_encoders = self.n_encoders.clamp(least, most);
        self.n_encoders
    }

    /// Part of all work that is encodes, 0 to 1; 0 where no engine took a step.
    pub fn encode_share(&self) -> f64 {
        self.all.encode_share()
    }

    /// Workers that all of it keeps busy.
    pub fn busy_workers(&self) -> f64 {
        let RecentWork { encodes_s, answers_s, seen_s } = self.all;
        if seen_s > 0.0 { (encodes_s + answers_s) / seen_s } else { 0.0 }
    }
}

/// Roles of workers with encoders: those that an operator gave, and the others so that this many are left to encodes. The
/// last in order are, always the same ones; one is left to requests whatever is asked for.
pub fn divide(assigned: &[ElasticRole], n_encoders: usize) -> Vec<ElasticRole> {
    let n_assigned = assigned.iter().filter(|role| **role == ElasticRole::Encoder).count();
    let n_others = assigned.len() - n_assigned;
    let more = n_encoders.saturating_sub(n_assigned).min(n_others.saturating_sub(1));
    let mut roles = assigned.to_vec();
    let free = roles.iter_mut().rev().filter(|role| **role == ElasticRole::Both);
    free.take(more).for_each(|role| *role = ElasticRole::Encoder);
    if roles.contains(&ElasticRole::Encoder) {
        let rest = roles.iter_mut().filter(|role| **role == ElasticRole::Both);
        rest.for_each(|role| *role = ElasticRole::Pd);
    }
    roles
}

/// Chooses among encoder workers and PD workers with encoders. `home`: the index of the placement, if the request has one.
pub fn choose_elastic(
    loads: &[EncoderLoad<'_>],
    home: Option<usize>,
    key: Option<&ContentKey>,
    rng: &mut impl Rng,
) -> Option<Choice> {
    let is_divided = loads.iter().any(|load| role(load) == Some(ElasticRole::Encoder));
    let home = match home {
        Some(index) if index < loads.len() && !is_divided => Choice { index, reason: Reason::Favourite },
        _ => best_home(loads, key, rng)?,
    };
    Some(spilled(loads, home))
}

fn role(load: &EncoderLoad<'_>) -> Option<ElasticRole> {
    load.engine.map(|engine| engine.role)
}

/// The best of the encoder workers and of those that are left to encodes, or of all where there are none.
fn best_home(loads: &[EncoderLoad<'_>], key: Option<&ContentKey>, rng: &mut impl Rng) -> Option<Choice> {
    let is_encoder = |load: &EncoderLoad<'_>| role(load).is_none_or(|role| role == ElasticRole::Encoder);
    let encoders: Vec<_> = (0..loads.len()).filter(|i| is_encoder(&loads[*i])).collect();
    if encoders.is_empty() {
        return choose_encoder(loads, key, rng);
    }
    let among: Vec<_> = encoders.iter().map(|i| loads[*i]).collect();
    let choice = choose_encoder(&among, key, rng)?;
    Some(Choice { index: *encoders.get(choice.index)?, ..choice })
}

/// The home, or a worker that is better by more than the margin.
fn spilled(loads: &[EncoderLoad<'_>], home: Choice) -> Choice {
    let Some(at_home) = loads.get(home.index) else { return home };
    let bound = if at_home.is_full { u64::MAX } else { at_home.total_us() };
    let others = loads.iter().enumerate().filter(|(i, load)| *i != home.index && !load.is_full);
    let best = others.min_by_key(|(_, load)| load.total_us());
    match best {
        Some((index, load)) if load.total_us().saturating_add(at_home.cost_us / MARGIN_PARTS) < bound => {
            Choice { index, reason: Reason::Spill }
        }
        _ => home,
    }
}

/// A worker with encoders at which a request could be answered.
#[derive(Clone, Copy, Debug)]
pub struct PlacementSite<'a> {
    /// Time to read the prompt there once its items are encoded, in microseconds: the score of a PD worker.
    pub answer_us: u64,
    /// Its encoder with all items that it misses.
    pub encode: EncoderLoad<'a>,
    /// Items of the request that it holds.
    pub n_held: usize,
}

/// Chooses the placement of a request whose items any of the workers may encode, among those that are not left to encodes;
/// its index.
pub fn place_elastic(sites: &[PlacementSite<'_>], rng: &mut impl Rng) -> Option<usize> {
    let load = |(i, site): (usize, &PlacementSite<'_>)| {
        let others = sites.iter().enumerate().filter(|(other, _)| *other != i);
        let elsewhere = others
            .map(|(_, other)| other.encode.total_us().saturating_add(site.encode.cost_us / MARGIN_PARTS))
            .min();
        let encoded_us = site.encode.total_us().min(elsewhere.unwrap_or(u64::MAX));
        // Encodes that are there already share the cores with the prompt, wherever the request's own are.
        let before = match role(&site.encode) {
            Some(ElasticRole::Pd) => site.encode.queued_us,
            _ => encoded_us.max(site.encode.queued_us),
        };
        PlacementLoad { score_us: site.answer_us.saturating_add(before), n_held: site.n_held }
    };
    let is_encoder = |i: &usize| role(&sites[*i].encode) == Some(ElasticRole::Encoder);
    let (encoders, others): (Vec<_>, Vec<_>) = (0..sites.len()).partition(is_encoder);
    let open = if others.is_empty() { encoders } else { others };
    let loads: Vec<_> = open.iter().map(|i| load((*i, &sites[*i]))).collect();
    open.get(choose_placement(&loads, rng)?).copied()
}

#[cfg(test)]
mod tests;
