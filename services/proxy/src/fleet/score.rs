//! The choice of a worker for a piece of work: functions of what is known of each, without clock, locks or network.
//!
//! Encoders are compared by predicted completion, two drawn at random ("the power of two choices", Mitzenmacher 2001:
//! nearly as good as knowing all, and no herd runs to the one that was idle a moment ago). The favourite of an item's
//! key, which may still have its rows, is taken only while that costs no more than the encode it could save.
//! PD workers are compared by a [`PdLoad::score_us`], all of a small pool, two and the favourite of a large one, and so
//! are the workers with encoders at which a request could be placed ([`choose_placement`]).

use super::roles::ElasticRole;
use super::size::PrefillTime;
use rand::Rng;
use rand::seq::index;
use triptych_core::{ContentKey, WorkerId};

/// Up to this many PD workers all are compared.
pub const COMPARE_ALL: usize = 8;

/// Time to load a MiB of encoder output that a worker does not hold, in microseconds. Only ratios between the constants matter,
/// and to the time of a prompt token, and those within a factor of a few: they say how many bytes to load weigh as much as a
/// request that waits.
const LOAD_US_PER_MIB: u64 = 500;
/// Cost of a request that waits before this one.
const WAITING_US: u64 = 10_000;
/// Cost of a request that runs beside this one: its tokens share every step of this one's answer, and wait for its prefill.
/// With a tenth of it requests for popular images gathered on one PD worker of seven: the 32 MiB that are not loaded
/// elsewhere weighed as much as sixteen of them.
const RUNNING_US: u64 = 10_000;
/// Weight of an encode on a worker that is left to requests. With a small one its idle moments are filled with encodes that
/// then stand beside decodes: `benches/results/elastic.md`.
const PD_ROLE_WEIGHT: u64 = 9;
/// Cost of a half-full KV cache. The rest follows `p / (1 - p)`, the wait in a queue that is busy so much of the
/// time: nothing while there is room, everything when there is none.
const PRESSURE_US: f64 = 20_000.0;
/// As full as a cache is taken to be at most, so that full ones can still be compared.
const FULL: f64 = 0.99;

/// The reason for which a worker was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// No other was able.
    Only,
    /// It was the best of those compared.
    Best,
    /// It may have what the work needs.
    Favourite,
    /// It is back from being ejected and shows what it can do.
    Probe,
    /// A PD worker with encoders: no encoder worker was able.
    LastResort,
    /// It encodes what others would later; see [`super::elastic`].
    Spill,
    /// All others had it before, and so had this one.
    Again,
    /// It has nothing else, for work that others may have died of.
    Alone,
}

impl Reason {
    /// The word in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Only => "only",
            Self::Best => "best",
            Self::Favourite => "favourite",
            Self::Probe => "probe",
            Self::LastResort => "last_resort",
            Self::Spill => "spill",
            Self::Again => "again",
            Self::Alone => "alone",
        }
    }
}

/// A choice among several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Its place.
    pub index: usize,
    /// The cause.
    pub reason: Reason,
}

/// An encoder as it would be with this job.
#[derive(Clone, Copy, Debug)]
pub struct EncoderLoad<'a> {
    /// Its name, for the draw of favourites.
    pub id: &'a WorkerId,
    /// Work before this job, in microseconds.
    pub queued_us: u64,
    /// Time of this job here, in microseconds.
    pub cost_us: u64,
    /// Time until the encoder's weights are in memory, in microseconds; 0: they are.
    pub cold_us: u64,
    /// It would refuse.
    pub is_full: bool,
    /// The engine on the same cores; `None`: it is an encoder worker.
    pub engine: Option<EngineLoad>,
}

/// The engine of a PD worker, as far as an encode on its cores depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineLoad {
    /// Requests that it works on.
    pub running: u64,
    /// Time of the prompts that wait there, in microseconds.
    pub waiting_us: u64,
    /// Work that the worker is given.
    pub role: ElasticRole,
}

impl EncoderLoad<'_> {
    /// Time until the job would be done if the cores were its own, in microseconds. Queued jobs wait for a load too.
    pub fn completion_us(&self) -> u64 {
        self.cold_us.saturating_add(self.queued_us).saturating_add(self.cost_us)
    }

    /// The same on the cores of an engine, which takes half of them while it has work, and the delay of all requests that run
    /// there: a microsecond of theirs weighs as much as one of the item's. A worker that is left to encodes has its cores to
    /// itself; on one that is left to requests all of it weighs more.
    pub fn total_us(&self) -> u64 {
        let alone = self.completion_us();
        let Some(engine) = self.engine else { return alone };
        let delay = engine.running.saturating_mul(self.cost_us);
        match engine.role {
            ElasticRole::Both => {}
            ElasticRole::Encoder => return alone.saturating_add(delay),
            ElasticRole::Pd => return alone.saturating_add(delay).saturating_mul(PD_ROLE_WEIGHT),
        }
        let taken = if engine.running > 0 { alone } else { alone.min(engine.waiting_us) };
        alone.saturating_add(taken).saturating_add(delay)
    }
}

/// Chooses an encoder. `None` if there is none to choose from.
pub fn choose_encoder(
    loads: &[EncoderLoad<'_>],
    key: Option<&ContentKey>,
    rng: &mut impl Rng,
) -> Option<Choice> {
    let open = open(loads, |load| load.is_full);
    let best = draw(&open, 2, rng).min_by_key(|(_, load)| load.completion_us())?;
    if open.len() == 1 {
        return Some(Choice { index: best.0, reason: Reason::Only });
    }
    let favourite = key.and_then(|key| open.iter().max_by_key(|(_, load)| weight(key, load.id)));
    // Rows that are there still save an encode, never more.
    let bound = best.1.completion_us().saturating_add(best.1.cost_us);
    Some(match favourite {
        Some((index, load)) if load.completion_us() <= bound => {
            Choice { index: *index, reason: Reason::Favourite }
        }
        _ => Choice { index: best.0, reason: Reason::Best },
    })
}

/// Rendezvous hashing (Thaler, Ravishankar 1998): each key has an order of workers, which changes for no other key
/// when a worker comes or goes.
fn weight(key: &ContentKey, worker: &WorkerId) -> u64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(key.as_bytes()).update(worker.as_str().as_bytes());
    let digest = hasher.finalize();
    let [a, b, c, d, e, f, g, h, ..] = *digest.as_bytes();
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// A PD worker as it would be with this request.
#[derive(Clone, Copy, Debug)]
pub struct PdLoad {
    /// Share of its fuller KV cache in use, 0 to 1.
    pub kv_usage: f64,
    /// Requests it works on.
    pub running: u64,
    /// Requests that wait there.
    pub waiting: u64,
    /// Prompt tokens that wait for their prefill.
    pub waiting_tokens: u64,
    /// Prompt tokens of this request that it has to prefill.
    pub own_tokens: u64,
    /// Time of a prompt token.
    pub prefill: PrefillTime,
    /// Bytes of this request's items that it has to load.
    pub own_bytes: u64,
    /// Time of the encodes on its cores, in microseconds.
    pub encode_us: u64,
    /// It would refuse.
    pub is_full: bool,
}

impl PdLoad {
    /// Time of this request itself there, in microseconds: outputs that it holds already are free.
    fn own_us(&self) -> u64 {
        let load = (self.own_bytes >> 10).saturating_mul(LOAD_US_PER_MIB) >> 10;
        load.saturating_add(self.prefill.of_tokens(self.own_tokens))
    }

    /// Roughly the time to this request's first token, in microseconds.
    pub fn score_us(&self) -> u64 {
        let p = self.kv_usage.clamp(0.0, FULL);
        let pressure = (PRESSURE_US * p / (1.0 - p)) as u64;
        [
            self.prefill.of_tokens(self.waiting_tokens),
            self.waiting.saturating_mul(WAITING_US),
            self.running.saturating_mul(RUNNING_US),
            pressure,
            self.encode_us,
        ]
        .into_iter()
        .fold(self.own_us(), u64::saturating_add)
    }
}

/// Chooses a PD worker. `None` if there is none to choose from.
pub fn choose_pd(loads: &[PdLoad], rng: &mut impl Rng) -> Option<Choice> {
    let open = open(loads, |load| load.is_full);
    let n_drawn = if open.len() <= COMPARE_ALL { open.len() } else { 2 };
    let most = open.iter().map(|(_, load)| load.own_us()).max()?;
    let favourite = open.iter().copied().min_by_key(|(_, load)| load.own_us());
    let favourite = favourite.filter(|(_, load)| load.own_us() < most);
    let drawn = draw(&open, n_drawn, rng).chain(favourite);
    let (index, _) = drawn.min_by_key(|(_, load)| load.score_us())?;
    let reason = match favourite {
        _ if open.len() == 1 => Reason::Only,
        Some((held, _)) if held == index => Reason::Favourite,
        _ => Reason::Best,
    };
    Some(Choice { index, reason })
}

/// Part of the mean, in percent, up to which a worker that holds outputs is preferred, and requests beside it.
const BOUND_PERCENT: u64 = 125;
const BOUND_MORE: u64 = 1;

/// True if a worker with so many requests is preferred for what it holds, beside `n` workers that have `all` of them:
/// consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, <https://arxiv.org/abs/1608.01350>).
pub fn is_within_bound(own: u64, (all, n): (u64, u64)) -> bool {
    let bound = all.saturating_mul(BOUND_PERCENT) / n.max(1).saturating_mul(100);
    own <= bound.saturating_add(BOUND_MORE)
}

/// A worker with encoders as it would be with a request and its items.
#[derive(Clone, Copy, Debug)]
pub struct PlacementLoad {
    /// Time until it has encoded the items that it misses and can read the prompt, in microseconds.
    pub score_us: u64,
    /// Items of the request that it holds.
    pub n_held: usize,
}

/// Chooses the placement of a request; its index. `None` if there is no worker.
pub fn choose_placement(loads: &[PlacementLoad], rng: &mut impl Rng) -> Option<usize> {
    let all: Vec<_> = loads.iter().copied().enumerate().collect();
    let n_drawn = if all.len() <= COMPARE_ALL { all.len() } else { 2 };
    let holder = all.iter().copied().max_by_key(|(_, load)| load.n_held).filter(|(_, load)| load.n_held > 0);
    draw(&all, n_drawn, rng).chain(holder).min_by_key(|(_, load)| load.score_us).map(|(index, _)| index)
}

/// Those that are not full, or all when all are: then the chosen one says so itself.
fn open<T: Copy>(loads: &[T], is_full: impl Fn(&T) -> bool) -> Vec<(usize, T)> {
    let all = loads.iter().copied().enumerate();
    let open: Vec<_> = all.clone().filter(|(_, load)| !is_full(load)).collect();
    if open.is_empty() { all.collect() } else { open }
}

/// `n` of them, in an order that breaks ties by lot.
fn draw<T: Copy>(from: &[(usize, T)], n: usize, rng: &mut impl Rng) -> impl Iterator<Item = (usize, T)> {
    let drawn = index::sample(rng, from.len(), n.min(from.len())).into_vec();
    drawn.into_iter().filter_map(|i| from.get(i).copied())
}

#[cfg(test)]
mod tests;
