//! Spoken words beside transcribed ones.

/// Words without case and punctuation.
fn bare(text: &str) -> Vec<String> {
    let kept = text.chars().map(|c| if c.is_alphanumeric() { c.to_ascii_lowercase() } else { ' ' });
    kept.collect::<String>().split_whitespace().map(str::to_owned).collect()
}

/// Words that are wrong in a transcript, and words that were spoken.
///
/// Edit distance: a missing, an added and a changed word count one each.
#[must_use]
pub fn word_errors(spoken: &str, written: &str) -> (usize, usize) {
    let spoken = bare(spoken);
    let written = bare(written);
    let mut row: Vec<usize> = (0..=written.len()).collect();
    for (i, s) in spoken.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, w) in written.iter().enumerate() {
            let change = diagonal + usize::from(s != w);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    (row[written.len()], spoken.len())
}

/// Word error rate.
#[must_use]
pub fn word_error_rate(spoken: &str, written: &str) -> f64 {
    let (wrong, n) = word_errors(spoken, written);
    wrong as f64 / n.max(1) as f64
}
