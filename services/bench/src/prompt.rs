//! The words of prompts: as many tokens as were asked for, without the model's tokenizer.
//!
//! A prompt is random units of an alphabet: digits, letters, or common words. What a unit costs is asked of the
//! server itself before a run, by two prompts of different lengths ([`Wording::of_probes`]); the alphabet whose units
//! come nearest to one token each is taken. Most tokenizers read a digit, or a letter after a space, as one token.
//! Random text shares no prefix with any other, so a prefix cache finds in it only what a conversation repeats.

use crate::offered::Offered;
use crate::seed::{Purpose, mix, rng};
use rand::RngExt;
use std::ops::Range;

/// Units to make prompts of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alphabet {
    /// Digits in a row.
    Digits,
    /// Letters with a space before each.
    Letters,
    /// Short words with a space before each.
    Words,
}

impl Alphabet {
    /// All alphabets, in the order of the probes.
    pub const ALL: [Self; 3] = [Self::Digits, Self::Letters, Self::Words];
}

const WORDS: [&str; 32] = [
    "the", "of", "and", "to", "in", "is", "it", "for", "on", "with", "as", "was", "at", "by", "be", "this",
    "from", "or", "one", "had", "not", "but", "what", "all", "were", "when", "we", "there", "can", "an",
    "your", "which",
];

/// Texts of a given number of tokens, for one model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wording {
    alphabet: Alphabet,
    tokens_per_unit: f64,
}

/// Token count of a text of some units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Alphabet of the text.
    pub alphabet: Alphabet,
    /// Units of text.
    pub n_units: u32,
    /// Tokens of the whole prompt.
    pub prompt_tokens: u32,
}

impl Wording {
    /// Digits of one token each, for servers that do not count prompt tokens.
    pub const DIGITS: Self = Self::exact(Alphabet::Digits);

    /// Texts of units that are one token each.
    pub const fn exact(alphabet: Alphabet) -> Self {
        Self { alphabet, tokens_per_unit: 1.0 }
    }

    /// From two probes for each alphabet that could be tried: the one nearest to a token a unit. What the template
    /// adds is the same in both, and falls out. None: no alphabet has two probes that differ.
    pub fn of_probes(probes: &[Probe]) -> Option<Self> {
        let slopes = Alphabet::ALL.into_iter().filter_map(|alphabet| {
            let mut own = probes.iter().filter(|p| p.alphabet == alphabet);
            let a = own.next()?;
            let b = own.next()?;
            let units = f64::from(b.n_units) - f64::from(a.n_units);
            let tokens_per_unit = (f64::from(b.prompt_tokens) - f64::from(a.prompt_tokens)) / units;
            let plausible = tokens_per_unit.is_finite() && tokens_per_unit > 0.05;
            plausible.then_some(Self { alphabet, tokens_per_unit })
        });
        let off = |w: &Self| w.tokens_per_unit.ln().abs();
        slopes.min_by(|a, b| off(a).total_cmp(&off(b)))
    }

    /// A text of so many tokens; the same seed and number give the same text.
    pub fn text(&self, n_tokens: u32, seed: u64, number: u64) -> String {
        units(self.alphabet, (f64::from(n_tokens) / self.tokens_per_unit).round() as u32, seed, number)
    }
}

/// A text of so many units.
pub fn units(alphabet: Alphabet, n_units: u32, seed: u64, number: u64) -> String {
    let mut rng = rng(seed, Purpose::Text, number);
    let mut text = String::with_capacity(n_units as usize * 4);
    for _ in 0..n_units {
        match alphabet {
            Alphabet::Digits => text.push(char::from(rng.random_range(b'0'..=b'9'))),
            Alphabet::Letters => {
                text.push(' ');
                text.push(char::from(rng.random_range(b'a'..=b'z')));
            }
            Alphabet::Words => {
                text.push(' ');
                text.push_str(WORDS[rng.random_range(0..WORDS.len())]);
            }
        }
    }
    text
}

/// One message of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// True for an answer of the model in an earlier turn.
    pub is_answer: bool,
    /// The request's items before its text.
    pub items: Range<usize>,
    /// Its text; may be empty.
    pub text: String,
}

/// The text of a request without a conversation: blocks that others may have too, and its own.
fn alone(offered: &Offered, wording: &Wording, seed: u64) -> String {
    let (blocks, own) = match &offered.blocks {
        Some(blocks) => blocks.within(offered.text_tokens),
        None => (Vec::new(), offered.text_tokens),
    };
    let mut text: String = blocks.into_iter().map(|(id, n)| wording.text(n, seed, mix(id))).collect();
    text += &wording.text(own, seed, mix(offered.index));
    text
}

/// The messages of a request. A conversation's earlier turns have the same texts in each later one.
pub fn messages(offered: &Offered, wording: &Wording, seed: u64) -> Vec<Message> {
    let Some(session) = &offered.session else {
        let text = alone(offered, wording, seed);
        return vec![Message { is_answer: false, items: 0..offered.items.len(), text }];
    };
    let mut messages = Vec::with_capacity(session.turns.len() * 2);
    let mut n_items = 0;
    for (k, turn) in session.turns.iter().enumerate() {
        let number = mix(mix(!session.id) ^ k as u64);
        let items = n_items..(n_items + turn.n_items as usize).min(offered.items.len());
        n_items = items.end;
        let text = wording.text(turn.text_tokens, seed, number);
        messages.push(Message { is_answer: false, items, text });
        if k + 1 < session.turns.len() {
            let text = wording.text(turn.answer_tokens, seed, mix(number));
            messages.push(Message { is_answer: true, items: n_items..n_items, text });
        }
    }
    messages
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrivals::Arrivals;
    use crate::workload::Workload;

    fn probe(alphabet: Alphabet, n_units: u32, prompt_tokens: u32) -> Probe {
        Probe { alphabet, n_units, prompt_tokens }
    }

    #[test]
    fn the_alphabet_nearest_to_a_token_a_unit_is_taken() {
        use Alphabet::*;
        // Digits in threes, letters exact, behind a template of 30.
        let probes = [
            probe(Digits, 30, 40),
            probe(Digits, 90, 60),
            probe(Letters, 30, 60),
            probe(Letters, 90, 120),
            probe(Words, 30, 75),
            probe(Words, 90, 165),
        ];
        let wording = Wording::of_probes(&probes).expect("probes");
        assert_eq!(wording, Wording { alphabet: Letters, tokens_per_unit: 1.0 });
        let thirds = Wording::of_probes(&probes[..2]).expect("probes");
        assert_eq!(thirds.text(10, 1, 1).len(), 30, "digits in threes: 30 of them are 10 tokens");
        assert_eq!(Wording::of_probes(&[]), None);
        assert_eq!(Wording::of_probes(&[probe(Digits, 5, 9), probe(Digits, 50, 9)]), None);
    }

    #[test]
    fn texts_have_their_units_and_no_common_start() {
        let a = Wording::DIGITS.text(400, 1, 1);
        let b = Wording::DIGITS.text(400, 1, 2);
        assert_eq!((a.len(), b.len()), (400, 400));
        assert!(a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count() < 8);
        assert_eq!(units(Alphabet::Letters, 7, 1, 1).split_whitespace().count(), 7);
        assert_eq!(units(Alphabet::Words, 7, 1, 1).split_whitespace().count(), 7);
    }

    #[test]
    fn a_later_turn_begins_with_the_earlier_one() {
        let workload = Workload::parse("multi-turn:turns=3,think=1s,more=1").expect("a workload");
        let all: Vec<_> = workload.requests(5.0, Arrivals::Own, 1).take(300).collect();
        let mut checked = 0;
        for later in &all {
            let session = later.session.as_ref().expect("a conversation");
            let earlier = all.iter().find(|o| {
                let other = o.session.as_ref().expect("a conversation");
                other.id == session.id && other.turns.len() + 1 == session.turns.len()
            });
            let Some(earlier) = earlier else { continue };
            let a = messages(earlier, &Wording::DIGITS, 3);
            let b = messages(later, &Wording::DIGITS, 3);
            assert_eq!(a[..], b[..a.len()]);
            assert_eq!(b.len(), a.len() + 2);
            assert!(b[a.len()].is_answer && b.last().expect("some").items.end == later.items.len());
            checked += 1;
        }
        assert!(checked > 50, "{checked}");
    }
}
