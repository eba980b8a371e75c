//! The input of a stack: positions of the rows, and in some models a norm.

use super::{Loader, Rotary, resampled};
use crate::error::ModelError;
use crate::spec::{InputNorm, Positions, RelativeSpec, RelativeTables, RotarySpec, StackNames, StackSpec};
use triptych_core::DType;
use triptych_kernels::ops::{Indices, Rotation, ScoreBias, StageBuilder, StoredBias, WeightView};
use triptych_kernels::{Backend, KernelError};

/// Positions and norm before the first layer of a stack.
pub struct InputLayer<B: Backend> {
    encoding: PositionEncoding<B>,
    norm: Option<(InputNorm, B::Norm)>,
}

enum PositionEncoding<B: Backend> {
    Absent,
    Table {
        table: B::Table,
        offset: u32,
    },
    Rotary(Rotations),
    /// Biases on scores: of each layer, or one for all.
    Relative(Vec<B::Bias>),
}

/// Rotations that the layers of a stack may choose from.
const MAX_ROTATIONS: usize = 2;

/// Rotations of queries and keys.
struct Rotations {
    // That of the stack, then one that layers have instead; at most `MAX_ROTATIONS`.
    rotaries: Vec<Rotary>,
    // Index of each layer's; empty: the first for all.
    of_layer: Vec<usize>,
}

/// Positions of the rows of a step, as a stack reads them.
#[derive(Clone, Copy, Debug)]
pub struct StagedPositions {
    // Rows of the position table.
    rows: Option<Indices>,
    // Rotations of queries and keys; none for a stack without rotary positions.
    rotations: [Option<Rotation>; MAX_ROTATIONS],
}

/// A stack with the names of its tensors.
#[derive(Clone, Copy, Debug)]
pub struct StackAndNames<'a> {
    /// Shapes of the stack.
    pub spec: &'a StackSpec,
    /// Names of its tensors.
    pub names: &'a StackNames,
}

impl<B: Backend> InputLayer<B> {
    /// Loads the norm and the position table, `name`, where the spec has them.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(
        loader: &Loader<'_, B>,
        positions: &Positions,
        name: &str,
        stack: StackAndNames<'_>,
    ) -> Result<Self, ModelError> {
        let StackAndNames { spec: stack, names } = stack;
        let hidden = stack.hidden;
        let encoding = match positions {
            Positions::Absent => PositionEncoding::Absent,
            Positions::Table { n_rows, offset } => PositionEncoding::Table {
                table: loader.table(name, offset + n_rows, hidden)?,
                offset: *offset as u32,
            },
            Positions::Typed { n_rows, offset, n_types, types } => {
                let shape = [offset + n_rows, hidden];
                PositionEncoding::Table {
                    table: typed_table(loader, (name, shape), (types, *n_types))?,
                    offset: *offset as u32,
                }
            }
            Positions::Parameter { n_rows } => {
                PositionEncoding::Table { table: loader.bare_table(name, *n_rows, hidden)?, offset: 0 }
            }
            Positions::Resampled(spec) => {
                PositionEncoding::Table { table: resampled::table(loader, spec, (name, hidden))?, offset: 0 }
            }
            Positions::WideSinusoids { n_rows, offset } => PositionEncoding::Table {
                table: wide_sinusoids(loader.backend(), 0..offset + n_rows, hidden)?,
                offset: *offset as u32,
            },
            Positions::RepeatedSinusoids { period, n_rows } => {
                let places = (0..*n_rows).map(|row| row % (*period).max(1));
                PositionEncoding::Table {
                    table: wide_sinusoids(loader.backend(), places, hidden)?,
                    offset: 0,
                }
            }
            Positions::Sinusoids { n_rows } if loader.has(name) => {
                PositionEncoding::Table { table: loader.table(name, *n_rows, hidden)?, offset: 0 }
            }
            Positions::Sinusoids { n_rows } => {
                PositionEncoding::Table { table: sinusoids(loader.backend(), *n_rows, hidden)?, offset: 0 }
            }
            Positions::Rotary(rotary) => PositionEncoding::Rotary(Rotations::new(rotary, stack)?),
            Positions::Relative(relative) => {
                let n_tables = match relative.tables {
                    RelativeTables::First => 1,
                    RelativeTables::Each => stack.n_layers,
                };
                let layer = |i| load_relative(&loader.layer(names.layers, i), name, relative, stack);
                PositionEncoding::Relative((0..n_tables).map(layer).collect::<Result<_, _>>()?)
            }
        };
        let norm = match stack.input_norm {
            InputNorm::Absent => None,
            at => Some((at, loader.norm(names.input_norm, stack.norm, hidden)?)),
        };
        Ok(Self { encoding, norm })
    }

    /// Adds positions to a step: `rows: [n_tokens]` for a table, `positions: [n_tokens]` for rotation.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if the step has no room for them.
    pub fn stage(
        &self,
        builder: &mut StageBuilder,
        rows: impl Iterator<Item = u32>,
        positions: &[[u32; 3]],
    ) -> Result<StagedPositions, ModelError> {
        let mut staged = StagedPositions { rows: None, rotations: [None; MAX_ROTATIONS] };
        match &self.encoding {
            PositionEncoding::Table { offset, .. } => {
                let rows: Vec<u32> = rows.map(|p| p.saturating_add(*offset)).collect();
                staged.rows = Some(builder.indices(&rows)?);
            }
            PositionEncoding::Rotary(rotations) => {
                for (staged, rotary) in staged.rotations.iter_mut().zip(&rotations.rotaries) {
                    *staged = Some(rotary.stage(builder, positions)?);
                }
            }
            PositionEncoding::Absent | PositionEncoding::Relative(_) => {}
        }
        Ok(staged)
    }

    /// Words of each array that [`Self::stage`] adds for so many rows.
    pub fn rooms(&self, n_rows: usize) -> Vec<usize> {
        match &self.encoding {
            PositionEncoding::Table { .. } => vec![n_rows],
            PositionEncoding::Rotary(rotations) => {
                rotations.rotaries.iter().flat_map(|rotary| [n_rows * rotary.n_pairs(); 2]).collect()
            }
            PositionEncoding::Absent | PositionEncoding::Relative(_) => Vec::new(),
        }
    }

    /// Input of the first layer, `[n_tokens, hidden]`, from rows `x: [n_tokens, hidden]` at staged positions.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a position past the table, or a wrong width.
    pub fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        mut x: B::Tensor,
        positions: StagedPositions,
    ) -> Result<B::Tensor, ModelError> {
        if let Some((InputNorm::BeforePositions, norm)) = &self.norm {
            x = backend.norm(&x, norm)?;
        }
        if let (PositionEncoding::Table { table, .. }, Some(rows)) = (&self.encoding, positions.rows) {
            backend.add(&mut x, &backend.embed(step, table, rows)?)?;
        }
        if let Some((InputNorm::AfterPositions, norm)) = &self.norm {
            x = backend.norm(&x, norm)?;
        }
        Ok(x)
    }

    /// Rotation of queries and keys in layer `layer`; `None` for a stack without rotary positions.
    pub fn rotation(&self, layer: usize, positions: StagedPositions) -> Option<Rotation> {
        let idx = match &self.encoding {
            PositionEncoding::Rotary(rotations) => rotations.of_layer.get(layer).copied().unwrap_or(0),
            _ => 0,
        };
        positions.rotations.get(idx).copied().flatten()
    }

    /// Bias on the scores of self-attention in layer `layer`.
    pub fn score_bias(&self, layer: usize) -> ScoreBias<'_, B::Bias, B::Tensor> {
        match &self.encoding {
            PositionEncoding::Relative(biases) => {
                biases.get(layer).or(biases.last()).map_or(ScoreBias::None, ScoreBias::Loaded)
            }
            PositionEncoding::Absent | PositionEncoding::Table { .. } | PositionEncoding::Rotary(_) => {
                ScoreBias::None
            }
        }
    }
}

impl Rotations {
    /// Those of a stack whose layers have `rotary` or one of their own.
    fn new(rotary: &RotarySpec, stack: &StackSpec) -> Result<Self, ModelError> {
        let head_dim = stack.attention.shape.head_dim;
        let mut specs = vec![rotary];
        let mut of_layer = Vec::new();
        for own in stack.layers.iter().map(|layer| layer.rotary.as_ref().unwrap_or(rotary)) {
            let idx = specs.iter().position(|spec| *spec == own).unwrap_or_else(|| {
                specs.push(own);
                specs.len() - 1
            });
            of_layer.push(idx);
        }
        let (op, what) = ("load", "rotations of a stack");
        if specs.len() > MAX_ROTATIONS {
            let (expected, actual) = (vec![MAX_ROTATIONS], vec![specs.len()]);
            return Err(KernelError::Shape { op, what, expected, actual }.into());
        }
        let rotaries = specs.into_iter().map(|spec| Rotary::new(spec, head_dim)).collect();
        Ok(Self { rotaries, of_layer })
    }
}

/// A table of `shape`, each row with the first of another, `[n_types, hidden]`.
fn typed_table<B: Backend>(
    loader: &Loader<'_, B>,
    (name, shape): (&str, [usize; 2]),
    (types, n_types): (&str, usize),
) -> Result<B::Table, ModelError> {
    let mut values = loader.matrix(name, &shape)?.values();
    let types = loader.matrix(types, &[n_types, shape[1]])?.values();
    for row in values.chunks_exact_mut(shape[1].max(1)) {
        row.iter_mut().zip(&types).for_each(|(value, added)| *value += added);
    }
    let data: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let view = WeightView { dtype: DType::F32, shape: &shape, data: &data };
    Ok(loader.backend().load_table(view, 1.0)?)
}

fn load_relative<B: Backend>(
    layer: &Loader<'_, B>,
    name: &str,
    relative: &RelativeSpec,
    stack: &StackSpec,
) -> Result<B::Bias, ModelError> {
    let shape = [relative.n_buckets, stack.attention.shape.n_heads];
    let table = layer.matrix(name, &shape)?;
    Ok(layer.backend().load_bias(StoredBias::Relative { table: table.view(), rule: relative.rule })?)
}

/// `sin(p / 10000^(2i / hidden))` for all `i`, then the cosines, in each row `p`: `[n_rows, hidden]`.
fn sinusoids<B: Backend>(backend: &B, n_rows: usize, hidden: usize) -> Result<B::Table, ModelError> {
    let mut bytes = Vec::with_capacity(4 * n_rows * hidden);
    for position in 0..n_rows {
        let angle = |i: usize| position as f64 / 10_000f64.powf((2 * i) as f64 / hidden as f64);
        let sines = (0..hidden.div_ceil(2)).map(|i| angle(i).sin());
        let cosines = (0..hidden / 2).map(|i| angle(i).cos());
        bytes.extend(sines.chain(cosines).flat_map(|v| (v as f32).to_le_bytes()));
    }
    let table = WeightView { dtype: DType::F32, shape: &[n_rows, hidden], data: &bytes };
    Ok(backend.load_table(table, 1.0)?)
}

/// `sin(p / 10000^(i / (half − 1)))` for all `i` of half a row, then the cosines, then 0 if the width is odd:
/// `[n_rows, hidden]`, of the position of each row. The angles are in f32, as those of the published models.
fn wide_sinusoids<B: Backend>(
    backend: &B,
    positions: impl ExactSizeIterator<Item = usize>,
    hidden: usize,
) -> Result<B::Table, ModelError> {
    let n_rows = positions.len();
    let half = hidden / 2;
    let step = 10_000f64.ln() / half.saturating_sub(1).max(1) as f64;
    let frequencies: Vec<f32> = (0..half).map(|i| (i as f32 * -(step as f32)).exp()).collect();
    let mut bytes = Vec::with_capacity(4 * n_rows * hidden);
    for position in positions {
        let angles = || frequencies.iter().map(|f| position as f32 * f);
        let odd = std::iter::repeat_n(0.0, hidden % 2);
        let row = angles().map(f32::sin).chain(angles().map(f32::cos)).chain(odd);
        bytes.extend(row.flat_map(f32::to_le_bytes));
    }
    Ok(backend.load_table(WeightView { dtype: DType::F32, shape: &[n_rows, hidden], data: &bytes }, 1.0)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_kernels::reference::ReferenceBackend;

    #[test]
    fn sines_come_first_and_an_odd_width_has_one_more_of_them() {
        let backend = ReferenceBackend::new();
        let check = |hidden: usize, expect: &[f64]| {
            let table = sinusoids(&backend, 8, hidden).expect("a table");
            let mut builder = StageBuilder::new();
            let seventh = builder.indices(&[7]).expect("an index");
            let step = backend.stage(builder).expect("a step");
            let row = backend.embed(&step, &table, seventh).and_then(|x| backend.download(&x));
            let row = row.expect("a row");
            assert_eq!(row.len(), expect.len());
            for (a, e) in row.iter().zip(expect) {
                assert!((f64::from(*a) - e).abs() < 1e-7, "{row:?} {expect:?}");
            }
        };
        check(4, &[7f64.sin(), 0.07f64.sin(), 7f64.cos(), 0.07f64.cos()]);
        let slow = 7.0 / 10_000f64.powf(2.0 / 3.0);
        check(3, &[7f64.sin(), slow.sin(), 7f64.cos()]);
    }
}
