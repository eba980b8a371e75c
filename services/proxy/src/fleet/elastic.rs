//! Elastic roles: the worker that encodes an item, and the one that answers a request, where PD workers hold encoders too.
//!
//! Work moves, processes do not. [`WorkSplit`] measures what workers compute, and leaves whole workers to encodes where that makes
//! the busiest worker less busy: decodes of the others run in larger batches, and nothing stands beside them (DistServe,
//! <https://arxiv.org/abs/2401.09670>, says why that pays; here the split follows the load, as Splitwise's mixed pool does,
//! <https://arxiv.org/abs/2311.18677>).
//!
//! While all workers do both, a request's items are encoded where it is placed, whose choice has weighed that, and only a worker
//! that answers nothing takes some of them: moved ones disturb the decodes of another for what the placement has evened out.
//! Else an item has a home, the best of those that are left to encodes. Another worker takes it (it spills) when it would be done
//! there sooner, the delay of what runs there counted, by more than the item's own cost: encoder workers are a floor and not a
//! wall. While the home still answers requests from before the split, a request's placement takes what it is done with sooner.
//! Functions of what is known of each worker, without clock, locks or network.

mod work;

pub use work::{WorkDone, WorkSplit, WorkerCounts};

use super::roles::ElasticRole;
use super::score::{Choice, EncoderLoad, PlacementLoad, Reason, choose_encoder, choose_placement};
use rand::Rng;
use triptych_core::ContentKey;

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

/// Chooses among encoder workers and PD workers with encoders. `placement`: the index of the worker at which the request is
/// placed, if it is.
pub fn choose_elastic(
    loads: &[EncoderLoad<'_>],
    placement: Option<usize>,
    key: Option<&ContentKey>,
    rng: &mut impl Rng,
) -> Option<Choice> {
    let placement = placement.and_then(|index| Some((index, loads.get(index)?)));
    match placement {
        Some((index, load)) if !is_divided(loads.iter()) => {
            let home = Choice { index, reason: Reason::Favourite };
            Some(spilled(loads, home, |other| !is_able(load) || is_idle(other)))
        }
        _ => {
            let home = best_home(loads, key, rng)?;
            let relief =
                placement.filter(|(_, load)| loads.get(home.index).is_some_and(|at| relieves(load, at)));
            let relief = relief.map(|(index, _)| Choice { index, reason: Reason::Spill });
            Some(relief.unwrap_or_else(|| spilled(loads, home, |_| true)))
        }
    }
}

/// True if it can begin with a job now.
fn is_able(load: &EncoderLoad<'_>) -> bool {
    !load.is_full && load.cold_us == 0
}

/// True if the placement of a request is done sooner than a worker that is left to encodes and still answers requests of before:
/// steps take the time there that its encodes are to have.
fn relieves(placement: &EncoderLoad<'_>, encoder: &EncoderLoad<'_>) -> bool {
    is_able(placement) && !is_idle(encoder) && placement.completion_us() < encoder.completion_us()
}

/// True if no request is there that an encode would disturb.
fn is_idle(load: &EncoderLoad<'_>) -> bool {
    load.engine.is_none_or(|engine| engine.running == 0 && engine.waiting_us == 0)
}

/// True if some workers are left to encodes.
fn is_divided<'a>(mut loads: impl Iterator<Item = &'a EncoderLoad<'a>>) -> bool {
    loads.any(|load| role(load) == Some(ElasticRole::Encoder))
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

/// The home, or a worker that is better by more than the margin, of those that may take what spills.
fn spilled(loads: &[EncoderLoad<'_>], home: Choice, takes: impl Fn(&EncoderLoad<'_>) -> bool) -> Choice {
    let Some(at_home) = loads.get(home.index) else { return home };
    let bound = if at_home.is_full { u64::MAX } else { at_home.total_us() };
    let others =
        loads.iter().enumerate().filter(|(i, load)| *i != home.index && !load.is_full && takes(load));
    let best = others.min_by_key(|(_, load)| load.total_us());
    match best {
        Some((index, load)) if load.total_us().saturating_add(at_home.cost_us) < bound => {
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
    let is_divided = is_divided(sites.iter().map(|site| &site.encode));
    let load = |site: &PlacementSite<'_>| {
        // Encodes that are there share the cores with the prompt, wherever the request's own are.
        let encodes_us = if is_divided { site.encode.queued_us } else { site.encode.completion_us() };
        PlacementLoad { score_us: site.answer_us.saturating_add(encodes_us), n_held: site.n_held }
    };
    let is_encoder = |i: &usize| role(&sites[*i].encode) == Some(ElasticRole::Encoder);
    let (encoders, others): (Vec<_>, Vec<_>) = (0..sites.len()).partition(is_encoder);
    let open = if others.is_empty() { encoders } else { others };
    let loads: Vec<_> = open.iter().map(|i| load(&sites[*i])).collect();
    open.get(choose_placement(&loads, rng)?).copied()
}

#[cfg(test)]
mod tests;
