//! Forwards captured as graphs: one for each budget of output tokens, replayed with the units of a batch and padding.
//!
//! Units are packed in ascending order, up to the largest budget; a pack is padded to the smallest budget that it fits, whose
//! graph is captured at its first use. A unit larger than every budget, and every pack of a budget whose capture failed, runs
//! without a graph ("eager"). The idea, and the words, are those of vLLM's encoder CUDA graphs. Nothing here knows a device:
//! a back end that captures nothing turns this off.

use super::outputs::Outputs;
use super::units::EncodeUnit;
use crate::error::ModelError;
pub(super) use packs::UnitSize;
use packs::packs;
use triptych_core::graph_stats::GraphStats;
use triptych_kernels::KernelError;
use triptych_kernels::ops::{CapturedForward, ForwardInputs};

mod packs;

/// The smallest budget of output tokens where none are given and units have no size of their own.
const MIN_TOKENS: usize = 64;

/// Grids of images, with texts of a length, that have a graph, where each needs one of its own.
const MAX_GRIDS: usize = 4;

/// Settings of encoder graphs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncoderGraphConfig {
    /// Output tokens of a forward, one graph for each; empty: each twice the one before, from the smallest that the encoder
    /// has a use for, up to 8192 rows of its layers.
    pub budgets: Vec<usize>,
    /// Items of a forward, at most; no more than the tokens of the smallest budget. Default 16.
    pub max_items: usize,
    /// Device memory of an encoder's graphs in bytes. Once it is taken, no more are captured. Default 4 GiB.
    pub max_bytes: usize,
}

impl Default for EncoderGraphConfig {
    fn default() -> Self {
        Self { budgets: Vec::new(), max_items: 16, max_bytes: 4 << 30 }
    }
}

/// Units that a captured forward takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GraphUnits {
    /// Units of any size.
    Ragged,
    /// Units that take so many tokens of a budget each.
    Fixed(usize),
    /// One image, of one grid, with a text of one length in some models.
    OneGrid,
}

/// Shape of a captured forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GraphShape {
    /// Output tokens, padding included.
    pub n_tokens: usize,
    /// Units, frames of images apart, at most.
    pub max_units: usize,
    /// Patches of the image down and across, for [`GraphUnits::OneGrid`].
    pub grid: Option<[usize; 2]>,
}

/// An encoder whose forwards are captured.
pub(super) trait GraphEncoder {
    /// Tokens and sequences that a unit takes of a graph.
    fn size(&self, unit: &EncodeUnit<'_>) -> UnitSize;

    /// Output values of units, one unit's after another's, without a graph.
    fn eager(&self, units: &[EncodeUnit<'_>], before: &mut dyn FnMut(usize)) -> Result<Vec<f32>, ModelError>;

    /// Inputs of a captured forward of a shape, padding included; an error if the units do not fit.
    fn inputs(&self, shape: GraphShape, units: &[EncodeUnit<'_>]) -> Result<ForwardInputs, ModelError>;

    /// Captures the forward of a shape.
    fn capture(
        &self,
        shape: GraphShape,
        units: &[EncodeUnit<'_>],
    ) -> Result<Box<dyn CapturedForward>, ModelError>;

    /// Width of an output row.
    fn width(&self) -> usize;
}

/// The graphs of an encoder. None by default: everything runs without.
#[derive(Default)]
pub(super) struct EncoderGraphs {
    units: Option<GraphUnits>,
    // Ascending by tokens; those of grids in the order in which they came.
    slots: Vec<Slot>,
    max_tokens: usize,
    max_bytes: usize,
    stats: GraphStats,
}

/// A graph, or a place for one.
struct Slot {
    shape: GraphShape,
    state: SlotState,
}

enum SlotState {
    /// Nothing was encoded with it.
    Empty,
    Captured(Box<dyn CapturedForward>),
    /// Its capture or a replay failed.
    Failed,
}

impl EncoderGraphs {
    /// Places for the graphs of an encoder whose forwards have at most `max_tokens` by themselves.
    pub fn new(config: &EncoderGraphConfig, units: GraphUnits, max_tokens: usize) -> Self {
        let budgets = budgets(&config.budgets, units, max_tokens);
        let smallest = budgets.first().copied().unwrap_or(0);
        let max_units = config.max_items.clamp(1, smallest.max(1));
        let max_tokens = budgets.last().copied().unwrap_or(0);
        let mut slots = Vec::with_capacity(budgets.len());
        for n_tokens in budgets {
            let shape = match units {
                GraphUnits::Ragged => GraphShape { n_tokens, max_units, grid: None },
                GraphUnits::Fixed(of_unit) => {
                    let max_units = max_units.min(n_tokens / of_unit);
                    GraphShape { n_tokens: max_units * of_unit, max_units, grid: None }
                }
                GraphUnits::OneGrid => break,
            };
            if slots.last().is_none_or(|last: &Slot| last.shape != shape) {
                slots.push(Slot { shape, state: SlotState::Empty });
            }
        }
        Self {
            units: Some(units),
            slots,
            max_tokens,
            max_bytes: config.max_bytes,
            stats: GraphStats::default(),
        }
    }

    /// Forwards so far, and memory.
    pub fn stats(&self) -> GraphStats {
        let captured = self.slots.iter().filter_map(|slot| match &slot.state {
            SlotState::Captured(graph) => Some(graph.n_bytes()),
            SlotState::Empty | SlotState::Failed => None,
        });
        let (graphs, n_bytes) = captured.fold((0, 0), |(n, bytes), one| (n + 1, bytes + one));
        GraphStats { graphs, n_bytes, ..self.stats }
    }

    /// Outputs of all units. `before` is called as [`Encoder::encode_in_parts`](super::Encoder::encode_in_parts) says; a replay
    /// is one part.
    pub fn encode(
        &mut self,
        encoder: &impl GraphEncoder,
        units: &[EncodeUnit<'_>],
        before: &mut dyn FnMut(usize),
    ) -> Result<Outputs, ModelError> {
        let sizes: Vec<UnitSize> = units.iter().map(|unit| encoder.size(unit)).collect();
        let mut outputs = Outputs::default();
        let size_of = |&i: &usize| (i, sizes[i].n_rows * encoder.width());
        let (packs, mut eager) = packs(&sizes, self.largest(), |i| units[i].adapter.is_none());
        for pack in packs {
            let Some(slot) = self.slot(&sizes, units, &pack) else {
                eager.extend(pack);
                continue;
            };
            let chosen: Vec<EncodeUnit<'_>> = pack.iter().map(|&i| units[i]).collect();
            let n_tokens = pack.iter().map(|&i| sizes[i].n_rows).sum();
            before(n_tokens);
            let all = match self.replay(encoder, slot, &chosen, n_tokens) {
                Some(all) => all,
                None => self.eager(encoder, &chosen, &mut |_| ())?,
            };
            outputs.add(all, pack.iter().map(size_of));
        }
        if !eager.is_empty() {
            eager.sort_unstable();
            let chosen: Vec<EncodeUnit<'_>> = eager.iter().map(|&i| units[i]).collect();
            let all = self.eager(encoder, &chosen, before)?;
            outputs.add(all, eager.iter().map(size_of));
        }
        Ok(outputs)
    }

    /// Output values without a graph. Graphs make room where the device has none.
    fn eager(
        &mut self,
        encoder: &impl GraphEncoder,
        units: &[EncodeUnit<'_>],
        before: &mut dyn FnMut(usize),
    ) -> Result<Vec<f32>, ModelError> {
        if self.units.is_some() {
            self.stats.eager += 1;
        }
        match encoder.eager(units, before) {
            Err(ModelError::Kernel(error @ KernelError::OutOfMemory { .. })) if self.stats().graphs > 0 => {
                tracing::warn!(%error, "encoder graphs are dropped to make room; this encoder runs without");
                self.slots.iter_mut().for_each(|slot| slot.state = SlotState::Failed);
                encoder.eager(units, &mut |_| ())
            }
            other => other,
        }
    }

    /// Tokens and sequences of a pack, at most.
    fn largest(&self) -> UnitSize {
        let n_tokens = self.max_tokens;
        match self.units {
            None => UnitSize::default(),
            Some(GraphUnits::OneGrid) => UnitSize { n_tokens, n_seqs: 1, n_rows: 0 },
            Some(GraphUnits::Ragged | GraphUnits::Fixed(_)) => {
                let shape = self.slots.last().map(|slot| slot.shape);
                shape.map_or_else(UnitSize::default, |shape| UnitSize {
                    n_tokens: shape.n_tokens,
                    n_seqs: shape.max_units,
                    n_rows: 0,
                })
            }
        }
    }

    /// The smallest slot that a pack fits; `None` if that has failed, or there is no place for one.
    fn slot(&mut self, sizes: &[UnitSize], units: &[EncodeUnit<'_>], pack: &[usize]) -> Option<usize> {
        let n_tokens: usize = pack.iter().map(|&i| sizes[i].n_tokens).sum();
        let n_seqs: usize = pack.iter().map(|&i| sizes[i].n_seqs).sum();
        let grid = match self.units? {
            GraphUnits::OneGrid => pack.first().map(|&i| units[i].patches),
            GraphUnits::Ragged | GraphUnits::Fixed(_) => None,
        };
        let fits = |shape: GraphShape| match grid {
            Some(_) => shape.grid == grid && shape.n_tokens == n_tokens,
            None => n_tokens <= shape.n_tokens && n_seqs <= shape.max_units,
        };
        let found = self.slots.iter().position(|slot| fits(slot.shape));
        let index = match found {
            Some(index) => index,
            None if grid.is_some() && self.slots.len() < MAX_GRIDS => {
                let shape = GraphShape { n_tokens, max_units: 1, grid };
                self.slots.push(Slot { shape, state: SlotState::Empty });
                self.slots.len() - 1
            }
            None => return None,
        };
        match self.slots.get(index)?.state {
            SlotState::Captured(_) => Some(index),
            SlotState::Empty => (self.stats().n_bytes < self.max_bytes).then_some(index),
            SlotState::Failed => None,
        }
    }

    /// Output values of a slot's graph, captured if it is not there; `None` if it cannot be used.
    fn replay(
        &mut self,
        encoder: &impl GraphEncoder,
        index: usize,
        units: &[EncodeUnit<'_>],
        n_rows: usize,
    ) -> Option<Vec<f32>> {
        let Slot { shape, state } = self.slots.get_mut(index)?;
        let inputs = match encoder.inputs(*shape, units) {
            Ok(inputs) => inputs,
            Err(error) => {
                tracing::debug!(%error, tokens = shape.n_tokens, "units do not fit the graph");
                return None;
            }
        };
        let captured = captured(encoder, *shape, state, units);
        match captured.and_then(|graph| Ok(graph.replay(inputs, n_rows)?)) {
            Ok(rows) => {
                self.stats.replays += 1;
                self.stats.tokens += shape.n_tokens as u64;
                self.stats.padding_tokens += shape.n_tokens.saturating_sub(n_rows) as u64;
                Some(rows)
            }
            Err(ModelError::Kernel(error @ KernelError::NotCapturable { .. })) => {
                tracing::info!(%error, "this encoder runs without graphs");
                self.slots.iter_mut().for_each(|slot| slot.state = SlotState::Failed);
                None
            }
            Err(error) => {
                *state = SlotState::Failed;
                tracing::warn!(%error, tokens = shape.n_tokens, "forwards of this size run without a graph");
                None
            }
        }
    }
}

/// The graph of a slot, captured if it is not there.
fn captured<'a>(
    encoder: &impl GraphEncoder,
    shape: GraphShape,
    state: &'a mut SlotState,
    units: &[EncodeUnit<'_>],
) -> Result<&'a mut dyn CapturedForward, ModelError> {
    if !matches!(state, SlotState::Captured(_)) {
        let graph = encoder.capture(shape, units)?;
        tracing::debug!(tokens = shape.n_tokens, bytes = graph.n_bytes(), "encoder forward captured");
        *state = SlotState::Captured(graph);
    }
    match state {
        SlotState::Captured(graph) => Ok(graph.as_mut()),
        SlotState::Empty | SlotState::Failed => Err(KernelError::NotCapturable { op: "encode" }.into()),
    }
}

/// Budgets, ascending.
fn budgets(given: &[usize], units: GraphUnits, max_tokens: usize) -> Vec<usize> {
    let unit = match units {
        GraphUnits::Ragged | GraphUnits::OneGrid => 1,
        GraphUnits::Fixed(of_unit) => of_unit.max(1),
    };
    let mut budgets: Vec<usize> = match given {
        [] => {
            let smallest = if unit > 1 { unit } else { MIN_TOKENS };
            let doubled = |n: &usize| n.checked_mul(2).filter(|n| *n <= max_tokens);
            std::iter::successors(Some(smallest), doubled).collect()
        }
        given => given.iter().map(|n| n / unit * unit).filter(|n| *n > 0).collect(),
    };
    budgets.sort_unstable();
    budgets.dedup();
    budgets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_double_from_the_smallest_use_up_to_the_most_rows() {
        let check = |given: &[usize], units, max_tokens, expect: &[usize]| {
            assert_eq!(budgets(given, units, max_tokens), expect, "{given:?} {units:?}");
        };
        check(&[], GraphUnits::Ragged, 300, &[64, 128, 256]);
        check(&[], GraphUnits::Ragged, 10, &[64]);
        check(&[], GraphUnits::Fixed(1500), 8192, &[1500, 3000, 6000]);
        check(&[100, 20, 100], GraphUnits::Ragged, 50, &[20, 100]);
        check(&[99, 100, 205], GraphUnits::Fixed(50), 10, &[50, 100, 200]);
        check(&[3], GraphUnits::Fixed(50), 1000, &[]);
    }

    #[test]
    fn a_graph_has_no_more_items_than_the_smallest_has_tokens() {
        let shapes = |budgets: &[usize], max_items, units| -> Vec<(usize, usize)> {
            let config =
                EncoderGraphConfig { budgets: budgets.to_vec(), max_items, ..EncoderGraphConfig::default() };
            let graphs = EncoderGraphs::new(&config, units, 8192);
            graphs.slots.iter().map(|slot| (slot.shape.n_tokens, slot.shape.max_units)).collect()
        };
        assert_eq!(shapes(&[4, 64], 16, GraphUnits::Ragged), [(4, 4), (64, 4)]);
        assert_eq!(shapes(&[4, 64], 0, GraphUnits::Ragged), [(4, 1), (64, 1)]);
        assert_eq!(shapes(&[10, 20, 40, 80], 3, GraphUnits::Fixed(10)), [(10, 1), (20, 2), (30, 3)]);
    }
}
