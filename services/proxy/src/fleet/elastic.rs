//! Elastic roles: the worker that encodes an item, where PD workers hold encoders too.
//!
//! Work moves, processes do not. An item has a home: the worker at which its request is placed, or the best of the encoder
//! workers. Another worker takes it (it spills) when it would be done there sooner, the delay of what runs there counted, by
//! more than a part of the item's own cost. So encoder workers are a floor and not a wall, and so is a placement: a worker that writes
//! no answers takes encodes of those that do. The margin is an amount of work and no pause: nothing is remembered, and no
//! mode can flap. Functions of what is known of each worker, without clock, locks or network.

use super::score::{Choice, EncoderLoad, PlacementLoad, Reason, choose_encoder, choose_placement};
use rand::Rng;
use triptych_core::ContentKey;

/// The part of an item's cost by which another worker must be better than its home.
const MARGIN_PARTS: u64 = 4;

/// Chooses among encoder workers and PD workers with encoders. `home`: the index of the placement, if the request has one.
pub fn choose_elastic(
    loads: &[EncoderLoad<'_>],
    home: Option<usize>,
    key: Option<&ContentKey>,
    rng: &mut impl Rng,
) -> Option<Choice> {
    let home = match home {
        Some(index) if index < loads.len() => Choice { index, reason: Reason::Favourite },
        _ => best_home(loads, key, rng)?,
    };
    Some(spilled(loads, home))
}

/// The best of the encoder workers, or of all where there are none.
fn best_home(loads: &[EncoderLoad<'_>], key: Option<&ContentKey>, rng: &mut impl Rng) -> Option<Choice> {
    let encoders: Vec<_> = (0..loads.len()).filter(|i| loads[*i].engine.is_none()).collect();
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

/// Chooses the placement of a request whose items any of the workers may encode; its index.
pub fn place_elastic(sites: &[PlacementSite<'_>], rng: &mut impl Rng) -> Option<usize> {
    let load = |(i, site): (usize, &PlacementSite<'_>)| {
        let others = sites.iter().enumerate().filter(|(other, _)| *other != i);
        let elsewhere = others
            .map(|(_, other)| other.encode.total_us().saturating_add(site.encode.cost_us / MARGIN_PARTS))
            .min();
        let encoded_us = site.encode.total_us().min(elsewhere.unwrap_or(u64::MAX));
        // Encodes that are there already share the cores with the prompt, wherever the request's own are.
        let before = encoded_us.max(site.encode.queued_us);
        PlacementLoad { score_us: site.answer_us.saturating_add(before), n_held: site.n_held }
    };
    let loads: Vec<_> = sites.iter().enumerate().map(load).collect();
    choose_placement(&loads, rng)
}

#[cfg(test)]
mod tests;
