//! From the catalog and the workers' reports to the loads that [`super::score`] compares, and what is given to the one
//! that it chooses.

use super::catalog::{Catalog, Known, Want};
use super::elastic;
use super::lease::Given;
use super::prefix::Prefixes;
use super::roles::{ElasticRole, Roles};
use super::score::{self, Choice, PdLoad, Reason};
use super::size::{Forecast, PrefillTime, Size};
use super::state::FleetState;
use super::view::{ItemSize, Sent};
use super::worker::Worker;
use std::sync::Arc;
use std::time::Instant;
use tokio::time;
use triptych_core::WorkerId;
use triptych_runtime::discovery::Role;

/// A worker that can do the work, and what is known of it.
pub(super) type Able<'a> = (&'a Known, Arc<Worker>);

impl FleetState {
    /// The worker that gets the work, if one is able.
    pub(super) fn choose(
        &self,
        catalog: &Catalog,
        want: &Want,
        size: &Size,
        tried: &[WorkerId],
    ) -> Option<(Arc<Worker>, Given)> {
        let (mut able, tier) = self.able(catalog, want, tried)?;
        match size {
            Size::Request { holders, .. } => prefer(&mut able, holders),
            Size::Item { placement, .. } if !self.is_elastic(&able) => {
                prefer(&mut able, placement.as_slice())
            }
            Size::Item { .. } => {}
        }
        // A worker that comes back from being ejected is first: one piece of work is risked to have it back.
        let (index, reason) = match able.iter().position(|(_, worker)| worker.view().outlier.take_probe()) {
            Some(index) => (index, Reason::Probe),
            None => {
                let choice = self.best(&able, want, size)?;
                (choice.index, tier.unwrap_or(choice.reason))
            }
        };
        let (_, worker) = able.get(index)?;
        let (work, forecast) = given(worker, want, size, now());
        self.divide(catalog);
        if let Size::Request { prompt, .. } = size {
            self.prefixes.lock().read(prompt, &worker.id);
        }
        Some((Arc::clone(worker), Given { work, forecast, reason }))
    }

    /// A worker that has nothing to do, one that has not had the work if there is such; it takes nothing else from now on.
    pub(super) fn choose_idle(
        &self,
        catalog: &Catalog,
        want: &Want,
        size: &Size,
        tried: &[WorkerId],
    ) -> Option<(Arc<Worker>, Given)> {
        let isolate = |worker: &Arc<Worker>| {
            let mut view = worker.view();
            let is_idle = view.is_idle() && view.takes_more();
            view.is_isolated |= is_idle;
            is_idle
        };
        let able = |tried: &[WorkerId]| Some(self.able(catalog, want, tried)?.0);
        let (fresh, all) = (able(tried)?, able(&[])?);
        let (_, worker) = fresh.into_iter().chain(all).find(|(_, worker)| isolate(worker))?;
        let (work, forecast) = given(&worker, want, size, now());
        Some((worker, Given { work, forecast, reason: Reason::Alone }))
    }

    /// True if an item may be encoded elsewhere than where its request is placed.
    fn is_elastic(&self, able: &[Able<'_>]) -> bool {
        let is_divided = |(_, worker): &Able<'_>| worker.view().role != ElasticRole::Both;
        self.roles == Roles::Auto || able.iter().any(is_divided)
    }

    /// Those among whom to choose: fresh before tried, workers that are left to encodes last for requests and, where roles are
    /// fixed, encoder workers before PD workers that can encode too. With the reason, where belonging to the group is one.
    pub(super) fn able<'a>(
        &self,
        catalog: &'a Catalog,
        want: &Want,
        tried: &[WorkerId],
    ) -> Option<(Vec<Able<'a>>, Option<Reason>)> {
        let is_pd = |known: &Known| matches!(want, Want::Encoder { .. }) && known.role == Role::Pd;
        let is_last = |known: &Known, worker: &Worker| match want {
            Want::Encoder { .. } => self.roles == Roles::Fixed && is_pd(known),
            Want::Pd { .. } => worker.view().role == ElasticRole::Encoder,
        };
        let rank = |(known, worker): &Able<'_>| (tried.contains(&known.id), is_last(known, worker));
        let workers = self.workers();
        let able = catalog.workers.iter().filter(|known| known.can_do(want));
        let able = able.filter_map(|known| Some((known, Arc::clone(workers.get(&known.id)?))));
        let mut able: Vec<_> = able.filter(|(_, worker)| worker.view().takes_more()).collect();
        let best = able.iter().map(rank).min()?;
        able.retain(|one| rank(one) == best);
        let has_encoders = || catalog.workers.iter().any(|w| w.role == Role::Encoder && w.serves(want));
        let reason = match best {
            (true, _) => Some(Reason::Again),
            _ if able.iter().all(|(known, _)| is_pd(known)) && has_encoders() => Some(Reason::LastResort),
            _ => None,
        };
        Some((able, reason))
    }

    fn best<'a>(&self, able: &[Able<'a>], want: &Want, size: &Size) -> Option<Choice> {
        let mut rng = self.rng.lock();
        match (want, size) {
            (Want::Encoder { .. }, size) => {
                let (key, bytes, placement) = match size {
                    Size::Item { key, bytes, placement } => (key.as_ref(), *bytes, placement.as_ref()),
                    Size::Request { .. } => (None, 0, None),
                };
                let (now, item, prefill) = (now(), item_of(want, bytes)?, prefill_time(able, want));
                let load = |(known, worker): &Able<'a>| match known.role {
                    Role::Encoder => worker.view().encoder_load(&known.id, item, now),
                    Role::Pd => worker.view().colocated_load(&known.id, item, prefill, now),
                };
                let loads: Vec<_> = able.iter().map(load).collect();
                let home = able.iter().position(|(known, _)| Some(&known.id) == placement);
                match self.is_elastic(able) {
                    true => elastic::choose_elastic(&loads, home, key, &mut *rng),
                    false => score::choose_encoder(&loads, key, &mut *rng),
                }
            }
            (Want::Pd { .. }, size) => {
                let nothing = Prefixes::default();
                let (items, prompt) = match size {
                    Size::Request { items, prompt, .. } => (items.as_slice(), prompt),
                    Size::Item { .. } => (&[][..], &nothing),
                };
                let (now, prefill) = (now(), prefill_time(able, want));
                // Where roles are fixed each worker encodes for itself.
                let takes_encodes = |known: &Known| self.roles == Roles::Auto && known.encodes;
                let prefixes = self.prefixes.lock();
                let reader = prefixes.reader(prompt);
                let loads: Vec<_> = able
                    .iter()
                    .map(|(known, worker)| {
                        let read = reader.filter(|(id, _)| **id == known.id).map_or(0, |(_, n)| n);
                        let view = worker.view();
                        let encode_us = if takes_encodes(known) { view.queued_us(now) } else { 0 };
                        let own_tokens = prompt.n_tokens().saturating_sub(read);
                        PdLoad { encode_us, ..view.pd_load(items, own_tokens, prefill) }
                    })
                    .collect();
                score::choose_pd(&loads, &mut *rng)
            }
        }
    }

    /// Forecast of an item's encode; see [`super::Fleet::forecast`].
    pub(super) fn forecast(&self, catalog: &Catalog, want: &Want, bytes: u64) -> Option<Forecast> {
        let (now, item) = (now(), item_of(want, bytes)?);
        let (able, _) = self.able(catalog, want, &[])?;
        let one = |(_, worker): &Able<'_>| worker.view().forecast(item, now);
        let all: Option<Vec<_>> = able.iter().map(one).collect();
        all?.into_iter().min_by_key(Forecast::end)
    }
}

/// By the clock that a test may pause.
pub(super) fn now() -> Instant {
    time::Instant::now().into_std()
}

/// Leaves those among `holders` that are not full, if there are such: elsewhere an item would have to be encoded again.
fn prefer(able: &mut Vec<Able<'_>>, holders: &[WorkerId]) {
    let holds = |(known, worker): &Able<'_>| holders.contains(&known.id) && !worker.view().is_full();
    if able.iter().any(holds) {
        able.retain(holds);
    }
}

/// Time of a prompt token of the model that is wanted, by those of the workers that have measured it.
pub(super) fn prefill_time(able: &[Able<'_>], want: &Want) -> PrefillTime {
    let (Want::Encoder { model, .. } | Want::Pd { model, .. }) = want;
    PrefillTime::of_workers(able.iter().map(|(_, worker)| worker.view().prefill_us(model)))
}

/// The item of some work, if it is one.
pub(super) fn item_of<'a>(want: &'a Want, bytes: u64) -> Option<ItemSize<'a>> {
    match want {
        Want::Encoder { model, encoder, .. } => Some(ItemSize { model, encoder: *encoder, bytes }),
        Want::Pd { .. } => None,
    }
}

/// The work in the measures of a worker's load, and the forecast of an item's encode.
fn given(worker: &Worker, want: &Want, size: &Size, now: Instant) -> (Sent, Option<Forecast>) {
    match (want, size) {
        (Want::Encoder { .. }, Size::Item { bytes, .. }) => {
            let Some(item) = item_of(want, *bytes) else { return Default::default() };
            let view = worker.view();
            (Sent { n: 1, encode_us: view.cost_us(item), tokens: 0 }, view.forecast(item, now))
        }
        (_, Size::Request { prompt, .. }) => (Sent { n: 1, encode_us: 0, tokens: prompt.n_tokens() }, None),
        (Want::Pd { .. }, Size::Item { .. }) => (Sent { n: 1, ..Sent::default() }, None),
    }
}
