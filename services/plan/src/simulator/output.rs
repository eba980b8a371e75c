//! An output of an item: what one tower makes of it, as a rule the only one.

use super::prompts::{key_of, modality_of};
use crate::curves::{Costs, Sized};
use triptych_bench::offered::OfferedItem;
use triptych_core::{ContentKey, DType, EncodedItem, EncoderId, Extent, Fingerprint, Modality, TowerIdx};

/// An output of an item.
#[derive(Clone, Copy, Debug)]
pub(super) struct Output {
    pub(super) key: ContentKey,
    pub(super) modality: Modality,
    pub(super) tower: TowerIdx,
    pub(super) sized: Sized,
    /// Width of a row, in those of the narrowest tower.
    pub(super) row_units: u32,
}

/// Bytes that stand for a row of the narrowest tower.
pub(super) const ROW_BYTES: usize = 2;

impl Output {
    /// The outputs of an item, in the order of the towers, with these sizes.
    pub(super) fn all_of<'a>(
        item: &OfferedItem,
        sizes: &'a [Sized],
        costs: &'a Costs,
    ) -> impl Iterator<Item = Self> + 'a {
        let (item, least) = (*item, narrowest(costs));
        costs.encoders().zip(sizes).map(move |((tower, encoder), sized)| Self {
            key: key_of(&item, tower),
            modality: modality_of(&item),
            tower,
            sized: *sized,
            row_units: u32::try_from(encoder.row_bytes(1).div_ceil(least)).unwrap_or(u32::MAX).max(1),
        })
    }

    /// The encoder that makes it.
    pub(super) fn encoder(&self) -> EncoderId {
        EncoderId { modality: self.modality, tower: self.tower }
    }

    /// The encoder's fingerprint.
    pub(super) fn fingerprint(&self) -> Fingerprint {
        Fingerprint::from_bytes([1 + self.tower.0; 32])
    }

    /// The output for the engine: rows of one element, which is what the engine's decoder takes.
    pub(super) fn described(&self) -> EncodedItem {
        EncodedItem {
            key: self.key,
            fingerprint: self.fingerprint(),
            modality: self.modality,
            n_tokens: self.sized.tokens,
            hidden: 1,
            dtype: DType::Bf16,
            extent: Extent::Tokens,
            checksum: [0; 32],
        }
    }

    /// The output for a cache: as wide as its bytes count.
    pub(super) fn kept(&self) -> EncodedItem {
        EncodedItem { hidden: self.row_units, ..self.described() }
    }

    /// Bytes of its rows, as they are published.
    pub(super) fn bytes(&self, costs: &Costs) -> u64 {
        costs.encoder(self.tower).row_bytes(self.sized.tokens)
    }
}

/// An output that a cache has, for the engine.
pub(super) fn for_engine(kept: &EncodedItem) -> EncodedItem {
    EncodedItem { hidden: 1, ..kept.clone() }
}

/// Bytes of a row of the narrowest tower, as it is published.
pub(super) fn narrowest(costs: &Costs) -> u64 {
    costs.encoders().map(|(_, encoder)| encoder.row_bytes(1)).min().unwrap_or(1).max(1)
}
