//! Positions in three parts (temporal, height, width), as in transformers' `get_rope_index`
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/qwen2_vl/modeling_qwen2_vl.py>).

/// A merged grid of rows in a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GridSpan {
    /// Its first token.
    pub(super) first_token: usize,
    /// Temporal rows, rows down, rows across; their product is its tokens.
    pub(super) thw: [u32; 3],
}

/// Positions of `n_tokens` tokens among which `grids` lie, ascending and disjoint; and the position after them.
///
/// Text counts up in all three parts. A grid starts where the text before it stopped; the text after it goes on
/// past the grid's longer side, which is less than its number of tokens.
pub(super) fn positions(n_tokens: usize, grids: &[GridSpan]) -> (Vec<[u32; 3]>, u32) {
    let mut positions: Vec<[u32; 3]> = Vec::with_capacity(n_tokens);
    let mut next = 0;
    for grid in grids {
        let n_text = grid.first_token.saturating_sub(positions.len()) as u32;
        positions.extend((next..next + n_text).map(|p| [p; 3]));
        next += n_text;
        let [frames, rows, columns] = grid.thw;
        for t in 0..frames {
            for y in 0..rows {
                positions.extend((0..columns).map(|x| [next + t, next + y, next + x]));
            }
        }
        next += frames.max(rows).max(columns);
    }
    let n_text = n_tokens.saturating_sub(positions.len()) as u32;
    positions.extend((next..next + n_text).map(|p| [p; 3]));
    (positions, next + n_text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_goes_on_past_the_longer_side_of_a_grid() {
        let grid = GridSpan { first_token: 2, thw: [1, 2, 3] };
        let (got, next) = positions(10, &[grid]);
        let expect = [
            [0; 3],
            [1; 3],
            [2, 2, 2],
            [2, 2, 3],
            [2, 2, 4],
            [2, 3, 2],
            [2, 3, 3],
            [2, 3, 4],
            [5; 3],
            [6; 3],
        ];
        assert_eq!(got, expect);
        assert_eq!(next, 7);
    }

    #[test]
    fn grids_may_touch_and_stand_at_the_edges() {
        let grids =
            [GridSpan { first_token: 0, thw: [1, 1, 2] }, GridSpan { first_token: 2, thw: [1, 2, 1] }];
        let (got, next) = positions(4, &grids);
        assert_eq!(got, [[0, 0, 0], [0, 0, 1], [2, 2, 2], [2, 3, 2]]);
        assert_eq!(next, 4);
        assert_eq!(positions(0, &[]), (Vec::new(), 0));
    }
}
