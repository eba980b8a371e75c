//! Constants, bounds and values that captured launches have taken from the host; replays must find them again.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::device::Device;
use super::memory::{Piece, Pool};
use crate::check;
use crate::ops::{ArrayContent, HostStep, KernelError, Result, StagedArray};

/// Constants, and bounds of arrays, of a captured forward.
#[derive(Debug)]
pub(super) struct Recording {
    /// Memory of the constants. Not the arena: a constant that keeps one of its pieces would leave the capture with fewer than
    /// the run before had.
    pool: Arc<Pool>,
    /// Words that follow from shapes, by their bytes.
    constants: Mutex<HashMap<Vec<u8>, Arc<Piece>>>,
    /// Arrays by their first word, and the number of rows that they index.
    limits: Mutex<HashMap<usize, usize>>,
    /// First words of arrays whose values have gone into launches.
    kept: Mutex<Vec<usize>>,
}

impl Recording {
    /// One of nothing so far.
    pub(super) fn new(device: &Arc<Device>) -> Self {
        Self {
            pool: Pool::new(device),
            constants: Mutex::default(),
            limits: Mutex::default(),
            kept: Mutex::default(),
        }
    }

    /// Bytes of device memory that the constants take.
    pub(super) fn n_bytes(&self) -> usize {
        self.pool.n_bytes()
    }

    /// The piece that holds these bytes, if there is one.
    pub(super) fn kept_constant(&self, bytes: &[u8]) -> Option<Arc<Piece>> {
        self.constants.lock().get(bytes).cloned()
    }

    /// The piece that holds these bytes; if there is none, one that `fill` copies them to.
    pub(super) fn constant(
        &self,
        op: &'static str,
        bytes: &[u8],
        fill: impl FnOnce(&Piece) -> Result<()>,
    ) -> Result<Arc<Piece>> {
        let mut constants = self.constants.lock();
        if let Some(piece) = constants.get(bytes) {
            return Ok(Arc::clone(piece));
        }
        let piece = Arc::new(self.pool.take(op, bytes.len())?);
        fill(&piece)?;
        constants.insert(bytes.to_vec(), Arc::clone(&piece));
        Ok(piece)
    }

    /// The array at a word indexes so many rows.
    pub(super) fn limit(&self, start: usize, n_rows: usize) {
        let mut limits = self.limits.lock();
        let limit = limits.entry(start).or_insert(n_rows);
        *limit = n_rows.min(*limit);
    }

    /// The array at a word has the same values in every replay.
    pub(super) fn keep(&self, start: usize) {
        self.kept.lock().push(start);
    }

    /// An error unless the launches captured over `of` may run over `other`.
    pub(super) fn check(&self, op: &'static str, of: &HostStep, other: &HostStep) -> Result<()> {
        check::same(op, "arrays", &[other.arrays().len()], &[of.arrays().len()])?;
        check::same(op, "words of all arrays", &[other.words().len()], &[of.words().len()])?;
        let kept = self.kept.lock();
        for (of_array, array) in of.arrays().iter().zip(other.arrays()) {
            self.check_array(op, *of_array, *array)?;
            let words = array.start..array.start + array.len;
            if kept.contains(&array.start) && of.words().get(words.clone()) != other.words().get(words) {
                check::same(op, "values that the graph keeps", &[array.start], &[])?;
            }
        }
        Ok(())
    }

    /// An error unless launches over the array `of` may run over `other`.
    fn check_array(&self, op: &'static str, of: StagedArray, other: StagedArray) -> Result<()> {
        check::same(op, "first word of an array", &[other.start], &[of.start])?;
        // Tables are of any length that there is room for; what is read of them follows from other arrays.
        if !matches!(other.content, ArrayContent::Blocks { .. }) {
            check::same(op, "words of an array", &[other.len], &[of.len])?;
        }
        match (of.content, other.content) {
            (ArrayContent::Values, ArrayContent::Values) | (ArrayContent::Tables, ArrayContent::Tables) => {
                Ok(())
            }
            (ArrayContent::Indices { .. }, ArrayContent::Indices { bound })
            | (ArrayContent::Blocks { .. }, ArrayContent::Blocks { bound }) => {
                let len = self.limits.lock().get(&other.start).copied().unwrap_or(usize::MAX);
                if bound > len {
                    return Err(KernelError::Index { op, what: "row", index: bound - 1, len });
                }
                Ok(())
            }
            (
                ArrayContent::Offsets { n_rows: of_rows, max_seqlen_q: at_most },
                ArrayContent::Offsets { n_rows, max_seqlen_q: longest },
            ) => {
                check::same(op, "rows of sequences", &[n_rows], &[of_rows])?;
                let [at_most, longest] = [at_most, longest].map(|n| n.unwrap_or(usize::MAX));
                check::same(op, "queries of the longest", &[longest.max(at_most)], &[at_most])
            }
            (ArrayContent::StateSlots { .. }, ArrayContent::StateSlots { bound }) => {
                let len = self.limits.lock().get(&other.start).copied().unwrap_or(usize::MAX);
                if bound > len {
                    return Err(KernelError::Index { op, what: "slot", index: bound - 1, len });
                }
                Ok(())
            }
            (
                ArrayContent::SeqLens { max_seqlen_k: at_most },
                ArrayContent::SeqLens { max_seqlen_k: longest },
            ) => check::same(op, "keys of the longest", &[longest.max(at_most)], &[at_most]),
            _ => check::same(op, "kinds of arrays", &[], &[other.start]),
        }
    }
}
