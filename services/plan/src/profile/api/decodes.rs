//! Times of steps in which streams decode together, from the arrival of their tokens.
//!
//! Steps count from the moment at which the last of the streams has its first token until the first of them ends: only between
//! the two does every step have a token of each. Tokens that arrive at once share the time since those before them.

use super::cases::DecodeCase;
use super::error::ApiProfileError;
use super::prober::{Answer, Ask, Prober};
use crate::curves::costs::Spread;
use crate::profile::progress::{Progress, micros};
use std::sync::Arc;
use std::time::Duration;
use triptych_bench::client::Target;

/// Fewest steps of a stream for its case to count.
const LEAST_STEPS: usize = 3;

/// A measured step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Decode {
    /// Streams.
    pub(super) n: u32,
    /// Keys that their tokens attend to, summed over the streams.
    pub(super) context: u64,
    /// Time of a step.
    pub(super) step: Spread,
}

/// All measured steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Decodes {
    /// Steps by case.
    pub(super) points: Vec<Decode>,
    /// Most streams that decoded at once, if some cases had more.
    pub(super) most: Option<u32>,
}

/// The steps of one round.
#[derive(Clone, Debug, PartialEq)]
struct Window {
    /// Mean time of a step, in microseconds.
    mean_us: f64,
    /// Times of single steps, in microseconds.
    steps_us: Vec<f64>,
    context: u64,
}

impl Window {
    /// `None`: the streams did not decode together, or not for long enough.
    fn of(answers: &[Answer]) -> Option<Self> {
        let from = answers.iter().map(|a| a.tokens.first().copied()).collect::<Option<Vec<_>>>()?;
        let from = from.into_iter().max()?;
        let to = answers.iter().filter_map(|a| a.tokens.last().copied()).min()?;
        let mut window = Self { mean_us: 0.0, steps_us: Vec::new(), context: 0 };
        let mut spans = Duration::ZERO;
        let mut n_steps = 0;
        for answer in answers {
            let first = answer.tokens.partition_point(|t| *t < from);
            let end = answer.tokens.partition_point(|t| *t <= to);
            let within = answer.tokens.get(first..end)?;
            let steps = within.len().checked_sub(1).filter(|n| *n >= LEAST_STEPS)?;
            spans += within[steps].saturating_sub(within[0]);
            n_steps += steps;
            window.context += u64::from(answer.prompt_tokens) + (first + steps / 2) as u64;
            window.steps_us.extend(shares(within));
        }
        window.mean_us = micros(spans) / n_steps as f64;
        (window.mean_us > 0.0).then_some(window)
    }
}

/// Time of each token since those before it; tokens that arrived at once share theirs.
fn shares(tokens: &[Duration]) -> Vec<f64> {
    let mut shares = Vec::new();
    let mut groups = tokens.chunk_by(|a, b| a == b);
    let Some(mut before) = groups.next().and_then(|group| group.first()) else { return shares };
    for group in groups {
        let each = micros(group[0].saturating_sub(*before)) / group.len() as f64;
        shares.extend(std::iter::repeat_n(each, group.len()));
        before = &group[0];
    }
    shares
}

/// Measures each case; those whose streams do not all decode at once are left out.
///
/// # Errors
/// [`ApiProfileError`] if none is left, or a request is not answered.
pub(super) async fn measure(
    prober: &mut Prober,
    target: &Arc<dyn Target>,
    (cases, rounds): (&[DecodeCase], u32),
    progress: Progress<'_>,
) -> Result<Decodes, ApiProfileError> {
    let mut windows: Vec<Vec<Window>> = vec![Vec::new(); cases.len()];
    let mut is_left_out = vec![false; cases.len()];
    let of = cases.len() * (rounds as usize + 1);
    for round in 0..=rounds as usize {
        for (i, case) in cases.iter().enumerate() {
            progress("decodes", round * cases.len() + i, of);
            if is_left_out[i] {
                continue;
            }
            let answers = prober.several(target, (case.n, &Ask::text(case.prompt, case.output))).await;
            let window = match answers {
                Ok(answers) => Window::of(&answers),
                // A server may refuse so many at once.
                Err(_) if round == 0 && i > 0 => None,
                Err(e) => return Err(e),
            };
            match window {
                // The first round warms up.
                Some(window) if round > 0 => windows[i].push(window),
                Some(_) => {}
                None => is_left_out[i] = round == 0,
            }
        }
    }
    progress("decodes", of, of);
    let measured: Vec<Decode> =
        cases.iter().zip(windows).filter_map(|(case, windows)| decode(case.n, &windows)).collect();
    let most = measured.iter().map(|p| p.n).max().ok_or(ApiProfileError::NoStream)?;
    let is_short = cases.iter().any(|case| case.n > most);
    Ok(Decodes { points: measured, most: is_short.then_some(most) })
}

fn decode(n: u32, windows: &[Window]) -> Option<Decode> {
    let context = windows.iter().map(|w| w.context).sum::<u64>().checked_div(windows.len() as u64)?;
    let p50_us = Spread::of(windows.iter().map(|w| w.mean_us).collect()).p50_us;
    let steps = windows.iter().flat_map(|w| w.steps_us.iter().copied());
    let p95_us = Spread::of(steps.collect()).p95_us.max(p50_us);
    Some(Decode { n, context, step: Spread { p50_us, p95_us } })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(prompt_tokens: u32, ms: &[u64]) -> Answer {
        let tokens: Vec<_> = ms.iter().map(|ms| Duration::from_millis(*ms)).collect();
        Answer { prompt_tokens, ended: tokens.last().copied().unwrap_or_default(), tokens }
    }

    #[test]
    fn only_steps_in_which_all_streams_have_a_token_count() {
        // The first stream is slowed down by the other's prompt, and ends when both decode.
        let one = answer(10, &[10, 100, 200, 210, 220, 230, 240]);
        let other = answer(20, &[205, 215, 225, 235, 245, 250, 255]);
        let window = Window::of(&[one.clone(), other]).unwrap();
        assert!((window.mean_us - 10_000.0).abs() < 1.0, "{window:?}");
        assert_eq!(window.steps_us, [10_000.0; 6]);
        assert_eq!(window.context, 10 + 3 + 1 + 20 + 1);
        assert_eq!(Window::of(&[one, answer(20, &[300, 310, 320])]), None, "one after the other");
    }

    #[test]
    fn tokens_of_one_message_share_its_time() {
        let ms = [0, 20, 20, 40, 40].map(Duration::from_millis);
        assert_eq!(shares(&ms), [10_000.0; 4]);
        assert_eq!(shares(&[]), Vec::<f64>::new());
    }
}
