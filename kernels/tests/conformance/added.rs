//! Biases with their data, and the plain number that each adds to a score.

use triptych_kernels::KernelError;
use triptych_kernels::ops::{Backend, BucketRule, BucketSides, Indices, ScoreBias, StageBuilder, StoredBias};

use crate::oracle::Score;
use crate::subject::{Stored, values};

/// A bias with its data.
#[derive(Clone)]
pub enum Added {
    None,
    /// The stored table, `[n_buckets, n_heads]`, and the sides.
    Relative(Vec<f32>, BucketSides),
    Alibi(Vec<f32>),
    Materialized(Vec<f32>),
    /// Tables of sequences of one size, and the table of each.
    Shared(Vec<f32>, Vec<u32>),
}

/// A bias on a back end.
pub enum OnBackend<B: Backend> {
    None,
    Loaded(B::Bias),
    Materialized(B::Tensor),
}

impl<B: Backend> OnBackend<B> {
    /// The bias as an op takes it, with what [`Added::stage`] gave.
    pub fn view(&self, table_of: Option<Indices>) -> ScoreBias<'_, B::Bias, B::Tensor> {
        match (self, table_of) {
            (Self::None, _) => ScoreBias::None,
            (Self::Loaded(bias), None) => ScoreBias::Loaded(bias),
            (Self::Loaded(bias), Some(table_of)) => ScoreBias::Chosen(bias, table_of),
            (Self::Materialized(values), _) => ScoreBias::Materialized(values),
        }
    }
}

/// Few buckets and a short reach, so that short sequences see all of them and distances beyond.
const N_BUCKETS: usize = 8;
const MAX_DISTANCE: usize = 20;

/// First distances of the buckets of one side, by transformers' `T5Attention._relative_position_bucket`.
fn starts(sides: BucketSides) -> &'static [u64] {
    match sides {
        BucketSides::Both => &[1, 2, 7],
        BucketSides::Past => &[1, 2, 3, 4, 6, 9, 14],
    }
}

impl Added {
    pub fn relative(n_heads: usize, sides: BucketSides) -> Self {
        Self::Relative(scaled(5, N_BUCKETS * n_heads), sides)
    }

    pub fn alibi(n_heads: usize) -> Self {
        Self::Alibi((1..=n_heads).map(|head| 0.5_f32.powi(head as i32)).collect())
    }

    pub fn materialized(n_heads: usize, lens: &[(usize, usize)]) -> Self {
        Self::Materialized(scaled(6, n_heads * lens.iter().map(|(n_q, n_k)| n_q * n_k).sum::<usize>()))
    }

    /// Every kind, for sequences of these lengths.
    pub fn every(n_heads: usize, lens: &[(usize, usize)]) -> Vec<Self> {
        vec![
            Self::relative(n_heads, BucketSides::Both),
            Self::relative(n_heads, BucketSides::Past),
            Self::alibi(n_heads),
            Self::materialized(n_heads, lens),
        ]
    }

    pub fn name(&self) -> &'static str {
        match self {
            Self::None => "no bias",
            Self::Relative(_, BucketSides::Both) => "relative",
            Self::Relative(_, BucketSides::Past) => "relative to the past",
            Self::Alibi(_) => "alibi",
            Self::Materialized(_) => "materialized",
            Self::Shared(..) => "shared",
        }
    }

    /// Loads the bias for sequences of these lengths, or makes it an activation.
    pub fn load<B: Backend>(&self, backend: &B, n_heads: usize, lens: &[(usize, usize)]) -> OnBackend<B> {
        let load = |bias| OnBackend::Loaded(backend.load_bias(bias).expect("a bias that fits"));
        match self {
            Self::None => OnBackend::None,
            Self::Relative(table, sides) => {
                let stored = Stored::f32(table, &[N_BUCKETS, n_heads]);
                let rule = BucketRule { max_distance: MAX_DISTANCE, sides: *sides };
                load(StoredBias::Relative { table: stored.view(), rule })
            }
            Self::Alibi(slopes) => load(StoredBias::Alibi(slopes)),
            Self::Materialized(values) => {
                let x = backend.upload(values.clone(), values.len(), 1);
                OnBackend::Materialized(x.expect("an activation"))
            }
            Self::Shared(tables, _) => {
                let (n_q, n_k) = lens[0];
                let n_tables = tables.len() / (n_heads * n_q * n_k);
                load(StoredBias::Tables { values: tables.clone(), dims: [n_tables, n_heads, n_q, n_k] })
            }
        }
    }

    /// Adds the table of each sequence to a step, where there are several.
    pub fn stage(&self, builder: &mut StageBuilder) -> Result<Option<Indices>, KernelError> {
        match self {
            Self::Shared(_, table_of) => builder.indices(table_of).map(Some),
            _ => Ok(None),
        }
    }

    /// That of sequence `i` by itself.
    pub fn alone(&self, i: usize, lens: &[(usize, usize)], n_heads: usize) -> Self {
        let n = |(n_q, n_k): &(usize, usize)| n_heads * n_q * n_k;
        match self {
            Self::Materialized(values) => {
                let start: usize = lens[..i].iter().map(n).sum();
                Self::Materialized(values[start..start + n(&lens[i])].to_vec())
            }
            Self::Shared(tables, table_of) => {
                Self::Materialized(tables[table_of[i] as usize * n(&lens[i])..][..n(&lens[i])].to_vec())
            }
            other => other.clone(),
        }
    }

    /// The plain number, of a sequence by itself.
    pub fn at(&self, score: Score) -> f64 {
        match self {
            Self::None => 0.0,
            Self::Relative(table, sides) => {
                let (n_heads, distance) = (table.len() / N_BUCKETS, score.distance());
                let passed = |d: u64| starts(*sides).iter().filter(|&&start| start <= d).count();
                let bucket = match sides {
                    BucketSides::Both if distance > 0 => N_BUCKETS / 2 + passed(distance.unsigned_abs()),
                    BucketSides::Past if distance > 0 => 0,
                    _ => passed(distance.unsigned_abs()),
                };
                table[bucket * n_heads + score.head].into()
            }
            Self::Alibi(slopes) => -f64::from(slopes[score.head]) * score.distance().abs() as f64,
            Self::Materialized(values) => {
                values[(score.head * score.n_queries + score.query) * score.n_keys + score.key].into()
            }
            Self::Shared(..) => unreachable!("a sequence by itself has a table of its own"),
        }
    }
}

/// Values large enough to matter beside scores.
pub fn scaled(seed: u64, n: usize) -> Vec<f32> {
    values(seed, n).into_iter().map(|value| 2.0 * value).collect()
}
