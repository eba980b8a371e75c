//! Biases on attention scores, as kernels read them.

use std::sync::Arc;

use super::arguments::{Bias, bias_kind};
use super::element::Element;
use super::memory::{Fixed, Piece};
use super::queue::{Queue, as_bytes};
use super::rows::shared_work;
use super::tensor::{CudaStep, CudaTensor};
use crate::ops::{HostStep, LoadedDims, RelativeBias, Result, ScoreBias, StoredBias};

/// A loaded bias on a device, f32.
#[derive(Debug)]
pub struct CudaBias {
    values: Fixed,
    dims: LoadedDims,
    kind: u32,
    max_distance: u32,
}

/// A bias as a launch has it, with the memory that only this launch needs.
pub(super) struct LaunchBias {
    pub(super) argument: Bias,
    _offsets: Option<Arc<Piece>>,
    _widened: Option<CudaTensor>,
}

/// Numbers of queries and of keys of each sequence.
pub(super) type Lens = Vec<(usize, usize)>;

/// Scores `[n_heads, n_q, n_k]` of each sequence, one after another.
#[derive(Clone, Copy)]
pub(super) struct ScoreShape<'a> {
    pub(super) n_heads: usize,
    pub(super) lens: &'a Lens,
}

impl ScoreShape<'_> {
    /// First score of each sequence.
    pub(super) fn starts(self) -> Vec<u64> {
        let starts = self.lens.iter().scan(0_usize, |next, (n_q, n_k)| {
            let start = *next;
            *next += self.n_heads * n_q * n_k;
            Some(start as u64)
        });
        starts.collect()
    }
}

impl CudaBias {
    /// Takes a bias to the device.
    pub(super) fn load(queue: &Queue, bias: StoredBias<'_>) -> Result<Self> {
        let op = "load_bias";
        let fixed = |values: &[f32]| queue.fixed(op, as_bytes(values));
        Ok(match bias {
            StoredBias::Relative { table, rule } => {
                let bias = RelativeBias::new(table, rule)?;
                let n_heads = bias.n_heads();
                let by_distance: Vec<f32> = (0..n_heads).flat_map(|head| bias.head(head)).copied().collect();
                let (dims, max_distance) = (LoadedDims::Heads(n_heads), bias.max_distance() as u32);
                Self { values: fixed(&by_distance)?, dims, kind: bias_kind::BY_DISTANCE, max_distance }
            }
            StoredBias::Alibi(slopes) => {
                let dims = LoadedDims::Heads(slopes.len());
                Self { values: fixed(slopes)?, dims, kind: bias_kind::ALIBI, max_distance: 0 }
            }
            StoredBias::Tables { values, dims } => {
                crate::check::bias_tables(values.len(), dims)?;
                let dims = LoadedDims::Tables(dims);
                Self { values: fixed(&values)?, dims, kind: bias_kind::MATRIX, max_distance: 0 }
            }
        })
    }

    /// Dimensions.
    pub(super) fn dims(&self) -> LoadedDims {
        self.dims
    }

    fn argument(&self, offsets: u64) -> Bias {
        let values = self.values.address();
        Bias { values, offsets, kind: self.kind, max_distance: self.max_distance }
    }
}

impl LaunchBias {
    /// The bias of a checked call of `op`.
    pub(super) fn new(
        op: &'static str,
        queue: &Queue,
        step: &CudaStep,
        bias: ScoreBias<'_, CudaBias, CudaTensor>,
        scores: ScoreShape<'_>,
    ) -> Result<Self> {
        Ok(match bias {
            ScoreBias::None => {
                let argument = Bias { values: 0, offsets: 0, kind: bias_kind::NONE, max_distance: 0 };
                Self { argument, _offsets: None, _widened: None }
            }
            ScoreBias::Loaded(bias) => {
                let offsets = queue.constant(op, &vec![0_u64; scores.lens.len()])?;
                Self { argument: bias.argument(offsets.address()), _offsets: Some(offsets), _widened: None }
            }
            ScoreBias::Chosen(bias, table_of) => {
                if let Some(recording) = queue.recording() {
                    recording.keep(table_of.words().start);
                }
                let offsets = queue.constant(op, &table_starts(op, step.host(), bias, table_of)?)?;
                Self { argument: bias.argument(offsets.address()), _offsets: Some(offsets), _widened: None }
            }
            ScoreBias::Materialized(values) => {
                let offsets = Arc::new(queue.upload(op, &scores.starts())?);
                let widened = match queue.element() {
                    Element::F32 => None,
                    Element::Bf16 => Some(widened(op, queue, values)?),
                };
                let argument = Bias {
                    values: widened.as_ref().unwrap_or(values).address(),
                    offsets: offsets.address(),
                    kind: bias_kind::MATRIX,
                    max_distance: 0,
                };
                Self { argument, _offsets: Some(offsets), _widened: widened }
            }
        })
    }
}

/// First value of the table that each sequence adds.
fn table_starts(
    op: &'static str,
    step: &HostStep,
    bias: &CudaBias,
    table_of: crate::ops::Indices,
) -> Result<Vec<u64>> {
    let n_values = match bias.dims {
        LoadedDims::Tables([_, n_heads, n_q, n_k]) => n_heads * n_q * n_k,
        LoadedDims::Heads(_) => 0,
    };
    let tables = step.indices(op, table_of)?;
    Ok(tables.iter().map(|&table| (table as usize * n_values) as u64).collect())
}

/// bf16 values as f32.
fn widened(op: &'static str, queue: &Queue, values: &CudaTensor) -> Result<CudaTensor> {
    let wide = CudaTensor::of(op, queue, Element::F32, values.dims())?;
    let [n_rows, width] = [values.dims().0, values.dims().1].map(|n| n as u32);
    let function = queue.device().kernels.widen_bf16;
    let launch = shared_work(values.n_values());
    queue.launch(op, function, launch, [&wide.address(), &values.address(), &n_rows, &width])?;
    Ok(wide)
}
