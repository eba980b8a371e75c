//! The bias added to the scores of a row: no bucket and no power of two is computed per score.
//!
//! A row of scores over consecutive keys is at consecutive distances. A relative bias is therefore a run of the
//! table of its head with constants on either side, an ALiBi a straight line, and the other kinds a run of
//! their own table.

use crate::host::BiasSlices;

/// A bias with the places of each sequence's numbers.
#[derive(Clone, Debug)]
pub(super) struct RowBias<'a> {
    bias: BiasSlices<'a>,
    /// Index of the first number of each sequence; empty if the kind has none of a sequence's own.
    starts: Vec<usize>,
}

/// One row of scores: a query under one head.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScoreRow {
    pub(super) seq: usize,
    pub(super) head: usize,
    /// The query's number in its sequence.
    pub(super) query: usize,
    pub(super) n_queries: usize,
    pub(super) n_keys: usize,
    /// The key of the first score.
    pub(super) first_key: usize,
}

impl ScoreRow {
    /// Distance of the first key.
    #[inline(always)]
    fn first_distance(self) -> isize {
        let position = (self.n_keys + self.query) as isize - self.n_queries as isize;
        self.first_key as isize - position
    }

    /// Index of the row's first value in a table `[n_heads, n_queries, n_keys]`.
    #[inline(always)]
    fn place(self) -> usize {
        (self.head * self.n_queries + self.query) * self.n_keys + self.first_key
    }
}

impl<'a> RowBias<'a> {
    /// A bias over sequences of these numbers of queries and keys; the caller checked that it fits.
    pub(super) fn new(
        bias: BiasSlices<'a>,
        n_heads: usize,
        lens: impl Iterator<Item = (usize, usize)>,
    ) -> Self {
        let starts = match bias {
            BiasSlices::None | BiasSlices::Relative(_) | BiasSlices::Alibi(_) => Vec::new(),
            BiasSlices::Materialized(_) => lens
                .scan(0, |next, (n_queries, n_keys)| {
                    let start = *next;
                    *next += n_heads * n_queries * n_keys;
                    Some(start)
                })
                .collect(),
            BiasSlices::Tables { table_of, .. } => {
                let table = |seq: usize| table_of.map_or(0, |table_of| table_of[seq] as usize);
                lens.enumerate().map(|(seq, (n_q, n_k))| table(seq) * n_heads * n_q * n_k).collect()
            }
        };
        Self { bias, starts }
    }

    /// `true` if nothing is added.
    pub(super) fn is_none(&self) -> bool {
        matches!(self.bias, BiasSlices::None)
    }

    /// Adds the bias to the scores of a row.
    #[inline(always)]
    pub(super) fn add(&self, row: ScoreRow, scores: &mut [f32]) {
        match self.bias {
            BiasSlices::None => {}
            BiasSlices::Relative(relative) => {
                let max = relative.max_distance() as isize;
                add_clamped(relative.head(row.head), row.first_distance() + max, scores);
            }
            BiasSlices::Alibi(slopes) => add_line(slopes[row.head], row.first_distance(), scores),
            BiasSlices::Materialized(values) => {
                add_run(&values[self.starts[row.seq] + row.place()..], scores);
            }
            BiasSlices::Tables { tables, .. } => {
                add_run(&tables[self.starts[row.seq] + row.place()..], scores);
            }
        }
    }
}

/// `scores[i] += table[first + i]`, with the table's ends going on for ever.
#[inline(always)]
fn add_clamped(table: &[f32], first: isize, scores: &mut [f32]) {
    let (Some(&before), Some(&after)) = (table.first(), table.last()) else { return };
    let n_before = usize::try_from(-first).unwrap_or(0).min(scores.len());
    let (left, rest) = scores.split_at_mut(n_before);
    add_constant(before, left);
    let run = table.get(usize::try_from(first).unwrap_or(0)..).unwrap_or(&[]);
    let (middle, right) = rest.split_at_mut(run.len().min(rest.len()));
    add_run(run, middle);
    add_constant(after, right);
}

/// `scores[i] += value`.
#[inline(always)]
fn add_constant(value: f32, scores: &mut [f32]) {
    for score in scores {
        *score += value;
    }
}

/// `scores[i] += values[i]`.
#[inline(always)]
fn add_run(values: &[f32], scores: &mut [f32]) {
    for (score, value) in scores.iter_mut().zip(values) {
        *score += value;
    }
}

/// `scores[i] −= slope · |first + i|`.
#[inline(always)]
fn add_line(slope: f32, first: isize, scores: &mut [f32]) {
    let first = first as f32;
    for (i, score) in scores.iter_mut().enumerate() {
        *score -= slope * (first + i as f32).abs();
    }
}
