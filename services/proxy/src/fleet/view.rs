//! A proxy's view of a worker: its latest report, the work that it was given since, and from
//! the two the loads that [`super::score`] compares.
//!
//! No clock, no lock, no network: time is an argument. The planner's simulator keeps the same views.

use super::catalog::Health;
use super::elastic::{PlacementSite, WorkDone};
use super::outlier::{Circuit, Outlier};
use super::roles::ElasticRole;
use super::score::{EncoderLoad, EngineLoad, PdLoad, PlacementLoad};
use super::size::{Curve, Forecast, PrefillTime, UNKNOWN};
use crate::request_machine::deaths::Life;
use bytes::Bytes;
use std::collections::HashSet;
use std::time::{Duration, Instant};
use triptych_core::{ContentKey, EncoderId, ModelName, WorkerId};
use triptych_proto::{convert, v1};

/// Resident keys that are remembered of one worker; a worker tells 4096 at first, and its news later.
const MAX_RESIDENT: usize = 1 << 16;
/// Measured costs of one kind that are remembered of one worker: it has one for each model, and as an encoder for each modality
/// and tower.
const MAX_COSTS: usize = 256;

/// The longest load of encoder weights that is believed.
const MAX_LOAD_US: u64 = 600_000_000;

/// An item to be encoded, as far as its cost depends on it.
#[derive(Clone, Copy, Debug)]
pub struct ItemSize<'a> {
    /// For which model.
    pub model: &'a ModelName,
    /// The encoder that reads it.
    pub encoder: EncoderId,
    /// Its length.
    pub bytes: u64,
}

/// An output of a request that is to be placed, with its item; `None`: the store has it, and nobody encodes it.
pub type UnplacedOutput<'a> = (ContentKey, Option<ItemSize<'a>>);

/// Everything that is known of a worker.
#[derive(Debug, Default)]
pub struct View {
    /// It answered when it was last asked.
    pub is_up: bool,
    /// It said that it takes nothing new.
    pub is_draining: bool,
    /// An operator wants it to be given nothing new, whoever answers there.
    pub is_held: bool,
    /// As it was reported last; `None`: it does not report.
    pub report: Option<Report>,
    /// Given to it since then and not done.
    pub sent: Sent,
    /// Predicted time of items that it will be given, in microseconds: requests are placed there whose items were not given yet.
    pub reserved_us: u64,
    /// Counts reports: what was given before the latest one is in it.
    pub epoch: u64,
    /// Pieces of work that are under way, whenever they were given.
    pub n_leases: u64,
    /// Keys whose encoder outputs it holds.
    pub resident: HashSet<ContentKey>,
    /// Its circuit.
    pub outlier: Outlier,
    /// Name of the process that answered last; `None`: none has.
    pub instance: Option<Bytes>,
    /// It has a request that is tried alone.
    pub is_isolated: bool,
    /// Role that an operator gave it, whoever answers there.
    pub assigned: ElasticRole,
    /// Role that it has: the operator's, or else one by the encodes that are asked for.
    pub role: ElasticRole,
}

/// A report, and when it came.
#[derive(Debug)]
pub struct Report {
    /// Time of its arrival.
    pub at: Instant,
    /// The load that was reported.
    pub load: v1::WorkerLoad,
}

/// Work, in the measures that choices are made with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Pieces.
    pub n: u64,
    /// Predicted time of items to be encoded, in microseconds.
    pub encode_us: u64,
    /// Prompt tokens to be read.
    pub tokens: u64,
}

impl Sent {
    fn add(&mut self, other: Self) {
        self.n = self.n.saturating_add(other.n);
        self.encode_us = self.encode_us.saturating_add(other.encode_us);
        self.tokens = self.tokens.saturating_add(other.tokens);
    }

    fn take(&mut self, other: Self) {
        self.n = self.n.saturating_sub(other.n);
        self.encode_us = self.encode_us.saturating_sub(other.encode_us);
        self.tokens = self.tokens.saturating_sub(other.tokens);
    }
}

impl View {
    /// Health, of all that is known.
    pub fn health(&self) -> Health {
        match self.outlier.circuit() {
            _ if !self.is_up => Health::Down,
            _ if self.is_draining || self.is_held => Health::Draining,
            Circuit::Open { .. } => Health::Ejected,
            Circuit::HalfOpen { .. } => Health::Probing,
            Circuit::Closed => Health::Ready,
        }
    }

    /// A message of its watch. `first`: nothing that was known before holds. Returns what it has computed since the
    /// message before.
    pub fn take_report(&mut self, state: v1::WorkerState, first: bool, now: Instant) -> WorkDone {
        if first {
            self.resident.clear();
        }
        self.is_draining = state.draining;
        for key in state.resident_removed.iter().filter_map(|key| convert::key(key, "resident").ok()) {
            self.resident.remove(&key);
        }
        for key in state.resident_added.iter().filter_map(|key| convert::key(key, "resident").ok()) {
            if self.resident.len() < MAX_RESIDENT {
                self.resident.insert(key);
            }
        }
        let Some(mut load) = state.load else { return WorkDone::default() };
        load.costs.truncate(MAX_COSTS);
        load.prefill_costs.truncate(MAX_COSTS);
        // Of a watch that begins nobody knows when the work was done.
        let computed = load.computed.unwrap_or_default();
        let before =
            self.load().filter(|_| !first).map_or(computed, |load| load.computed.unwrap_or_default());
        let done = WorkDone {
            encode_us: computed.encode_us.saturating_sub(before.encode_us),
            step_us: computed.step_us.saturating_sub(before.step_us),
            step_fixed_us: computed.step_fixed_us.saturating_sub(before.step_fixed_us),
            step_slo_us: computed.step_slo_us.saturating_sub(before.step_slo_us),
        };
        self.report = Some(Report { at: now, load });
        self.sent = Sent::default();
        self.epoch += 1;
        done
    }

    /// Its watch ended: what was reported grows old, and what it holds is not known. One that drains still does.
    pub fn end_reports(&mut self) {
        self.report = None;
        self.resident.clear();
    }

    /// It does not answer. The next to answer is another process.
    pub fn go_down(&mut self) {
        (self.is_up, self.is_draining) = (false, false);
    }

    /// A process answers under this name; compared with the one before.
    pub fn identify(&mut self, instance: Bytes) -> Life {
        let life = match &self.instance {
            Some(before) if before.is_empty() || instance.is_empty() => Life::Unknown,
            Some(before) if *before == instance => Life::Same,
            Some(_) => Life::Other,
            None => Life::Unknown,
        };
        self.instance = Some(instance);
        life
    }

    /// True if it has nothing to do, as far as anybody reported.
    pub fn is_idle(&self) -> bool {
        self.n_leases == 0 && self.load().is_none_or(|load| load.running == 0 && load.waiting == 0)
    }

    fn load(&self) -> Option<&v1::WorkerLoad> {
        self.report.as_ref().map(|report| &report.load)
    }

    /// Encoding that is before a new job, in microseconds: what was reported less the time since, and what was sent
    /// after. Jobs that it would overtake there count too: who leaves them out hedges more and spreads less
    /// (`benches/results/first_images.md`).
    pub fn queued_us(&self, now: Instant) -> u64 {
        let reported = self.report.as_ref().map_or(0, |report| {
            let since = now.saturating_duration_since(report.at).as_micros();
            report.load.queued_us.saturating_sub(u64::try_from(since).unwrap_or(u64::MAX))
        });
        reported.saturating_add(self.sent.encode_us)
    }

    /// Its cost of an item, if it has measured that.
    pub fn curve(&self, model: &ModelName, encoder: EncoderId) -> Option<Curve> {
        let wire = (i32::from(v1::Modality::from(encoder.modality)), u32::from(encoder.tower.0));
        let mut costs = self.load()?.costs.iter();
        costs.find(|c| (c.modality, c.tower_index) == wire && c.model == model.as_str()).map(Curve::from)
    }

    /// Its time of a prompt token in microseconds, if it has measured that. Of a name that it does not tell of, as of an
    /// adapter, the longest of those that it does.
    pub fn prefill_us(&self, model: &ModelName) -> Option<f64> {
        let costs = &self.load()?.prefill_costs;
        let own = costs.iter().find(|cost| cost.model == model.as_str());
        let longest = || costs.iter().max_by(|a, b| a.token_us.total_cmp(&b.token_us));
        own.or_else(longest).map(|cost| cost.token_us)
    }

    /// Time until the weights of an encoder are in memory there, in microseconds; 0: they are. Reported while it changes, so
    /// that it does not age here.
    pub fn cold_us(&self, model: &ModelName, encoder: EncoderId) -> u64 {
        let wire = (i32::from(v1::Modality::from(encoder.modality)), u32::from(encoder.tower.0));
        let mut cold = self.load().map(|load| load.cold_encoders.as_slice()).unwrap_or_default().iter();
        let found = cold.find(|c| (c.modality, c.tower_index) == wire && c.model == model.as_str());
        found.map_or(0, |cold| cold.load_us.min(MAX_LOAD_US))
    }

    /// True if it would refuse one more.
    pub fn is_full(&self) -> bool {
        let Some(load) = self.load().filter(|load| load.capacity > 0) else { return false };
        let taken = u64::from(load.running) + u64::from(load.waiting) + self.sent.n;
        taken >= u64::from(load.capacity)
    }

    /// Requests that run, that wait, tokens that wait: what was sent since the report waits.
    pub fn requests(&self) -> (u64, u64, u64) {
        let (running, waiting, tokens) =
            self.load().map_or((0, 0, 0), |l| (l.running.into(), l.waiting.into(), l.waiting_tokens));
        (running, self.sent.n.saturating_add(waiting), tokens.saturating_add(self.sent.tokens))
    }

    /// Requests that it has: they run or wait.
    pub fn n_requests(&self) -> u64 {
        let (running, waiting, _) = self.requests();
        running.saturating_add(waiting)
    }

    /// The fuller of its caches; each request since the report takes a hundredth of it, until the next report knows.
    pub fn kv_usage(&self) -> f64 {
        let reported = self.load().map_or(0.0, |l| f64::from(l.kv_usage.max(l.cross_kv_usage)));
        let reported = if reported.is_finite() { reported } else { 1.0 };
        reported + self.sent.n as f64 / 100.0
    }

    /// Gives it work. The number is for [`Self::done`].
    pub fn give(&mut self, work: Sent) -> u64 {
        self.sent.add(work);
        self.n_leases += 1;
        self.epoch
    }

    /// The work that was given in this epoch is done.
    pub fn done(&mut self, epoch: u64, work: Sent) {
        if self.epoch == epoch {
            self.sent.take(work);
        }
        self.n_leases = self.n_leases.saturating_sub(1);
    }

    /// True if nothing but its load speaks against giving it work: a half-open worker whose probe is under way takes
    /// nothing more, and neither does one with a request that is tried alone.
    pub fn takes_more(&self) -> bool {
        !self.is_isolated
            && !matches!(self.outlier.circuit(), Circuit::Open { .. } | Circuit::HalfOpen { probing: true })
    }

    /// Forecast of an item's encode if it were given now; `None` if the worker has not measured what it takes.
    pub fn forecast(&self, item: ItemSize<'_>, now: Instant) -> Option<Forecast> {
        let curve = self.curve(item.model, item.encoder)?;
        let cost_us = curve.cost_us(item.bytes);
        Some(Forecast {
            cold: Duration::from_micros(self.cold_us(item.model, item.encoder)),
            queue: Duration::from_micros(self.queued_us(now)),
            cost: Duration::from_micros(cost_us),
            p95: curve.p95(cost_us),
        })
    }

    /// Predicted time of the item here, in microseconds.
    pub fn cost_us(&self, item: ItemSize<'_>) -> u64 {
        self.curve(item.model, item.encoder).unwrap_or(UNKNOWN).cost_us(item.bytes)
    }

    /// p95 of the time in which jobs of so many output tokens are done that were given to it with this forecast;
    /// `None` if it has not measured that.
    pub fn p95_of_tokens(
        &self,
        forecast: Option<Forecast>,
        (model, encoder): (&ModelName, EncoderId),
        tokens: u32,
    ) -> Option<Duration> {
        let curve = self.curve(model, encoder)?;
        Some(forecast?.begin().saturating_add(curve.p95(curve.tokens_us(tokens))))
    }

    /// As an encoder with this item; `id` is its name.
    pub fn encoder_load<'a>(&self, id: &'a WorkerId, item: ItemSize<'_>, now: Instant) -> EncoderLoad<'a> {
        EncoderLoad {
            id,
            queued_us: self.queued_us(now),
            cost_us: self.cost_us(item),
            cold_us: self.cold_us(item.model, item.encoder),
            is_full: self.is_full(),
            engine: None,
        }
    }

    /// As a PD worker that holds the encoder, with this item.
    pub fn colocated_load<'a>(
        &self,
        id: &'a WorkerId,
        item: ItemSize<'_>,
        prefill: PrefillTime,
        now: Instant,
    ) -> EncoderLoad<'a> {
        EncoderLoad { engine: Some(self.engine_load(prefill)), ..self.encoder_load(id, item, now) }
    }

    /// As a PD worker with a request of these items, of whose prompt it has to read so many tokens.
    pub fn pd_load(&self, items: &[(ContentKey, u64)], own_tokens: u64, prefill: PrefillTime) -> PdLoad {
        let (running, waiting, waiting_tokens) = self.requests();
        let own_bytes = items.iter().filter(|(key, _)| !self.resident.contains(key)).map(|(_, bytes)| bytes);
        PdLoad {
            kv_usage: self.kv_usage(),
            running,
            waiting,
            waiting_tokens,
            own_tokens,
            prefill,
            own_bytes: own_bytes.fold(0, |sum, bytes| sum.saturating_add(*bytes)),
            encode_us: 0,
            is_full: self.is_full(),
        }
    }

    /// As the placement of a request with these items: for workers on which steps and forwards take turns on the same cores.
    pub fn placement_load(
        &self,
        items: &[UnplacedOutput<'_>],
        prefill: PrefillTime,
        now: Instant,
    ) -> PlacementLoad {
        let missing = self.missing_us(items);
        let own = missing.iter().map(|(_, us)| *us).fold(self.cold_us_of(items), u64::saturating_add);
        let before = self.queued_us(now).saturating_add(self.reserved_us);
        let answer_us = self.pd_load(&[], 0, prefill).score_us();
        let score_us = answer_us.saturating_add(before).saturating_add(own);
        PlacementLoad { score_us, n_held: self.n_held(items) }
    }

    /// As a placement among workers that encode for each other.
    pub fn placement_site<'a>(
        &self,
        id: &'a WorkerId,
        items: &[UnplacedOutput<'_>],
        prefill: PrefillTime,
        now: Instant,
    ) -> PlacementSite<'a> {
        let missing = self.missing_us(items);
        let cost_us = missing.iter().map(|(_, us)| *us).fold(0, u64::saturating_add);
        let queued_us = self.queued_us(now).saturating_add(self.reserved_us);
        let (cold_us, is_full) = (self.cold_us_of(items), self.is_full());
        let engine = Some(self.engine_load(prefill));
        let encode = EncoderLoad { id, queued_us, cost_us, cold_us, is_full, engine };
        let answer_us = self.pd_load(&[], 0, prefill).score_us();
        PlacementSite { answer_us, encode, n_held: self.n_held(items) }
    }

    fn engine_load(&self, prefill: PrefillTime) -> EngineLoad {
        let (running, _, waiting_tokens) = self.requests();
        EngineLoad { running, waiting_us: prefill.of_tokens(waiting_tokens), role: self.role }
    }

    /// Outputs that would be encoded here, and their costs in microseconds: not those that it holds or the store has.
    pub fn missing_us(&self, items: &[UnplacedOutput<'_>]) -> Vec<(ContentKey, u64)> {
        let missing = items.iter().filter(|(key, _)| !self.resident.contains(key));
        missing.filter_map(|(key, item)| Some((*key, self.cost_us((*item)?)))).collect()
    }

    /// The longest load of encoder weights that is before these outputs if they are encoded here, in microseconds.
    fn cold_us_of(&self, items: &[UnplacedOutput<'_>]) -> u64 {
        let missing = items.iter().filter(|(key, _)| !self.resident.contains(key));
        let cold = missing.filter_map(|(_, item)| item.map(|item| self.cold_us(item.model, item.encoder)));
        cold.max().unwrap_or(0)
    }

    fn n_held(&self, items: &[UnplacedOutput<'_>]) -> usize {
        items.iter().filter(|(key, _)| self.resident.contains(key)).count()
    }

    /// It will be given so much to encode. No report ends that, since no worker knows of it yet.
    pub fn reserve(&mut self, us: u64) {
        self.reserved_us = self.reserved_us.saturating_add(us);
    }

    /// It was given so much of what was reserved, or will not be.
    pub fn release(&mut self, us: u64) {
        self.reserved_us = self.reserved_us.saturating_sub(us);
    }
}
