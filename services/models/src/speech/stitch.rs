//! Joining the texts of two windows that overlap.
//!
//! The end of the left text is slid along the beginning of the right one; where most tokens agree, both are cut in
//! the middle of the agreement, since each window is surest away from its border. The measure is that of
//! transformers' chunked pipeline
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/whisper/tokenization_whisper.py>).

/// Number of tokens of `left` to keep, and of `right` to drop. All are kept if the two have nothing in common.
/// O(left · right).
pub fn seam(left: &[u32], right: &[u32]) -> (usize, usize) {
    let n_left = left.len();
    let n_right = right.len();
    let mut best = 0.0f64;
    let mut seam = (n_left, 0);
    for shift in 1..n_left + n_right {
        let l = n_left.saturating_sub(shift)..n_left.min(n_left + n_right - shift);
        let r = shift.saturating_sub(n_left)..n_right.min(shift);
        let matches = left[l.clone()].iter().zip(&right[r.clone()]).filter(|(a, b)| a == b).count();
        // Of two equal shares the longer one counts more.
        let share = matches as f64 / shift as f64 + shift as f64 / 10_000.0;
        if matches > 1 && share > best {
            (best, seam) = (share, (usize::midpoint(l.start, l.end), usize::midpoint(r.start, r.end)));
        }
    }
    seam
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(left: &[u32], right: &[u32], expect: &[u32]) {
        let (keep, skip) = seam(left, right);
        assert_eq!([&left[..keep], &right[skip..]].concat(), expect, "{left:?} {right:?}");
    }

    #[test]
    fn tokens_of_both_windows_are_kept_once() {
        check(&[1, 2, 3, 4], &[3, 4, 5], &[1, 2, 3, 4, 5]);
        // Each is surest away from its border: the broken ends go.
        check(&[1, 2, 3, 4, 5, 90], &[80, 3, 4, 5, 6, 7], &[1, 2, 3, 4, 5, 6, 7]);
        check(&[1, 2, 3], &[1, 2, 3], &[1, 2, 3]);
        check(&[1, 2], &[3, 4], &[1, 2, 3, 4]);
        // One common token may be chance.
        check(&[1, 2], &[2, 3], &[1, 2, 2, 3]);
        check(&[], &[1], &[1]);
        check(&[1], &[], &[1]);
        check(&[], &[], &[]);
    }
}
