//! Deltas of a choice that follow one another faster than the stream interval, merged into one message.
//!
//! Each message of a stream costs this worker, the proxy and the client a wake-up, a frame and a write; with tokens a
//! millisecond apart that is more than the tokens themselves. The idea is that of `stream_interval` in vLLM and SGLang,
//! which count tokens; here it is a time, so that slow answers are not held. Messages of all streams are due at the same ticks:
//! those of one connection share a write, and whoever reads them wakes up once.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};
use triptych_proto::v1;

/// Times at which held messages of a worker's streams are due.
#[derive(Clone, Copy, Debug)]
pub struct StreamTicks {
    start: Instant,
    interval: Duration,
}

impl StreamTicks {
    /// Ticks at an interval; zero: each delta is a message.
    pub fn new(start: Instant, interval: Duration) -> Self {
        Self { start, interval }
    }

    /// First tick after `now`.
    fn after(self, now: Instant) -> Instant {
        let since = now.saturating_duration_since(self.start).as_nanos();
        let into = since.checked_rem(self.interval.as_nanos()).unwrap_or(0);
        now + self.interval - Duration::from_nanos(u64::try_from(into).unwrap_or(0))
    }
}

/// Messages of a response stream. The first delta of a choice with text, its last one, and one that comes an interval after the
/// choice's last message are ready at once; others at the next tick.
#[derive(Debug)]
pub struct DeltaCoalescer {
    ticks: StreamTicks,
    choices: BTreeMap<u32, CoalescedChoice>,
    ready: VecDeque<v1::Delta>,
}

#[derive(Debug, Default)]
struct CoalescedChoice {
    has_text: bool,
    /// Time of the last message.
    sent: Option<Instant>,
    held: Option<Held>,
}

#[derive(Debug)]
struct Held {
    delta: v1::Delta,
    due: Instant,
}

impl DeltaCoalescer {
    /// Nothing was sent yet.
    pub fn new(ticks: StreamTicks) -> Self {
        Self { ticks, choices: BTreeMap::new(), ready: VecDeque::new() }
    }

    /// Takes in a delta.
    pub fn push(&mut self, delta: v1::Delta, now: Instant) {
        let choice = self.choices.entry(delta.choice).or_default();
        // Log-probabilities of the prompt have an offset of their own.
        let has_offset = !delta.prompt_logprobs.is_empty();
        if has_offset {
            self.ready.extend(choice.held.take().map(|held| held.delta));
        }
        let is_first = !choice.has_text;
        choice.has_text |= !delta.text.is_empty();
        let is_last = delta.finish_reason != 0;
        let held = match choice.held.take() {
            None => Held { delta, due: self.ticks.after(now) },
            Some(held) => Held { delta: merge(held.delta, delta), due: held.due },
        };
        let is_slow = |sent: Instant| now.saturating_duration_since(sent) >= self.ticks.interval;
        if is_first || is_last || has_offset || held.due <= now || choice.sent.is_none_or(is_slow) {
            choice.sent = Some(now);
            self.ready.push_back(held.delta);
        } else {
            choice.held = Some(held);
        }
    }

    /// Next message that is ready.
    pub fn pop(&mut self, now: Instant) -> Option<v1::Delta> {
        if self.ready.is_empty() {
            for choice in self.choices.values_mut() {
                if let Some(held) = choice.held.take_if(|held| held.due <= now) {
                    choice.sent = Some(now);
                    self.ready.push_back(held.delta);
                }
            }
        }
        self.ready.pop_front()
    }

    /// Time at which the next message is ready; `None`: nothing is held.
    pub fn due(&self) -> Option<Instant> {
        self.choices.values().filter_map(|choice| choice.held.as_ref()).map(|held| held.due).min()
    }

    /// Messages that are still held, when the stream ends.
    pub fn rest(&mut self) -> impl Iterator<Item = v1::Delta> {
        let held = self.choices.values_mut().filter_map(|choice| choice.held.take());
        self.ready.drain(..).chain(held.map(|held| held.delta))
    }
}

/// One delta with the output of two of the same choice.
fn merge(mut earlier: v1::Delta, later: v1::Delta) -> v1::Delta {
    earlier.text.push_str(&later.text);
    earlier.token_ids.extend(later.token_ids);
    earlier.logprobs.extend(later.logprobs);
    earlier.segments.extend(later.segments);
    earlier.finish_reason = later.finish_reason;
    earlier
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_millis(10);

    fn delta(choice: u32, token: u32, text: &str) -> v1::Delta {
        v1::Delta { choice, token_ids: vec![token], text: text.to_owned(), ..v1::Delta::default() }
    }

    fn ended(delta: v1::Delta) -> v1::Delta {
        v1::Delta { finish_reason: v1::FinishReason::Stop as i32, ..delta }
    }

    /// Choice, text and tokens of a message.
    type Message = (u32, String, Vec<u32>);

    /// A coalescer, and its clock in milliseconds.
    struct Clocked {
        coalescer: DeltaCoalescer,
        start: Instant,
    }

    impl Clocked {
        fn new(interval: Duration) -> Self {
            let start = Instant::now();
            Self { coalescer: DeltaCoalescer::new(StreamTicks::new(start, interval)), start }
        }

        fn at(&self, ms: u64) -> Instant {
            self.start + Duration::from_millis(ms)
        }

        fn push(&mut self, ms: u64, delta: v1::Delta) {
            self.coalescer.push(delta, self.at(ms));
        }

        fn messages(&mut self, ms: u64) -> Vec<Message> {
            let now = self.at(ms);
            std::iter::from_fn(|| self.coalescer.pop(now)).map(|d| (d.choice, d.text, d.token_ids)).collect()
        }

        fn due(&self) -> Option<Duration> {
            self.coalescer.due().map(|due| due.duration_since(self.start))
        }
    }

    #[test]
    fn tokens_between_two_ticks_are_one_message() {
        let mut it = Clocked::new(INTERVAL);
        it.push(4, delta(0, 1, "a"));
        assert_eq!(it.messages(4), [(0, "a".into(), vec![1])]);
        assert_eq!(it.due(), None);
        it.push(6, delta(0, 2, "b"));
        it.push(8, delta(0, 3, "c"));
        assert_eq!(it.messages(9), []);
        assert_eq!(it.due(), Some(Duration::from_millis(10)));
        assert_eq!(it.messages(10), [(0, "bc".into(), vec![2, 3])]);
        assert_eq!(it.due(), None);
        it.push(10, delta(0, 4, "d"));
        assert_eq!(it.due(), Some(Duration::from_millis(20)));
        // The end is not held, nor what was held before it.
        it.push(12, ended(delta(0, 5, "e")));
        let last: Vec<_> = std::iter::from_fn(|| it.coalescer.pop(it.at(12))).collect();
        assert_eq!(last.len(), 1);
        assert_eq!((last[0].text.as_str(), &last[0].token_ids[..]), ("de", &[4, 5][..]));
        assert_eq!(last[0].finish_reason, v1::FinishReason::Stop as i32);
        assert_eq!(it.coalescer.rest().count(), 0);
    }

    #[test]
    fn slow_tokens_and_those_before_any_text_are_not_held() {
        let mut it = Clocked::new(INTERVAL);
        // The first bytes of a character have no text.
        it.push(0, delta(0, 1, ""));
        it.push(1, delta(0, 2, "é"));
        assert_eq!(it.messages(1), [(0, String::new(), vec![1]), (0, "é".into(), vec![2])]);
        for (n, ms) in (3..).zip([11, 25, 35]) {
            it.push(ms, delta(0, n, "x"));
            assert_eq!(it.messages(ms), [(0, "x".into(), vec![n])]);
        }
    }

    #[test]
    fn choices_share_ticks_and_all_is_given_at_the_end() {
        let mut it = Clocked::new(INTERVAL);
        for (choice, ms) in [(0, 0), (1, 4)] {
            it.push(ms, delta(choice, 1, "a"));
            it.push(ms + 1, delta(choice, 2, "b"));
        }
        assert_eq!(it.messages(5).len(), 2);
        assert_eq!(it.due(), Some(Duration::from_millis(10)));
        assert_eq!(it.messages(10), [(0, "b".into(), vec![2]), (1, "b".into(), vec![2])]);
        it.push(11, delta(1, 3, "c"));
        assert_eq!(it.coalescer.rest().map(|d| d.choice).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn log_probabilities_of_the_prompt_are_messages_of_their_own() {
        let mut it = Clocked::new(INTERVAL);
        let scored = |offset| v1::Delta {
            prompt_logprobs: vec![v1::PromptToken::default()],
            prompt_offset: offset,
            ..v1::Delta::default()
        };
        it.push(0, scored(1));
        it.push(0, scored(2));
        let offsets: Vec<_> =
            std::iter::from_fn(|| it.coalescer.pop(it.at(0))).map(|d| d.prompt_offset).collect();
        assert_eq!(offsets, [1, 2]);
    }

    #[test]
    fn without_an_interval_each_delta_is_a_message() {
        let mut it = Clocked::new(Duration::ZERO);
        for token in 0..3 {
            it.push(0, delta(0, token, "x"));
        }
        assert_eq!(it.messages(0).len(), 3);
    }
}
