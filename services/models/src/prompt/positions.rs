//! Positions in three parts (temporal, height, width), as in transformers' `get_rope_index`
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/qwen2_vl/modeling_qwen2_vl.py>).

/// A merged grid of rows in a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct GridSpan {
    /// Its first token.
    pub(super) first_token: usize,
    /// Temporal rows, rows down, rows across; their product is its tokens.
    pub(super) thw: [u32; 3],
    /// Temporal positions from one frame to the next; each frame's is cut to an integer.
    pub(super) frame_step: f32,
}

/// Positions of `n_tokens` tokens among which `grids` lie, ascending and disjoint; and the position after them.
///
/// Text counts up in all three parts. A grid starts where the text before it stopped; the text after it goes on
/// past the grid's longest side, time included.
pub(super) fn positions(n_tokens: usize, grids: &[GridSpan]) -> (Vec<[u32; 3]>, u32) {
    let mut positions: Vec<[u32; 3]> = Vec::with_capacity(n_tokens);
    let mut next = 0;
    for grid in grids {
        let n_text = grid.first_token.saturating_sub(positions.len()) as u32;
        positions.extend((next..next + n_text).map(|p| [p; 3]));
        next += n_text;
        let [frames, rows, columns] = grid.thw;
        // In single precision, as the reference's tensors.
        let at = |frame: u32| (frame as f32 * grid.frame_step) as u32;
        for t in (0..frames).map(at) {
            for y in 0..rows {
                positions.extend((0..columns).map(|x| [next + t, next + y, next + x]));
            }
        }
        next += rows.max(columns).max(frames.checked_sub(1).map_or(0, |last| at(last) + 1));
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
        let grid = GridSpan { first_token: 2, thw: [1, 2, 3], frame_step: 1.0 };
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
        let grids = [(0, [1, 1, 2]), (2, [1, 2, 1])].map(|(first_token, thw)| GridSpan {
            first_token,
            thw,
            frame_step: 1.0,
        });
        let (got, next) = positions(4, &grids);
        assert_eq!(got, [[0, 0, 0], [0, 0, 1], [2, 2, 2], [2, 3, 2]]);
        assert_eq!(next, 4);
        assert_eq!(positions(0, &[]), (Vec::new(), 0));
    }

    #[test]
    fn frames_are_as_far_apart_as_their_times_and_text_goes_on_behind_the_last() {
        let grid = GridSpan { first_token: 1, thw: [3, 1, 2], frame_step: 1.5 };
        let (got, next) = positions(8, &[grid]);
        let frames = [[1, 1, 1], [1, 1, 2], [2, 1, 1], [2, 1, 2], [4, 1, 1], [4, 1, 2]];
        assert_eq!(got, [&[[0; 3]][..], &frames, &[[5; 3]]].concat());
        assert_eq!(next, 6);
    }
}
