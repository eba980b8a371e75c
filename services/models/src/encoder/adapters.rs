//! The rows of a run that have an adapter, where the layers read them and where the projector does.

use super::units::EncodeUnit;
use crate::error::ModelError;
use crate::layers::AdapterGroup;
use crate::lora::Adapters;
use std::collections::BTreeMap;
use triptych_core::AdapterId;
use triptych_kernels::ops::{Indices, StageBuilder};
use triptych_kernels::{Backend, KernelError};

/// Rows of a run by their adapters. Rows of a unit lie together, in whatever order.
#[derive(Debug, Default)]
pub(super) struct AdaptedRows(Vec<AdaptedGroup>);

#[derive(Debug)]
struct AdaptedGroup {
    adapter: AdapterId,
    // Of the layers.
    rows: Indices,
    // Of the projector's linear layers.
    outputs: Indices,
}

impl AdaptedRows {
    /// Adds the rows of units to a step; `n_outputs` has the output rows of one.
    ///
    /// # Errors
    /// [`KernelError`] if the step has no room for them.
    pub fn stage(
        builder: &mut StageBuilder,
        units: &[EncodeUnit<'_>],
        n_outputs: impl Fn(&EncodeUnit<'_>) -> usize,
    ) -> Result<Self, KernelError> {
        let mut of_adapters: BTreeMap<AdapterId, [Vec<u32>; 2]> = BTreeMap::new();
        let mut firsts = [0, 0];
        for unit in units {
            let ends = [firsts[0] + unit.n_rows(), firsts[1] + n_outputs(unit)];
            if let Some(adapter) = unit.adapter {
                let [rows, outputs] = of_adapters.entry(adapter).or_default();
                rows.extend((firsts[0]..ends[0]).map(|row| row as u32));
                outputs.extend((firsts[1]..ends[1]).map(|row| row as u32));
            }
            firsts = ends;
        }
        let group = |(adapter, [rows, outputs]): (AdapterId, [Vec<u32>; 2])| {
            Ok(AdaptedGroup { adapter, rows: builder.indices(&rows)?, outputs: builder.indices(&outputs)? })
        };
        of_adapters.into_iter().map(group).collect::<Result<_, _>>().map(Self)
    }

    /// Groups of the layers, and of the projector.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for an adapter that is not loaded.
    pub fn groups<'a, B: Backend>(
        &self,
        adapters: &'a Adapters<B>,
    ) -> Result<[Vec<AdapterGroup<'a, B>>; 2], ModelError> {
        let group = |of: &AdaptedGroup, rows| adapters.group(of.adapter, Some(rows));
        let rows = self.0.iter().map(|of| group(of, of.rows)).collect::<Result<_, _>>()?;
        let outputs = self.0.iter().map(|of| group(of, of.outputs)).collect::<Result<_, _>>()?;
        Ok([rows, outputs])
    }
}
