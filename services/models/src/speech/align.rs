//! Times of tokens: dynamic time warping over the cross-attention weights of the heads that follow the audio.
//!
//! The weights of each head are normalised over the tokens, smoothed along time by a median, averaged, and warped:
//! the path through tokens × rows with the most weight says at which row each token begins. Numbers and ties are
//! those of transformers
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/whisper/generation_whisper.py>),
//! whose costs are f32. It knows no text and no model.

/// Cross-attention of the chosen heads.
#[derive(Clone, Copy, Debug)]
pub struct AttentionWeights<'a> {
    /// `[n_heads, n_tokens, n_rows]`, row-major; each row of a head sums to 1.
    pub values: &'a [f32],
    /// Number of heads.
    pub n_heads: usize,
    /// Number of tokens.
    pub n_tokens: usize,
    /// Number of encoder rows.
    pub n_rows: usize,
}

/// The row at which each token begins, `[n_tokens]`, never falling. Only the first `n_audio_rows` rows count: the rest is
/// the silence that fills the window. `median` is the width of the filter, odd.
///
/// Empty without tokens, heads or rows, and when `values` has another size.
/// O(n_heads · n_tokens · n_audio_rows · median).
pub fn first_rows(weights: AttentionWeights<'_>, n_audio_rows: usize, median: usize) -> Vec<usize> {
    let AttentionWeights { values, n_heads, n_tokens, n_rows } = weights;
    let n_audio_rows = n_audio_rows.min(n_rows);
    if n_heads * n_tokens * n_audio_rows == 0 || values.len() != n_heads * n_tokens * n_rows {
        return Vec::new();
    }
    let mut mean = vec![0.0f32; n_tokens * n_audio_rows];
    for head in values.chunks_exact(n_tokens * n_rows) {
        let mut head: Vec<f32> =
            head.chunks_exact(n_rows).flat_map(|row| &row[..n_audio_rows]).copied().collect();
        normalise(&mut head, n_audio_rows);
        for (row, sum) in head.chunks_exact(n_audio_rows).zip(mean.chunks_exact_mut(n_audio_rows)) {
            for (value, sum) in smooth(row, median).into_iter().zip(sum) {
                *sum += value;
            }
        }
    }
    for value in &mut mean {
        *value /= n_heads as f32;
    }
    warp(&mean, n_audio_rows)
}

/// Each column `[n_tokens]` to mean 0 and variance 1.
fn normalise(head: &mut [f32], n_rows: usize) {
    let n = (head.len() / n_rows) as f64;
    for column in 0..n_rows {
        let values = || head[column..].iter().step_by(n_rows).map(|v| f64::from(*v));
        let mean = values().sum::<f64>() / n;
        let deviation = (values().map(|v| (v - mean) * (v - mean)).sum::<f64>() / n).sqrt();
        let mean = mean as f32;
        let deviation = deviation as f32;
        for value in head[column..].iter_mut().step_by(n_rows) {
            *value = (*value - mean) / deviation;
        }
    }
}

/// The median of `width` values around each value of a row, the ends mirrored; a shorter row is unchanged.
fn smooth(row: &[f32], width: usize) -> Vec<f32> {
    let half = width / 2;
    let last = row.len() - 1;
    if row.len() <= half {
        return row.to_vec();
    }
    let mirrored = |i: isize| {
        let i = i.unsigned_abs();
        row[if i > last { 2 * last - i } else { i }]
    };
    let mut window = vec![0.0f32; 2 * half + 1];
    (0..row.len())
        .map(|at| {
            for (k, slot) in window.iter_mut().enumerate() {
                *slot = mirrored((at + k) as isize - half as isize);
            }
            window.sort_unstable_by(f32::total_cmp);
            window[half]
        })
        .collect()
}

/// The step that a path took to a cell.
#[derive(Clone, Copy, PartialEq)]
enum WarpStep {
    Both,
    Token,
    Row,
}

/// Dynamic time warping over `weights [n_tokens, n_rows]`: the first row of each token on the heaviest path.
fn warp(weights: &[f32], n_rows: usize) -> Vec<usize> {
    let n_tokens = weights.len() / n_rows;
    let width = n_rows + 1;
    let mut trace = vec![WarpStep::Row; (n_tokens + 1) * width];
    let mut before = vec![f32::INFINITY; width];
    before[0] = 0.0;
    for token in 1..=n_tokens {
        let mut cost = vec![f32::INFINITY; width];
        for row in 1..=n_rows {
            let [both, by_token, by_row] = [before[row - 1], before[row], cost[row - 1]];
            let (least, from) = if both < by_token && both < by_row {
                (both, WarpStep::Both)
            } else if by_token < both && by_token < by_row {
                (by_token, WarpStep::Token)
            } else {
                (by_row, WarpStep::Row)
            };
            let weight = f64::from(weights[(token - 1) * n_rows + row - 1]);
            cost[row] = (f64::from(least) - weight) as f32;
            trace[token * width + row] = from;
        }
        before = cost;
    }
    let mut first = vec![0; n_tokens];
    let mut token = n_tokens;
    let mut row = n_rows;
    while token > 0 {
        first[token - 1] = row.saturating_sub(1);
        match if row == 0 { WarpStep::Token } else { trace[token * width + row] } {
            WarpStep::Both => (token, row) = (token - 1, row - 1),
            WarpStep::Token => token -= 1,
            WarpStep::Row => row -= 1,
        }
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(values: &[f32], dims: [usize; 3], n_audio_rows: usize, expect: &[usize]) {
        let [n_heads, n_tokens, n_rows] = dims;
        let weights = AttentionWeights { values, n_heads, n_tokens, n_rows };
        assert_eq!(first_rows(weights, n_audio_rows, 1), expect);
    }

    #[test]
    fn a_diagonal_is_found_and_nothing_is_made_of_nothing() {
        check(&[0.9, 0.1, 0.0, 0.1, 0.8, 0.1, 0.0, 0.1, 0.9], [1, 3, 3], 3, &[0, 1, 2]);
        check(&[0.9, 0.9, 0.1, 0.1, 0.1, 0.1, 0.9, 0.9], [1, 2, 4], 4, &[0, 2]);
        // The last rows are padding.
        check(&[0.9, 0.1, 0.5, 0.1, 0.9, 0.5], [1, 2, 3], 2, &[0, 1]);
        check(&[], [1, 0, 3], 3, &[]);
        check(&[0.5], [1, 2, 3], 3, &[]);
        check(&[0.2, 0.8], [1, 1, 2], 2, &[0]);
        check(&[0.2, 0.8], [1, 1, 2], 0, &[]);
    }

    #[test]
    fn a_median_takes_single_peaks_away_and_mirrors_the_ends() {
        assert_eq!(smooth(&[0.0, 0.0, 9.0, 0.0, 0.0, 1.0], 3), [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(smooth(&[3.0, 1.0, 2.0], 3), [1.0, 2.0, 1.0]);
        assert_eq!(smooth(&[3.0, 1.0], 7), [3.0, 1.0]);
    }
}
