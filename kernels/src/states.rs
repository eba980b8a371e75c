//! A cache of recurrent states in host memory.

use std::ops::Range;

use crate::check::{self, StatesAt};
use crate::ops::{RecurrentSequences, Result, StateLayout};

/// States of all slots, `[n_slots, n_layers]`, each the rows of a convolution and then the matrices of heads. The back end decides how
/// values of a matrix lie.
#[derive(Debug)]
pub struct HostStates {
    layout: StateLayout,
    values: Vec<f32>,
}

impl HostStates {
    /// Zeros.
    pub(crate) fn new(layout: StateLayout) -> Result<Self> {
        Ok(Self { layout, values: vec![0.0; check::state_layout(layout)?] })
    }

    /// Size.
    pub(crate) fn layout(&self) -> StateLayout {
        self.layout
    }

    /// The states that an op is given, for its checks.
    pub(crate) fn at(&self, layer: usize, seqs: RecurrentSequences) -> StatesAt {
        StatesAt { layout: self.layout, layer, seqs }
    }

    /// Values of all slots.
    pub(crate) fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// The last rows of a sequence's convolution in a layer, `[conv_kernel - 1, conv_channels]`.
    pub(crate) fn conv(&self, layer: usize, slot: u32) -> &[f32] {
        &self.values[conv_of(self.layout, layer, slot)]
    }

    /// The same to write.
    pub(crate) fn conv_mut(&mut self, layer: usize, slot: u32) -> &mut [f32] {
        &mut self.values[conv_of(self.layout, layer, slot)]
    }

    /// Copies whole slots, one pair after the other.
    pub(crate) fn copy(&mut self, pairs: &[(u32, u32)]) -> Result<()> {
        check::copy_states(self.layout, pairs)?;
        let len = self.layout.slot_values();
        for &(from, to) in pairs {
            let [from, to] = [from, to].map(|slot| slot as usize * len);
            self.values.copy_within(from..from + len, to);
        }
        Ok(())
    }

    /// Zeros in whole slots.
    pub(crate) fn reset(&mut self, slots: &[u32]) -> Result<()> {
        check::reset_states(self.layout, slots)?;
        let len = self.layout.slot_values();
        slots.iter().for_each(|&slot| self.values[slot as usize * len..][..len].fill(0.0));
        Ok(())
    }
}

/// Range of a slot's convolution in a layer.
fn conv_of(layout: StateLayout, layer: usize, slot: u32) -> Range<usize> {
    let start = slot as usize * layout.slot_values() + layer * layout.layer_values();
    start..start + layout.conv_values()
}

/// Range of a head's matrix in a layer.
pub(crate) fn matrix_of(layout: StateLayout, [layer, head]: [usize; 2], slot: u32) -> Range<usize> {
    let (len, start) = (layout.key_dim * layout.value_dim, conv_of(layout, layer, slot).end);
    start + head * len..start + (head + 1) * len
}
