//! Units of a batch as packs that graphs take.

/// Share of a graph that a unit takes, and its output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::encoder) struct UnitSize {
    /// Tokens of a budget.
    pub n_tokens: usize,
    /// Sequences.
    pub n_seqs: usize,
    /// Output rows.
    pub n_rows: usize,
}

/// Indices of the units of each pack, in ascending order of their tokens, as many in a pack as `most` holds; then the units
/// that it does not hold alone, or that are not `capturable`.
pub(super) fn packs(
    sizes: &[UnitSize],
    most: UnitSize,
    capturable: impl Fn(usize) -> bool,
) -> (Vec<Vec<usize>>, Vec<usize>) {
    let fits = |n_tokens: usize, n_seqs: usize| n_tokens <= most.n_tokens && n_seqs <= most.n_seqs;
    let (mut order, alone): (Vec<usize>, Vec<usize>) =
        (0..sizes.len()).partition(|&i| capturable(i) && fits(sizes[i].n_tokens, sizes[i].n_seqs));
    order.sort_by_key(|&i| sizes[i].n_tokens);
    let mut packs: Vec<Vec<usize>> = Vec::new();
    let mut n_tokens = 0;
    let mut n_seqs = 0;
    for i in order {
        let size = sizes[i];
        match packs.last_mut() {
            Some(pack) if fits(n_tokens + size.n_tokens, n_seqs + size.n_seqs) => {
                pack.push(i);
                (n_tokens, n_seqs) = (n_tokens + size.n_tokens, n_seqs + size.n_seqs);
            }
            _ => {
                packs.push(vec![i]);
                (n_tokens, n_seqs) = (size.n_tokens, size.n_seqs);
            }
        }
    }
    (packs, alone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_units_are_packed_first_and_none_is_lost() {
        let check = |tokens: &[usize], most: [usize; 2], expect: &[&[usize]], eager: &[usize]| {
            let size = |&n_tokens: &usize| UnitSize { n_tokens, n_seqs: 1, n_rows: n_tokens };
            let sizes: Vec<UnitSize> = tokens.iter().map(size).collect();
            let [n_tokens, n_seqs] = most;
            let most = UnitSize { n_tokens, n_seqs, n_rows: 0 };
            let (packs, alone) = packs(&sizes, most, |i| tokens[i] != 7);
            assert_eq!(packs, expect, "{tokens:?}");
            assert_eq!(alone, eager, "{tokens:?}");
        };
        check(&[], [8, 4], &[], &[]);
        check(&[5, 1, 9, 2, 8], [8, 4], &[&[1, 3, 0], &[4]], &[2]);
        check(&[1, 1, 1, 1, 1], [8, 2], &[&[0, 1], &[2, 3], &[4]], &[]);
        check(&[1, 2], [0, 0], &[], &[0, 1]);
        check(&[7, 1, 7, 2], [8, 4], &[&[1, 3]], &[0, 2]);
    }
}
