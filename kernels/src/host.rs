//! Sequences and biases as slices: what back ends in host memory read once arguments are checked.

use crate::ops::{HostStep, Mask, RelativeBias, Result, ScoreBias, SharedBias, Varlen};

/// Sequences of attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostVarlen<'a> {
    /// Offsets of the sequences in the query rows, `[n_seqs + 1]`.
    pub(crate) cu_seqlens_q: &'a [u32],
    /// Offsets of the sequences in the key rows, `[n_seqs + 1]`.
    pub(crate) cu_seqlens_k: &'a [u32],
    pub(crate) mask: Mask,
    pub(crate) bias: HostBias<'a>,
}

/// A bias added to scores.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HostBias<'a> {
    None,
    Relative(&'a RelativeBias),
    /// A slope for each query head, `[n_heads]`.
    Alibi(&'a [f32]),
    /// `[n_heads, n_q, n_k]` of each sequence, one after another.
    Materialized(&'a [f32]),
    Shared {
        /// `[n_tables, n_heads, n_q, n_k]`.
        tables: &'a [f32],
        /// `[n_seqs]`; `None`: the first for all.
        table_of: Option<&'a [u32]>,
    },
}

impl<'a> HostVarlen<'a> {
    /// The sequences of a call of `op`.
    pub(crate) fn of(op: &'static str, step: &'a HostStep, seqs: Varlen<'a>) -> Result<Self> {
        let [queries, keys] = seqs.seqs.offsets();
        Ok(Self {
            cu_seqlens_q: step.offsets(op, queries)?,
            cu_seqlens_k: step.offsets(op, keys)?,
            mask: seqs.mask,
            bias: HostBias::of(op, step, seqs.bias)?,
        })
    }
}

impl<'a> HostBias<'a> {
    /// The bias of a call of `op`.
    pub(crate) fn of(op: &'static str, step: &'a HostStep, bias: ScoreBias<'a>) -> Result<Self> {
        Ok(match bias {
            ScoreBias::None => Self::None,
            ScoreBias::Relative(relative) => Self::Relative(relative),
            ScoreBias::Alibi(slopes) => Self::Alibi(slopes),
            ScoreBias::Materialized(values) => Self::Materialized(values),
            ScoreBias::Shared(SharedBias { tables, table_of }) => {
                let table_of = table_of.map(|table_of| step.indices(op, table_of)).transpose()?;
                Self::Shared { tables, table_of }
            }
        })
    }
}
