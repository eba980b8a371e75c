//! Biases added to attention scores: T5's relative buckets, ALiBi, or numbers as they are.
//!
//! The bucket of a distance is that of T5 (<https://arxiv.org/abs/1910.10683>, section 2.1; as in
//! `T5Attention._relative_position_bucket` of Hugging Face transformers, in f32 as there). Beyond
//! `max_distance` all distances share a bucket, so a table over distances up to it holds every bias there is,
//! and a back end looks up a clamped distance instead of computing buckets.

use super::error::{KernelError, Result};
use super::stage::Indices;
use super::weights::WeightView;
use crate::stored;

/// A bias as a loader hands it over.
#[derive(Clone, Debug)]
pub enum StoredBias<'a> {
    /// T5's: a learned number for each bucket of distances and each head.
    Relative {
        /// `[n_buckets, n_heads]`.
        table: WeightView<'a>,
        /// Rule by which distances fall into buckets.
        rule: BucketRule,
    },
    /// `−slope · |distance|`; a slope for each query head, `[n_heads]`. Press et al.,
    /// <https://arxiv.org/abs/2108.12409>.
    Alibi(&'a [f32]),
    /// Numbers for sequences of one size, as windows of an image have. Minus infinity hides a key; a query that sees none
    /// gives zeros.
    Tables {
        /// `[n_tables, n_heads, n_q, n_k]`, row-major.
        values: Vec<f32>,
        /// `[n_tables, n_heads, n_q, n_k]`.
        dims: [usize; 4],
    },
}

/// A bias added to each score before the softmax; `L` is loaded, `T` an activation.
///
/// Query `i` of a sequence of `n_q` queries and `n_k` keys stands at position `n_k − n_q + i`, key `j` at `j`; a
/// distance is the key's position minus the query's. It is so in [`Backend::attention`](super::Backend::attention)
/// and in [`Backend::paged_attention`](super::Backend::paged_attention), under any mask.
#[derive(Debug, Default)]
pub enum ScoreBias<'a, L, T> {
    /// No bias.
    #[default]
    None,
    /// A loaded bias. One of tables has one, for all sequences.
    Loaded(&'a L),
    /// A loaded bias of tables, and the index of the table that each sequence adds, `[n_seqs]`.
    Chosen(&'a L, Indices),
    /// An activation of any dimensions whose values are `[n_heads, n_q, n_k]` of each sequence, one after another. Minus
    /// infinity hides a key; a query that sees none gives zeros.
    Materialized(&'a T),
}

impl<L, T> Copy for ScoreBias<'_, L, T> {}

impl<L, T> Clone for ScoreBias<'_, L, T> {
    fn clone(&self) -> Self {
        *self
    }
}

/// Dimensions of a loaded bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadedDims {
    /// A function of the distance for each of so many heads.
    Heads(usize),
    /// `[n_tables, n_heads, n_q, n_k]`.
    Tables([usize; 4]),
}

/// Dimensions of a bias, for checks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum BiasDims {
    None,
    Loaded(LoadedDims),
    Chosen(LoadedDims, Indices),
    /// Number of values.
    Materialized(usize),
}

impl<L, T> ScoreBias<'_, L, T> {
    /// Dimensions for checks, from those of what is loaded and of an activation.
    pub(crate) fn dims(
        self,
        loaded: impl FnOnce(&L) -> LoadedDims,
        activation: impl FnOnce(&T) -> (usize, usize),
    ) -> BiasDims {
        match self {
            Self::None => BiasDims::None,
            Self::Loaded(bias) => BiasDims::Loaded(loaded(bias)),
            Self::Chosen(bias, table_of) => BiasDims::Chosen(loaded(bias), table_of),
            Self::Materialized(values) => {
                let (n_tokens, width) = activation(values);
                BiasDims::Materialized(n_tokens.saturating_mul(width))
            }
        }
    }
}

/// Keys that have buckets of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BucketSides {
    /// Keys before and after the query, half of the buckets each: an encoder's.
    Both,
    /// Keys before the query; those after it share bucket 0 with its own: a decoder's.
    Past,
}

/// Rule by which distances fall into buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketRule {
    /// Distances from this on share a bucket; more than a quarter (both sides) or half (past) of the buckets.
    pub max_distance: usize,
    /// Keys that have buckets of their own.
    pub sides: BucketSides,
}

/// T5's bias, laid out by distance.
#[derive(Clone, Debug, PartialEq)]
pub struct RelativeBias {
    n_heads: usize,
    max_distance: usize,
    /// `[n_heads, 2 · max_distance + 1]`, from distance `−max_distance` to `max_distance`.
    by_distance: Vec<f32>,
}

/// Longest `max_distance`: a table of so many distances is still small.
const MAX_DISTANCE: usize = 1 << 16;

impl RelativeBias {
    /// Lays out a stored table `[n_buckets, n_heads]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for a table of other dimensions or of too few buckets, and for a `max_distance`
    /// that leaves no distance to the shared buckets or is over 65 536.
    pub fn new(table: WeightView<'_>, rule: BucketRule) -> Result<Self> {
        let op = "relative_bias";
        let (n_buckets, n_heads) = stored::table_dims(op, table)?;
        let n_exact = exact_buckets(n_buckets, rule.sides);
        let shape = |what, expected, actual| KernelError::Shape { op, what, expected, actual };
        if n_exact == 0 {
            let least = if rule.sides == BucketSides::Both { 4 } else { 2 };
            return Err(shape("buckets", vec![least], vec![n_buckets]));
        }
        if rule.max_distance <= n_exact || rule.max_distance > MAX_DISTANCE {
            return Err(shape("max_distance", vec![n_exact + 1, MAX_DISTANCE], vec![rule.max_distance]));
        }
        let values = stored::to_f32(op, table)?;
        let max = rule.max_distance as isize;
        let buckets: Vec<usize> = (-max..=max).map(|distance| bucket(distance, n_buckets, rule)).collect();
        let by_distance = (0..n_heads)
            .flat_map(|head| buckets.iter().map(move |&bucket| (bucket, head)))
            .map(|(bucket, head)| values[bucket * n_heads + head]);
        Ok(Self { n_heads, max_distance: rule.max_distance, by_distance: by_distance.collect() })
    }

    /// Query heads.
    pub fn n_heads(&self) -> usize {
        self.n_heads
    }

    /// Distances from this on have one bias on each side.
    pub fn max_distance(&self) -> usize {
        self.max_distance
    }

    /// The biases of a head, from distance `−max_distance` to `max_distance`.
    ///
    /// # Panics
    /// If there is no such head.
    pub fn head(&self, head: usize) -> &[f32] {
        let n = 2 * self.max_distance + 1;
        &self.by_distance[head * n..][..n]
    }
}

/// Buckets of a single distance, on one side.
fn exact_buckets(n_buckets: usize, sides: BucketSides) -> usize {
    match sides {
        BucketSides::Both => n_buckets / 4,
        BucketSides::Past => n_buckets / 2,
    }
}

/// The bucket of a distance. There is at least one exact bucket, and `max_distance` is more than they are.
fn bucket(distance: isize, n_buckets: usize, rule: BucketRule) -> usize {
    let (first, n_buckets) = match rule.sides {
        BucketSides::Both if distance > 0 => (n_buckets / 2, n_buckets / 2),
        BucketSides::Both => (0, n_buckets / 2),
        BucketSides::Past if distance > 0 => return 0,
        BucketSides::Past => (0, n_buckets),
    };
    let (distance, n_exact) = (distance.unsigned_abs(), n_buckets / 2);
    if distance < n_exact {
        return first + distance;
    }
    let log_range = (rule.max_distance as f64 / n_exact as f64).ln() as f32;
    let log_distance = (distance as f32 / n_exact as f32).ln();
    let step = (log_distance / log_range * (n_buckets - n_exact) as f32) as usize;
    first + (n_exact + step).min(n_buckets - 1)
}

#[cfg(test)]
mod tests {
    use triptych_core::DType;

    use super::*;

    /// `(sides, n_buckets, max_distance, starts)`: bucket `i` of the past side begins at distance
    /// `starts[i − 1]`, by transformers' `T5Attention._relative_position_bucket`.
    const RULES: [(BucketSides, usize, usize, &[usize]); 8] = [
        (BucketSides::Both, 32, 128, &[1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]),
        (BucketSides::Both, 8, 20, &[1, 2, 7]),
        (BucketSides::Both, 7, 50, &[1, 8]),
        (
            BucketSides::Both,
            64,
            256,
            &[
                1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 20, 23, 27, 32, 39, 46, 54, 64, 77,
                91, 108, 128, 153, 182, 216,
            ],
        ),
        (
            BucketSides::Past,
            32,
            128,
            &[
                1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 19, 21, 24, 27, 31, 35, 40, 46, 52,
                59, 67, 77, 87, 99, 113,
            ],
        ),
        (BucketSides::Past, 8, 20, &[1, 2, 3, 4, 6, 9, 14]),
        (BucketSides::Past, 5, 11, &[1, 2, 4, 7]),
        (
            BucketSides::Past,
            32,
            1000,
            &[
                1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 21, 27, 35, 45, 59, 76, 98, 127, 164,
                213, 275, 356, 461, 597, 773,
            ],
        ),
    ];

    #[test]
    fn buckets_are_those_of_transformers() {
        for (sides, n_buckets, max_distance, starts) in RULES {
            let rule = BucketRule { max_distance, sides };
            for distance in 0..1500_isize {
                let expect = starts.iter().filter(|&&start| start <= distance.unsigned_abs()).count();
                assert_eq!(bucket(-distance, n_buckets, rule), expect, "{rule:?} -{distance}");
                let after = if sides == BucketSides::Both { n_buckets / 2 + expect } else { 0 };
                if distance > 0 {
                    assert_eq!(bucket(distance, n_buckets, rule), after, "{rule:?} {distance}");
                }
            }
        }
    }

    #[test]
    fn a_head_is_laid_out_from_the_farthest_key_before_to_the_farthest_after() {
        let table: Vec<u8> = (0..16).flat_map(|value| (value as f32).to_le_bytes()).collect();
        let view = WeightView { dtype: DType::F32, shape: &[8, 2], data: &table };
        let bias = RelativeBias::new(view, BucketRule { max_distance: 5, sides: BucketSides::Both });
        let bias = bias.expect("a table that fits");
        assert_eq!((bias.n_heads(), bias.max_distance()), (2, 5));
        assert_eq!(bias.head(1), [7.0, 7.0, 5.0, 5.0, 3.0, 1.0, 11.0, 13.0, 13.0, 15.0, 15.0]);
    }

    #[test]
    fn tables_and_rules_that_do_not_fit_are_refused() {
        let bytes = [0_u8; 4 * 32];
        let new = |shape: &[usize], max_distance, sides| {
            let data = &bytes[..4 * shape.iter().product::<usize>()];
            RelativeBias::new(
                WeightView { dtype: DType::F32, shape, data },
                BucketRule { max_distance, sides },
            )
        };
        assert!(new(&[4, 2], 2, BucketSides::Both).is_ok());
        assert!(new(&[2, 2], 2, BucketSides::Past).is_ok());
        for (shape, max_distance, sides) in [
            (&[8][..], 20, BucketSides::Both),
            (&[3, 2], 20, BucketSides::Both),
            (&[1, 2], 20, BucketSides::Past),
            (&[8, 2], 2, BucketSides::Both),
            (&[8, 2], 4, BucketSides::Past),
            (&[8, 2], (1 << 16) + 1, BucketSides::Past),
        ] {
            let refused = new(shape, max_distance, sides);
            assert!(matches!(refused, Err(KernelError::Shape { .. })), "{shape:?} {max_distance} {sides:?}");
        }
    }
}
