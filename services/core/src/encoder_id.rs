//! The encoders of a model: one for each kind of item that it reads, or several where towers read the same item.

use crate::Modality;
use std::fmt;

/// Number of a tower among those that read an item, in the order of the model; 0 of the only one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TowerIdx(pub u8);

impl TowerIdx {
    /// Most towers of a model.
    pub const LIMIT: u8 = 8;
}

/// An encoder of a model. Encoders of one kind of item are in the order of their towers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EncoderId {
    /// The kind of items that it reads.
    pub modality: Modality,
    /// Its tower.
    pub tower: TowerIdx,
}

impl EncoderId {
    /// Encoders of a kind of items, as a range of ordered keys.
    pub fn all_of(modality: Modality) -> std::ops::RangeInclusive<Self> {
        let of = |tower| Self { modality, tower: TowerIdx(tower) };
        of(0)..=of(u8::MAX)
    }
}

impl From<Modality> for EncoderId {
    /// The only tower, or the first.
    fn from(modality: Modality) -> Self {
        Self { modality, tower: TowerIdx::default() }
    }
}

impl fmt::Display for EncoderId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.tower.0 {
            0 => self.modality.fmt(f),
            n => write!(f, "{} (tower {n})", self.modality),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn towers_of_a_kind_are_a_range_in_their_order() {
        let [image, audio] = [Modality::Image, Modality::Audio].map(EncoderId::from);
        let second = EncoderId { tower: TowerIdx(1), ..image };
        let ids = BTreeMap::from([(audio, 'c'), (second, 'b'), (image, 'a')]);
        let of = |modality| ids.range(EncoderId::all_of(modality)).map(|(_, c)| *c).collect::<String>();
        assert_eq!([of(Modality::Image), of(Modality::Audio), of(Modality::Text)], ["ab", "c", ""]);
        assert_eq!([image, second].map(|id| id.to_string()), ["image", "image (tower 1)"]);
    }
}
