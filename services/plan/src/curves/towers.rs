//! Curves of each encoder of a model: of its only one, or of the towers that read the same item.
//!
//! A file of a model with one encoder has its curves at the top. Where there are several towers, those at the top are the
//! first one's, and each further one has curves of its own.

use super::{CostCurves, EncodePoint, ItemPoint, Point};
use serde::{Deserialize, Serialize};
use triptych_core::TowerIdx;

/// Curves of a tower beside the first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TowerCurves {
    /// Its name in the model.
    pub name: String,
    /// As [`CostCurves::encode`].
    pub encode: Vec<EncodePoint>,
    /// As [`CostCurves::encode_parts`].
    pub encode_parts: usize,
    /// As [`CostCurves::preprocess`].
    pub preprocess: Vec<Point>,
    /// As [`CostCurves::items`].
    pub items: Vec<ItemPoint>,
    /// As [`CostCurves::row_bytes`].
    pub row_bytes: usize,
    /// True if its rows are cross-attended to, whatever the prompt does with the first tower's.
    #[serde(default)]
    pub is_cross_attended: bool,
}

/// Curves of one encoder of a model.
#[derive(Clone, Copy, Debug)]
pub struct EncoderCurves<'a> {
    /// Name of its tower; empty: no other reads the item.
    pub name: &'a str,
    /// Forwards.
    pub encode: &'a [EncodePoint],
    /// Parts of a forward.
    pub encode_parts: usize,
    /// Preprocessing.
    pub preprocess: &'a [Point],
    /// Output tokens of items.
    pub items: &'a [ItemPoint],
    /// Bytes of a row as it is published.
    pub row_bytes: usize,
    /// True if its rows are cross-attended to beside those of another tower.
    pub is_cross_attended: bool,
}

impl CostCurves {
    /// The only encoder, or the towers in their order. A model without an encoder has one of no points.
    pub fn encoders(&self) -> impl Iterator<Item = EncoderCurves<'_>> {
        let first = EncoderCurves {
            name: &self.tower,
            encode: &self.encode,
            encode_parts: self.encode_parts,
            preprocess: &self.preprocess,
            items: &self.items,
            row_bytes: self.row_bytes,
            is_cross_attended: false,
        };
        std::iter::once(first).chain(self.more_towers.iter().map(TowerCurves::view))
    }

    /// Towers that read an item, as a rule one.
    pub fn n_towers(&self) -> usize {
        1 + self.more_towers.len()
    }

    /// True if several towers read an item.
    pub fn has_towers(&self) -> bool {
        !self.more_towers.is_empty()
    }

    pub(super) fn check_towers(&self, found: &mut Vec<String>) {
        let most = usize::from(TowerIdx::LIMIT);
        if self.n_towers() > most {
            found.push(format!("more_towers has {}, allowed is at most {}", self.n_towers() - 1, most - 1));
        }
        if self.has_towers() && self.api.is_some() {
            found.push("more_towers and api: a server of another engine has no towers".to_owned());
        }
        let names: Vec<_> = self.encoders().map(|encoder| encoder.name).collect();
        for (i, name) in names.iter().enumerate().filter(|_| self.has_towers()) {
            let place = if i == 0 { "tower".to_owned() } else { format!("more_towers[{}].name", i - 1) };
            if name.is_empty() || names[..i].contains(name) {
                found.push(format!("{place} is {name:?}, towers need names of their own"));
            }
        }
        for (i, tower) in self.more_towers.iter().enumerate() {
            if tower.encode.is_empty() {
                found.push(format!("more_towers[{i}].encode has no point, at least one is needed"));
            }
        }
    }
}

impl TowerCurves {
    fn view(&self) -> EncoderCurves<'_> {
        EncoderCurves {
            name: &self.name,
            encode: &self.encode,
            encode_parts: self.encode_parts,
            preprocess: &self.preprocess,
            items: &self.items,
            row_bytes: self.row_bytes,
            is_cross_attended: self.is_cross_attended,
        }
    }
}
