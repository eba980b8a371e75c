//! Sequences and biases as back ends in host memory read them.

use crate::check;
use crate::ops::{HostStep, LoadedDims, Mask, RelativeBias, Result, ScoreBias, StoredBias, Varlen};

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
    pub(crate) mask: Mask,
    pub(crate) bias: BiasSlices<'a>,
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
            mask: seqs.mask,
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
