//! Goodput of tested rates by our rule and by others', with an interval.
//!
//! A rate counts as what was offered in the judged windows. In short ones that differs by chance from what was asked for.

use crate::judge::{JudgedWindow, Rule, Run, RunVerdict, judge_repeated, offered_rate};
use crate::outcome::Outcome;
use crate::result::Goodput;
use crate::search::rounded;
use crate::seed::{BenchRng, Purpose, rng};
use crate::slo::Slo;
use rand::RngExt;

/// Resamples of the bootstrap.
const N_RESAMPLES: u64 = 500;
/// Blocks of a run: requests that are close in time are correlated, so they are resampled together.
const N_BLOCKS: usize = 20;

/// Outcomes of one rate, a run for each seed.
#[derive(Clone, Debug)]
pub struct Tested {
    /// Requests a second that were asked for, in the mean.
    pub rate: f64,
    /// Each run's outcomes and window.
    pub runs: Vec<(Vec<Outcome>, JudgedWindow)>,
    /// Runs before those that repeat the rate with other seeds; 0: it was not repeated.
    pub n_first: usize,
    /// True if a run is void: then the rate is not judged.
    pub void: bool,
}

impl Tested {
    /// RunVerdict on all runs.
    pub fn judge(&self, slo: &Slo, rule: &Rule) -> RunVerdict {
        judge_repeated(&self.as_runs(), self.n_first, slo, rule)
    }

    /// Requests a second that were offered in the judged windows, with four digits; the asked rate if none was.
    pub fn offered(&self) -> f64 {
        offered_rate(&self.as_runs()).map_or(self.rate, rounded)
    }

    fn as_runs(&self) -> Vec<Run<'_>> {
        self.runs.iter().map(|(outcomes, window)| Run { outcomes, window: *window }).collect()
    }

    /// The verdict, which fails if a run is void.
    fn judged(&self, slo: &Slo, rule: &Rule) -> RunVerdict {
        let mut verdict = self.judge(slo, rule);
        verdict.passed &= !self.void;
        verdict.percentiles_passed &= !self.void;
        verdict
    }
}

/// Goodput over the tested rates, in any order.
pub fn goodput(tested: &[Tested], slo: &Slo, rule: &Rule) -> Goodput {
    let mut tested: Vec<(f64, &Tested)> = tested.iter().map(|t| (t.offered(), t)).collect();
    tested.sort_by(|a, b| a.0.total_cmp(&b.0));
    let verdicts: Vec<(f64, RunVerdict)> =
        tested.iter().map(|(rate, t)| (*rate, t.judged(slo, rule))).collect();
    let at_90 = Rule { attainment: 0.9, percentile: 90.0, ..*rule };
    let passed: Vec<(f64, bool)> = verdicts.iter().map(|(rate, v)| (*rate, v.passed)).collect();
    Goodput {
        rate: highest(&passed),
        interval: interval(&tested, &verdicts, slo, rule),
        fails_at: passed.iter().find(|(_, passed)| !passed).map(|(rate, _)| *rate),
        rate_at_90: highest(
            &tested.iter().map(|(rate, t)| (*rate, t.judged(slo, &at_90).passed)).collect::<Vec<_>>(),
        ),
        vllm: verdicts.iter().filter(|(_, v)| v.percentiles_passed).map(|(rate, _)| *rate).next_back(),
        distserve: crossing(&verdicts.iter().map(|(r, v)| (*r, v.attainment())).collect::<Vec<_>>(), 0.9),
    }
}

/// The highest rate that passes with every lower one passing; rates rise.
fn highest(rates: &[(f64, bool)]) -> Option<f64> {
    rates.iter().take_while(|(_, passed)| *passed).map(|(rate, _)| *rate).last()
}

/// Rate at which attainment first falls below a level, by linear interpolation. Attainment at rate 0 is 1, so
/// the line begins at rate 0. If it never falls, the highest rate; the true one may be higher.
fn crossing(attained: &[(f64, f64)], level: f64) -> Option<f64> {
    let mut before = (0.0, 1.0);
    for &(rate, attainment) in attained {
        if attainment < level {
            let (rate0, attainment0) = before;
            let part = (attainment0 - level) / (attainment0 - attainment);
            return Some(rate0 + part * (rate - rate0));
        }
        before = (rate, attainment);
    }
    attained.last().map(|(rate, _)| *rate)
}

/// Counts of a block of a run.
#[derive(Clone, Debug, Default)]
struct ResampleBlock {
    n_offered: u64,
    n_good: u64,
    /// Requests that exceeded each latency limit.
    n_late: [u64; 3],
}

/// The central 95 % of goodput when blocks of each run are drawn again, with their backlogs and trends as they were
/// found: what is left over at the end of one block is served in the next, so blocks drawn alone tell nothing of them.
fn interval(
    tested: &[(f64, &Tested)],
    verdicts: &[(f64, RunVerdict)],
    slo: &Slo,
    rule: &Rule,
) -> Option<(f64, f64)> {
    let steady = |v: &RunVerdict| {
        let trends = [&v.concurrency_trend, &v.ttft_trend];
        v.serves(rule) && trends.iter().all(|t| t.is_none_or(|t| !t.rises))
    };
    let blocks: Vec<(f64, bool, Vec<Vec<ResampleBlock>>)> = tested
        .iter()
        .zip(verdicts)
        .map(|((_, t), (rate, v))| {
            (*rate, !t.void && steady(v), t.runs.iter().map(|(o, w)| cut(o, *w, slo)).collect())
        })
        .collect();
    if blocks.is_empty() {
        return None;
    }
    let mut found: Vec<f64> = (0..N_RESAMPLES)
        .map(|i| {
            let mut rng = rng(0, Purpose::Bootstrap, i);
            let passed: Vec<(f64, bool)> = blocks
                .iter()
                .map(|(rate, steady, runs)| (*rate, *steady && passes(&redraw(runs, &mut rng), rule)))
                .collect();
            highest(&passed).unwrap_or(0.0)
        })
        .collect();
    found.sort_unstable_by(f64::total_cmp);
    let at = |q: f64| found[((found.len() - 1) as f64 * q).round() as usize];
    Some((at(0.025), at(0.975)))
}

fn cut(outcomes: &[Outcome], window: JudgedWindow, slo: &Slo) -> Vec<ResampleBlock> {
    let mut blocks = vec![ResampleBlock::default(); N_BLOCKS];
    let block_at = |t: std::time::Duration| {
        let part = (t.saturating_sub(window.from)).as_secs_f64() / window.seconds();
        ((part * N_BLOCKS as f64) as usize).min(N_BLOCKS - 1)
    };
    for outcome in outcomes {
        if window.has(outcome.due) {
            let block = &mut blocks[block_at(outcome.due)];
            block.n_offered += 1;
            block.n_good += u64::from(outcome.meets(slo));
            let one = [
                Slo { tpot: None, e2el: None, ..*slo },
                Slo { ttft: None, e2el: None, ..*slo },
                Slo { ttft: None, tpot: None, ..*slo },
            ];
            for (late, slo) in block.n_late.iter_mut().zip(one) {
                *late += u64::from(!outcome.meets(&slo));
            }
        }
    }
    blocks
}

/// Resampled blocks, as many of each run as it has.
fn redraw(runs: &[Vec<ResampleBlock>], rng: &mut BenchRng) -> ResampleBlock {
    let mut sum = ResampleBlock::default();
    for blocks in runs {
        for _ in blocks {
            let block = &blocks[rng.random_range(0..blocks.len())];
            sum.n_offered += block.n_offered;
            sum.n_good += block.n_good;
            sum.n_late.iter_mut().zip(block.n_late).for_each(|(sum, n)| *sum += n);
        }
    }
    sum
}

/// The judge's rules of attainment and percentiles, over counts.
fn passes(sum: &ResampleBlock, rule: &Rule) -> bool {
    let n = sum.n_offered as f64;
    let late = n * (1.0 - rule.percentile / 100.0) + 1e-9;
    sum.n_offered > 0
        && sum.n_good as f64 >= n * rule.attainment - 1e-9
        && sum.n_late.iter().all(|n_late| *n_late as f64 <= late)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::{End, ItemCounts};
    use std::time::Duration;

    fn slo() -> Slo {
        "ttft=500ms,tpot=50ms".parse().expect("an SLO")
    }

    /// A thousand requests at the rate, of which some come too late.
    fn tested(rate: f64, bad_of_1000: u64) -> Tested {
        let window = JudgedWindow { from: Duration::ZERO, to: Duration::from_secs_f64(1000.0 / rate) };
        let run = |seed: u64| {
            let one = |i: u64| {
                let due = Duration::from_secs_f64(i as f64 / rate);
                let bad = bad_of_1000 > 0 && (i * 7919 + seed * 31) % 1000 < bad_of_1000;
                let first = due + Duration::from_millis(if bad { 700 } else { 100 });
                Outcome {
                    index: i,
                    due,
                    sent: due,
                    tokens: vec![first, first + Duration::from_millis(20)],
                    ended: first + Duration::from_millis(20),
                    end: End::Whole,
                    items: ItemCounts::default(),
                    slo: None,
                }
            };
            ((0..1000).map(one).collect(), window)
        };
        Tested { rate, runs: (0..3).map(run).collect(), n_first: 0, void: false }
    }

    #[test]
    fn three_rules_give_three_rates() {
        let all = [tested(4.0, 300), tested(1.0, 0), tested(2.0, 0), tested(3.0, 60)];
        let found = goodput(&all, &slo(), &Rule::default());
        assert_eq!(
            (found.rate, found.fails_at, found.rate_at_90, found.vllm),
            (Some(2.0), Some(3.0), Some(3.0), Some(2.0))
        );
        // From 94 % at 3 to 70 % at 4: 90 % is a sixth of the way.
        let distserve = found.distserve.expect("a crossing");
        assert!((distserve - (3.0 + 4.0 / 24.0)).abs() < 0.01, "{distserve}");
    }

    #[test]
    fn a_rate_that_passes_above_one_that_fails_does_not_count() {
        let all = [tested(1.0, 0), tested(2.0, 50), tested(3.0, 0)];
        let found = goodput(&all, &slo(), &Rule::default());
        assert_eq!(found.rate, Some(1.0));
        assert_eq!(found.vllm, Some(3.0), "vLLM's rule does not look below");
    }

    #[test]
    fn the_interval_is_as_wide_as_the_doubt() {
        let sure = goodput(&[tested(1.0, 0), tested(2.0, 500)], &slo(), &Rule::default());
        assert_eq!(sure.interval, Some((1.0, 1.0)));
        let edge = goodput(&[tested(1.0, 0), tested(2.0, 10), tested(3.0, 500)], &slo(), &Rule::default());
        assert_eq!(edge.interval, Some((1.0, 2.0)), "1 % of bad ones is the edge itself");
    }

    #[test]
    fn counts_and_outcomes_are_judged_the_same() {
        for bad in [0, 5, 10, 11, 30, 500] {
            let tested = tested(1.0, bad);
            let blocks: Vec<_> = tested.runs.iter().map(|(o, w)| cut(o, *w, &slo())).collect();
            let mut sum = ResampleBlock::default();
            for block in blocks.iter().flatten() {
                sum.n_offered += block.n_offered;
                sum.n_good += block.n_good;
                sum.n_late.iter_mut().zip(block.n_late).for_each(|(s, n)| *s += n);
            }
            let expect = tested.judge(&slo(), &Rule::default());
            let shares = expect.findings.iter().filter(|f| !f.rule.contains("rise")).all(|f| f.passed);
            assert_eq!(passes(&sum, &Rule::default()), shares, "{bad}");
        }
    }

    #[test]
    fn goodput_is_what_was_offered_and_not_what_was_asked_for() {
        // Chance left 6.6 of the 8 requests a second that were asked for, and more than 4 of those.
        let short = Tested { rate: 8.0, ..tested(6.6, 0) };
        assert_eq!(short.offered(), 6.6);
        let more = Tested { rate: 4.0, ..tested(4.4, 0) };
        let found = goodput(&[short.clone(), more], &slo(), &Rule::default());
        assert_eq!((found.rate, found.vllm, found.distserve), (Some(6.6), Some(6.6), Some(6.6)));
        assert_eq!((found.interval, found.fails_at), (Some((6.6, 6.6)), None));
        // By what was asked for the failure would lie above both; it was offered below one of them.
        let failed = Tested { rate: 9.0, ..tested(6.0, 300) };
        let found = goodput(&[short, failed], &slo(), &Rule::default());
        assert_eq!((found.rate, found.fails_at), (None, Some(6.0)));
        let nothing = Tested { runs: Vec::new(), ..tested(3.0, 0) };
        assert_eq!(nothing.offered(), 3.0);
    }

    #[test]
    fn nothing_is_claimed_of_a_rate_with_a_void_run() {
        let void = Tested { void: true, ..tested(2.0, 0) };
        let found = goodput(&[tested(1.0, 0), void], &slo(), &Rule::default());
        assert_eq!((found.rate, found.fails_at, found.vllm), (Some(1.0), Some(2.0), Some(1.0)));
        assert_eq!(found.interval, Some((1.0, 1.0)));
    }

    #[test]
    fn nothing_tested_is_no_goodput() {
        assert_eq!(goodput(&[], &slo(), &Rule::default()), Goodput::default());
        let none = goodput(&[tested(1.0, 900)], &slo(), &Rule::default());
        assert_eq!((none.rate, none.interval, none.fails_at), (None, Some((0.0, 0.0)), Some(1.0)));
    }
}
