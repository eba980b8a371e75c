//! A vocabulary whose ids are not the library's.
//!
//! The library numbers a model's entries from 0 and added tokens behind them. Some families number
//! otherwise: fairseq moves the first four, Pegasus leaves 103 ids free, Marian keeps a list of
//! its own. Here one numbering is mapped to the other; the library never sees the model's.

use std::collections::{BTreeMap, HashMap};

/// No vocabulary is larger: a file that says so is wrong, and must not size anything.
pub(super) const MAX_ID: u32 = (1 << 24) - 1;

/// The model's tokens by id.
#[derive(Clone, Debug, Default)]
pub(super) struct Vocabulary {
    names: BTreeMap<u32, String>,
    ids: HashMap<String, u32>,
}

impl Vocabulary {
    /// Adds a token. A second name for an id replaces the first; a name keeps the id it had first, unless the
    /// id it is given names nothing else.
    pub(super) fn insert(&mut self, id: u32, name: &str) {
        self.names.insert(id, name.to_owned());
        self.ids.entry(name.to_owned()).or_insert(id);
    }

    /// Gives a token an id, whatever the two meant before.
    pub(super) fn place(&mut self, id: u32, name: &str) {
        self.names.insert(id, name.to_owned());
        self.ids.insert(name.to_owned(), id);
    }

    pub(super) fn id(&self, name: &str) -> Option<u32> {
        self.ids.get(name).copied()
    }

    pub(super) fn name(&self, id: u32) -> Option<&str> {
        self.names.get(&id).map(String::as_str)
    }

    /// One more than the last id.
    pub(super) fn end(&self) -> u32 {
        self.names.last_key_value().map_or(0, |(id, _)| id.saturating_add(1))
    }

    /// Every name, by id.
    pub(super) fn names(&self) -> impl Iterator<Item = (u32, &str)> {
        self.names.iter().map(|(id, name)| (*id, name.as_str()))
    }
}

/// From the library's ids to the model's.
#[derive(Clone, Debug)]
pub(super) struct IdMap {
    /// The model's id for each of the library's. Several may be one: what has no id of its own is unknown.
    ids: Vec<u32>,
    vocabulary: Vocabulary,
}

impl IdMap {
    pub(super) fn new(ids: Vec<u32>, vocabulary: Vocabulary) -> Self {
        Self { ids, vocabulary }
    }

    /// The model's ids.
    pub(super) fn apply(&self, ids: &[u32]) -> Vec<u32> {
        ids.iter().filter_map(|id| self.ids.get(usize::try_from(*id).ok()?).copied()).collect()
    }

    /// The model's id for each of the library's.
    pub(super) fn ids(&self) -> &[u32] {
        &self.ids
    }

    pub(super) fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }
}
