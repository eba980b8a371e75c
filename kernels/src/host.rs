//! Sequences and biases as back ends in host memory read them.

use std::ops::Range;

use crate::check;
use crate::ops::{
    HostStep, LoadedDims, Mask, MaskBounds, RelativeBias, Result, ScoreBias, StoredBias, Varlen,
};

/// A loaded bias in host memory.
#[derive(Clone, Debug)]
pub struct HostBias(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Relative(RelativeBias),
    /// `[n_heads]`.
    Alibi(Vec<f32>),
    /// Values and dimensions `[n_tables, n_heads, n_q, n_k]`.
    Tables(Vec<f32>, [usize; 4]),
}

impl HostBias {
    /// Takes a bias.
    pub(crate) fn load(bias: StoredBias<'_>) -> Result<Self> {
        Ok(Self(match bias {
            StoredBias::Relative { table, rule } => Kind::Relative(RelativeBias::new(table, rule)?),
            StoredBias::Alibi(slopes) => Kind::Alibi(slopes.to_vec()),
            StoredBias::Tables { values, dims } => {
                check::bias_tables(values.len(), dims)?;
                Kind::Tables(values, dims)
            }
        }))
    }

    /// Dimensions.
    pub(crate) fn dims(&self) -> LoadedDims {
        match &self.0 {
            Kind::Relative(relative) => LoadedDims::Heads(relative.n_heads()),
            Kind::Alibi(slopes) => LoadedDims::Heads(slopes.len()),
            Kind::Tables(_, dims) => LoadedDims::Tables(*dims),
        }
    }

    fn slices<'a>(&'a self, table_of: Option<&'a [u32]>) -> BiasSlices<'a> {
        match &self.0 {
            Kind::Relative(relative) => BiasSlices::Relative(relative),
            Kind::Alibi(slopes) => BiasSlices::Alibi(slopes),
            Kind::Tables(tables, _) => BiasSlices::Tables { tables, table_of },
        }
    }
}

/// Sequences of attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostVarlen<'a> {
    /// Offsets of the sequences in the query rows, `[n_seqs + 1]`.
    pub(crate) cu_seqlens_q: &'a [u32],
    /// Offsets of the sequences in the key rows, `[n_seqs + 1]`.
    pub(crate) cu_seqlens_k: &'a [u32],
    pub(crate) mask: HostMask<'a>,
    pub(crate) bias: BiasSlices<'a>,
}

/// The keys that queries may attend to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostMask<'a> {
    /// `true` if a query attends to no key after its own, but for those ahead.
    pub(crate) is_causal: bool,
    /// Keys up to its own that a query attends to at most, where the mask is causal.
    pub(crate) window: usize,
    /// Keys after its own that each query attends to as well, `[Σq]`; empty: none.
    pub(crate) ahead: &'a [u32],
}

impl<'a> HostMask<'a> {
    /// The mask of a checked call of `op`.
    pub(crate) fn of(op: &'static str, step: &'a HostStep, mask: Mask) -> Result<Self> {
        let Some(MaskBounds { window, ahead }) = mask.bounds() else {
            return Ok(Self { is_causal: false, window: usize::MAX, ahead: &[] });
        };
        let ahead = ahead.map_or(Ok(&[][..]), |ahead| step.indices(op, ahead))?;
        Ok(Self { is_causal: true, window: window.map_or(usize::MAX, |n| n.get() as usize), ahead })
    }

    /// That of a sequence whose queries are these rows.
    #[inline(always)]
    pub(crate) fn of_rows(self, rows: Range<usize>) -> Self {
        Self { ahead: self.ahead.get(rows).unwrap_or_default(), ..self }
    }

    /// Range of the keys that query `query` of the one sequence attends to.
    #[inline(always)]
    pub(crate) fn visible(self, [n_queries, n_keys]: [usize; 2], query: usize) -> Range<usize> {
        if !self.is_causal {
            return 0..n_keys;
        }
        let end = n_keys + query + 1 - n_queries;
        let ahead = self.ahead.get(query).map_or(0, |n| *n as usize);
        end.saturating_sub(self.window)..n_keys.min(end + ahead)
    }
}

/// A bias added to scores.
#[derive(Clone, Copy, Debug)]
pub(crate) enum BiasSlices<'a> {
    None,
    Relative(&'a RelativeBias),
    /// A slope for each query head, `[n_heads]`.
    Alibi(&'a [f32]),
    /// `[n_heads, n_q, n_k]` of each sequence, one after another.
    Materialized(&'a [f32]),
    Tables {
        /// `[n_tables, n_heads, n_q, n_k]`.
        tables: &'a [f32],
        /// `[n_seqs]`; `None`: the first for all.
        table_of: Option<&'a [u32]>,
    },
}

impl<'a> HostVarlen<'a> {
    /// The sequences of a checked call of `op`; `materialized` are the values of a bias that is an activation.
    pub(crate) fn of<T>(
        op: &'static str,
        step: &'a HostStep,
        seqs: Varlen<'a, HostBias, T>,
        materialized: &'a [f32],
    ) -> Result<Self> {
        let [queries, keys] = seqs.seqs.offsets();
        Ok(Self {
            cu_seqlens_q: step.offsets(op, queries)?,
            cu_seqlens_k: step.offsets(op, keys)?,
            mask: HostMask::of(op, step, seqs.mask)?,
            bias: BiasSlices::of(op, step, seqs.bias, materialized)?,
        })
    }
}

impl<'a> BiasSlices<'a> {
    /// The bias of a checked call of `op`; `materialized` are the values of one that is an activation.
    pub(crate) fn of<T>(
        op: &'static str,
        step: &'a HostStep,
        bias: ScoreBias<'a, HostBias, T>,
        materialized: &'a [f32],
    ) -> Result<Self> {
        Ok(match bias {
            ScoreBias::None => Self::None,
            ScoreBias::Loaded(bias) => bias.slices(None),
            ScoreBias::Chosen(bias, table_of) => bias.slices(Some(step.indices(op, table_of)?)),
            ScoreBias::Materialized(_) => Self::Materialized(materialized),
        })
    }
}
