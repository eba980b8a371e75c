//! Padding of a layout to the shape of a captured forward.
//!
//! Padding rows are sequences of queries without keys: attention writes zeros for them and reads nothing. The rows that are
//! then no sequence's keys are those of a last sequence, which has no queries.

use triptych_kernels::KernelError;

/// Rows and sequences of a captured forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::encoder) struct Room {
    /// Rows of the layers.
    pub n_rows: usize,
    /// Units, at most.
    pub max_units: usize,
    /// Rows that become one output row.
    pub group: usize,
    /// Whole sequences.
    pub whole: SeqRoom,
    /// Windows.
    pub windows: SeqRoom,
}

/// Sequences that a captured forward has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::encoder) struct SeqRoom {
    /// Sequences, those of padding included.
    pub n_seqs: usize,
    /// Rows of a sequence, at most.
    pub max_seqlen: usize,
}

impl SeqRoom {
    /// Offsets of queries and of keys, `[n_seqs + 2]` each, of the sequences of `real` and of padding up to `n_rows`.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for more sequences, or longer ones, than there is room for.
    pub fn padded(self, real: &[u32], n_rows: usize) -> Result<[Vec<u32>; 2], KernelError> {
        let n_rows = n_rows as u32;
        let mut queries = real.to_vec();
        let mut keys = real.to_vec();
        let n_real = real.last().copied().unwrap_or(0);
        let mut end = n_real;
        while end < n_rows && queries.len() <= self.n_seqs {
            end = n_rows.min(end + self.max_seqlen.max(1) as u32);
            queries.push(end);
        }
        let is_longer = |pair: &[u32]| (pair[1] - pair[0]) as usize > self.max_seqlen;
        if end != n_rows || queries.len() > self.n_seqs + 1 || real.windows(2).any(is_longer) {
            let expected = vec![self.n_seqs, self.max_seqlen];
            let actual = vec![real.len().saturating_sub(1)];
            return Err(KernelError::Shape { op: "encode", what: "sequences of a graph", expected, actual });
        }
        queries.resize(self.n_seqs + 2, n_rows);
        keys.resize(self.n_seqs + 1, n_real);
        keys.push(n_rows);
        Ok([queries, keys])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_has_queries_and_no_keys() {
        let room = SeqRoom { n_seqs: 4, max_seqlen: 4 };
        let padded = |real: &[u32], n_rows| room.padded(real, n_rows).ok();
        let expect = [vec![0, 3, 7, 10, 10, 10], vec![0, 3, 7, 7, 7, 10]];
        assert_eq!(padded(&[0, 3, 7], 10), Some(expect));
        let full = [vec![0, 2, 4, 6, 8, 8], vec![0, 2, 4, 6, 8, 8]];
        assert_eq!(padded(&[0, 2, 4, 6, 8], 8), Some(full));
        let split = [vec![0, 1, 5, 9, 10, 10], vec![0, 1, 1, 1, 1, 10]];
        assert_eq!(padded(&[0, 1], 10), Some(split));
        for (real, n_rows) in [(&[0, 5][..], 8), (&[0, 1, 2, 3, 4, 5], 5), (&[0, 1], 14), (&[0, 4], 3)] {
            assert_eq!(padded(real, n_rows), None, "{real:?} {n_rows}");
        }
    }
}
