//! Times of forwards and engine steps in a timeline, measured (`--trace-file`) or simulated, by what they hold.

use crate::curves::Stage;
use crate::simulator::result::Span;
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;
use triptych_core::TowerIdx;

/// Fewest spans of a size, in each of the two timelines, by which its times are compared.
const LEAST_SPANS: usize = 5;
/// Two steps less apart than this follow one another: the engine had more to do.
const FOLLOWING: Duration = Duration::from_millis(2);

/// Work that has a factor of its own, or a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Work {
    /// Forwards of encoders.
    Encode,
    /// Engine steps with prompt tokens.
    Prefill,
    /// Engine steps without.
    Decode,
    /// From a step to the one that follows it.
    Between,
}

/// Times of spans by work and size; sizes are powers of two: of items, prompt tokens, and sequences.
#[derive(Debug, Default, PartialEq)]
pub(super) struct WallTimes(BTreeMap<(Work, u32), Times>);

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Times {
    seconds: f64,
    n: usize,
}

impl WallTimes {
    /// Of spans; a forward's is without the engine steps of its worker that ran between its chunks.
    pub(super) fn of(spans: &[Span]) -> Self {
        let mut steps: HashMap<usize, Vec<(Duration, Duration)>> = HashMap::new();
        for span in spans.iter().filter(|span| matches!(span.stage, Stage::Prefill | Stage::Decode)) {
            steps.entry(span.worker).or_default().push((span.began, span.ended));
        }
        steps.values_mut().for_each(|steps| steps.sort_unstable());
        let mut times = Self::default();
        for gap in gaps(&steps, spans) {
            times.add((Work::Between, 1), gap);
        }
        for span in spans {
            let n = span.n as u64;
            let (work, size, within) = match span.stage {
                Stage::Preprocess(_) => continue,
                Stage::Encode(_) => {
                    let within = steps.get(&span.worker).map_or(Duration::ZERO, |steps| overlap(steps, span));
                    (Work::Encode, n, within)
                }
                Stage::Prefill | Stage::Decode => match span.tokens.saturating_sub(n) {
                    0 => (Work::Decode, n, Duration::ZERO),
                    n_prompt => (Work::Prefill, n_prompt, Duration::ZERO),
                },
            };
            times.add((work, size), (span.ended - span.began).saturating_sub(within));
        }
        times
    }

    fn add(&mut self, (work, size): (Work, u64), took: Duration) {
        let of_size = self.0.entry((work, size.max(1).ilog2())).or_default();
        of_size.seconds += took.as_secs_f64();
        of_size.n += 1;
    }

    /// Time of this work over that of as much in another timeline; `None`: too little of it is in both.
    pub(super) fn over(&self, other: &Self, work: Work) -> Option<f64> {
        let (mut own, mut others) = (0.0, 0.0);
        for (size, times) in self.0.range((work, 0)..=(work, u32::MAX)) {
            let Some(of_other) = other.0.get(size) else { continue };
            if times.n.min(of_other.n) >= LEAST_SPANS {
                own += times.seconds;
                others += of_other.seconds / of_other.n as f64 * times.n as f64;
            }
        }
        (own > 0.0 && others > 0.0).then(|| own / others)
    }

    /// Mean time of this work less that in another timeline, in microseconds; `None`: too little of it is in either.
    pub(super) fn less_us(&self, other: &Self, work: Work) -> Option<f64> {
        let mean_us = |times: &Self| {
            let of_work = times.0.range((work, 0)..=(work, u32::MAX));
            let (s, n) = of_work.fold((0.0, 0), |(s, n), (_, times)| (s + times.seconds, n + times.n));
            (n >= LEAST_SPANS).then(|| s * 1e6 / n as f64)
        };
        Some(mean_us(self)? - mean_us(other)?)
    }
}

/// Times between steps of a worker that follow one another, while no encoder's forward is under way there: that computes between
/// them.
fn gaps(steps: &HashMap<usize, Vec<(Duration, Duration)>>, spans: &[Span]) -> Vec<Duration> {
    let mut found = Vec::new();
    for (worker, steps) in steps {
        let is_own = |span: &&Span| span.worker == *worker && matches!(span.stage, Stage::Encode(_));
        let forwards: Vec<&Span> = spans.iter().filter(is_own).collect();
        for ((_, ended), (began, _)) in steps.iter().zip(steps.iter().skip(1)) {
            let gap = began.saturating_sub(*ended);
            if gap < FOLLOWING && !forwards.iter().any(|f| f.began < *began && f.ended > *ended) {
                found.push(gap);
            }
        }
    }
    found
}

/// Part of a span in which steps ran; they are in order and do not overlap.
fn overlap(steps: &[(Duration, Duration)], span: &Span) -> Duration {
    let first = steps.partition_point(|(_, ended)| *ended <= span.began);
    let inside = steps[first..].iter().take_while(|(began, _)| *began < span.ended);
    inside.map(|(began, ended)| (*ended).min(span.ended) - (*began).max(span.began)).sum()
}

/// A line of a trace file, as far as spans of compute go.
#[derive(Deserialize)]
struct Event {
    ph: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    pid: u64,
    #[serde(default)]
    tid: u64,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: Sizes,
}

#[derive(Clone, Copy, Default, Deserialize)]
struct Sizes {
    sequences: Option<usize>,
    items: Option<usize>,
    tokens: Option<u64>,
}

/// Spans of forwards and steps that began within a time after 1970, from the text of a trace file; lines that are no events are
/// passed over. A step has the sizes of the forward within it, and one without a forward computed nothing.
pub(super) fn spans(text: &str, within: std::ops::Range<Duration>) -> Vec<Span> {
    let events =
        text.lines().filter_map(|line| serde_json::from_str::<Event>(line.trim_end_matches(',')).ok());
    let mut spans = Vec::new();
    // Of each thread: forwards of an engine since its last step. Spans are in the order of their ends.
    let mut forwards: HashMap<(u64, u64), Sizes> = HashMap::new();
    for event in events.filter(|event| event.ph == "X") {
        let tokens = event.args.tokens.unwrap_or(0);
        let (stage, n, tokens) = match (event.name.as_str(), event.args.items, event.args.sequences) {
            ("forward", Some(items), _) => (Stage::Encode(TowerIdx(0)), items, tokens),
            ("forward", None, Some(_)) => {
                forwards.insert((event.pid, event.tid), event.args);
                continue;
            }
            ("step", ..) => {
                let Some(sizes) = forwards.remove(&(event.pid, event.tid)) else { continue };
                let (n, tokens) = (sizes.sequences.unwrap_or(0), sizes.tokens.unwrap_or(0));
                (if tokens > n as u64 { Stage::Prefill } else { Stage::Decode }, n, tokens)
            }
            _ => continue,
        };
        let began = micros(event.ts);
        if within.contains(&began) {
            let worker = usize::try_from(event.pid).unwrap_or(usize::MAX);
            spans.push(Span { worker, stage, began, ended: began + micros(event.dur), n, tokens });
        }
    }
    spans
}

fn micros(us: f64) -> Duration {
    Duration::try_from_secs_f64(us / 1e6).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"[
{"ph":"M","name":"process_name","pid":7,"args":{"name":"pd"}},
{"ph":"X","cat":"compute","name":"forward","pid":7,"tid":1,"ts":500.0,"dur":100.0,"args":{"sequences":1,"tokens":16}},
{"ph":"X","cat":"compute","name":"forward","pid":7,"tid":2,"ts":1010.0,"dur":3000.0,"args":{"sequences":2,"tokens":77}},
{"ph":"X","cat":"compute","name":"sample","pid":7,"tid":2,"ts":4010.0,"dur":10.0,"args":{}},
{"ph":"X","cat":"compute","name":"step","pid":7,"tid":2,"ts":1000.0,"dur":4000.0,"args":{}},
{"ph":"X","cat":"compute","name":"step","pid":7,"tid":2,"ts":5100.0,"dur":5.0,"args":{}},
{"ph":"b","cat":"request","name":"forward","id2":{"local":"0x1"},"pid":7,"tid":0,"ts":1.0,"args":{"n_tokens":144}},
{"ph":"X","cat":"compute","name":"forward","pid":7,"tid":2,"ts":6010.0,"dur":900.0,"args":{"sequences":2,"tokens":2}},
{"ph":"X","cat":"compute","name":"step","pid":7,"tid":2,"ts":6000.0,"dur":1000.0,"args":{}},
{"ph":"X","cat":"compute","name":"forward","pid":7,"tid":3,"ts":4000.0,"dur":8000.0,"args":{"items":1,"tokens":144}},
{"ph":"X","cat":"compute","name":"forward","pid":7,"tid":3,"ts":9000000.0,"dur":8000.0,"args":{"items":1,"tokens":144}},
{"ph":"X","cat":"comp"#;

    #[test]
    fn spans_of_a_trace_file_have_the_sizes_of_their_forwards() {
        let found = spans(TEXT, Duration::from_millis(1)..Duration::from_secs(1));
        let sizes: Vec<_> = found.iter().map(|span| (span.stage, span.n, span.tokens)).collect();
        let encode = Stage::Encode(TowerIdx(0));
        assert_eq!(sizes, [(Stage::Prefill, 2, 77), (Stage::Decode, 2, 2), (encode, 1, 144)]);
        assert_eq!((found[0].began, found[0].ended), (Duration::from_millis(1), Duration::from_millis(5)));
    }

    #[test]
    fn steps_between_the_chunks_of_a_forward_are_not_its_time() {
        let found = spans(TEXT, Duration::ZERO..Duration::from_secs(1));
        let times = WallTimes::of(&found);
        let ms = |work, size| times.0.get(&(work, size)).map(|times| (times.seconds * 1e6).round() / 1e3);
        // 8 ms, less the last of the first step and all of the second.
        assert_eq!(ms(Work::Encode, 0), Some(6.0));
        assert_eq!(ms(Work::Prefill, 6), Some(4.0));
        assert_eq!(ms(Work::Decode, 1), Some(1.0));
    }

    #[test]
    fn steps_that_follow_one_another_have_a_time_between_them() {
        let span = |stage, began: u64, ended: u64| Span {
            worker: 0,
            stage,
            began: Duration::from_micros(began),
            ended: Duration::from_micros(ended),
            n: 1,
            tokens: 1,
        };
        let step = |began, ended| span(Stage::Decode, began, ended);
        let elsewhere = Span { worker: 1, ..span(Stage::Encode(TowerIdx(0)), 0, 90_000) };
        let forward = span(Stage::Encode(TowerIdx(0)), 20_100, 30_000);
        // 50 µs and 70 µs; 5 ms of rest; the last ones have a part of a forward between them.
        let steps =
            [(1000, 2000), (2050, 3000), (3070, 4000), (9000, 9500), (20_000, 20_080), (20_200, 20_300)];
        let mut spans: Vec<_> = steps.into_iter().map(|(began, ended)| step(began, ended)).collect();
        spans.extend([elsewhere, forward]);
        let found = WallTimes::of(&spans);
        let between = found.0[&(Work::Between, 0)];
        assert_eq!((between.n, (between.seconds * 1e6).round()), (2, 120.0));
        assert_eq!(found.less_us(&found, Work::Between), None, "too few");
        let often =
            |us| WallTimes::of(&(0..9).map(|i| step(i * 500, i * 500 + 500 - us)).collect::<Vec<_>>());
        let less_us = often(60).less_us(&often(20), Work::Between).expect("enough");
        assert!((less_us - 40.0).abs() < 1e-6, "{less_us}");
    }

    #[test]
    fn work_is_compared_by_size() {
        let steps = |sizes: &[(u64, u64)]| {
            let span = |(tokens, ms): &(u64, u64)| Span {
                worker: 0,
                stage: Stage::Prefill,
                began: Duration::ZERO,
                ended: Duration::from_millis(*ms),
                n: 0,
                tokens: *tokens,
            };
            WallTimes::of(&sizes.iter().cycle().take(sizes.len() * LEAST_SPANS).map(span).collect::<Vec<_>>())
        };
        // Long prompts take twice the time, and there are more of them.
        let (real, made) =
            (steps(&[(300, 20), (400, 20), (20, 1)]), steps(&[(300, 10), (20, 1), (20, 1), (1, 5)]));
        let ratio = real.over(&made, Work::Prefill).expect("both have prompts");
        assert!((ratio - 41.0 / 21.0).abs() < 1e-9, "{ratio}");
        assert_eq!(real.over(&made, Work::Decode), None);
    }
}
