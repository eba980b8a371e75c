//! N-grams that a completion may not repeat: the tokens that followed earlier places of its last `n - 1` tokens.
//!
//! A rolling hash finds the places; each is compared token by token before it counts, so that the result does
//! not depend on the hash. Memory is a few words for each token, whatever `n` is. What the prompt and the
//! encoder's text contribute is built once for a request and shared by its completions and beams; a completion
//! keeps an index of its own tokens only. It knows no logits.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

/// Modulus of the hash, the Mersenne prime 2⁶¹ − 1.
const PRIME: u64 = (1 << 61) - 1;

/// Base of the hash. Drawn once for a process, so that no client can choose tokens whose hashes collide.
static BASE: LazyLock<u64> = LazyLock::new(|| rand::random::<u64>() % (PRIME - 1000) + 500);

/// Product modulo [`PRIME`] of two numbers below it.
fn multiply(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    reduce((product & u128::from(PRIME)) as u64 + (product >> 61) as u64)
}

/// A number below twice [`PRIME`], modulo it.
fn reduce(value: u64) -> u64 {
    if value >= PRIME { value - PRIME } else { value }
}

/// Hash of a text with one more token.
fn extend(hash: u64, token: u32) -> u64 {
    reduce(multiply(hash, *BASE) + u64::from(token) + 1)
}

/// [`BASE`] to a power, in O(log n).
fn power(mut exponent: usize) -> u64 {
    let (mut square, mut result) = (*BASE, 1);
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = multiply(result, square);
        }
        square = multiply(square, square);
        exponent >>= 1;
    }
    result
}

/// Length of the run of tokens before the last of an n-gram, and [`BASE`] to that power.
#[derive(Clone, Copy, Debug)]
struct Run {
    len: usize,
    power: u64,
}

impl Run {
    /// That of n-grams of `size` tokens; `None` for 0, which is off.
    fn of(size: u32) -> Option<Self> {
        let len = (size as usize).checked_sub(1)?;
        Some(Self { len, power: power(len) })
    }

    /// Hash of the run that ends at `place`, if so many tokens come before it.
    fn hash(&self, prefixes: impl Fn(usize) -> u64, place: usize) -> Option<u64> {
        let start = place.checked_sub(self.len)?;
        Some(reduce(prefixes(place) + PRIME - multiply(prefixes(start), self.power)))
    }
}

/// Tokens with the hash of each prefix.
#[derive(Debug)]
struct HashedText {
    tokens: Arc<[u32]>,
    /// `[tokens.len() + 1]`; the first is that of no tokens.
    prefixes: Vec<u64>,
}

impl HashedText {
    fn new(tokens: Arc<[u32]>) -> Self {
        let mut prefixes = Vec::with_capacity(tokens.len() + 1);
        prefixes.push(0);
        let mut hash = 0;
        for token in tokens.iter() {
            hash = extend(hash, *token);
            prefixes.push(hash);
        }
        Self { tokens, prefixes }
    }
}

/// Places in a text by the hash of the run before them.
#[derive(Clone, Debug, Default)]
struct Places {
    /// The last place of each hash.
    latest: HashMap<u64, usize>,
    /// For each place, the one before it of the same hash.
    earlier: Vec<Option<usize>>,
}

impl Places {
    /// Appends a place; without a hash it is never found.
    fn push(&mut self, place: usize, hash: Option<u64>) {
        self.earlier.push(hash.and_then(|hash| self.latest.insert(hash, place)));
    }

    /// Takes back the last place, which was pushed with `hash`.
    fn pop(&mut self, hash: Option<u64>) {
        let earlier = self.earlier.pop().flatten();
        let Some(hash) = hash else { return };
        match earlier {
            Some(place) => self.latest.insert(hash, place),
            None => self.latest.remove(&hash),
        };
    }

    /// The places of a hash, the last first. `first`: the place that was pushed first.
    fn of(&self, hash: u64, first: usize) -> impl Iterator<Item = usize> {
        std::iter::successors(self.latest.get(&hash).copied(), move |place| self.earlier[*place - first])
    }
}

/// N-grams of the prompt and of the encoder's text, the same for all completions of a request.
#[derive(Debug)]
pub struct PromptNgrams {
    prompt: HashedText,
    /// For n-grams of prompt and completion: the places within the prompt.
    own: Option<(Run, Places)>,
    /// For n-grams of the encoder's text: its places.
    encoder: Option<(Run, HashedText, Places)>,
}

impl PromptNgrams {
    /// `sizes`: tokens of the n-grams of prompt and completion, and of those of the encoder's text; 0 is off.
    pub fn new(prompt: &[u32], encoder: &[u32], sizes: [u32; 2]) -> Self {
        let prompt = HashedText::new(prompt.into());
        let own = Run::of(sizes[0]).map(|run| (run, places(&run, &prompt)));
        let encoder = Run::of(sizes[1]).map(|run| {
            let text = HashedText::new(encoder.into());
            let places = places(&run, &text);
            (run, text, places)
        });
        Self { prompt, own, encoder }
    }
}

/// All places of a text.
fn places(run: &Run, text: &HashedText) -> Places {
    let mut places = Places::default();
    for place in 0..text.tokens.len() {
        places.push(place, run.hash(|i| text.prefixes[i], place));
    }
    places
}

/// N-grams of one completion, which grows and shrinks at its end.
#[derive(Clone, Debug)]
pub struct Ngrams {
    shared: Arc<PromptNgrams>,
    written: Vec<u32>,
    /// Hash of the prompt and each prefix of the completion that is not empty.
    prefixes: Vec<u64>,
    /// The places within the completion.
    places: Places,
}

impl Ngrams {
    /// An empty completion.
    pub fn new(shared: Arc<PromptNgrams>) -> Self {
        Self { shared, written: Vec::new(), prefixes: Vec::new(), places: Places::default() }
    }

    /// Appends a token of the completion.
    pub fn push(&mut self, token: u32) {
        let place = self.len();
        if let Some((run, _)) = &self.shared.own {
            let hash = run.hash(|i| self.prefix(i), place);
            self.places.push(place, hash);
        }
        self.prefixes.push(extend(self.prefix(place), token));
        self.written.push(token);
    }

    /// Takes back the last token of the completion.
    pub fn pop(&mut self) {
        if self.written.pop().is_none() {
            return;
        }
        self.prefixes.pop();
        if let Some((run, _)) = &self.shared.own {
            let hash = run.hash(|i| self.prefix(i), self.len());
            self.places.pop(hash);
        }
    }

    /// Calls `forbid` with each token below `vocab` that would complete an n-gram that was there before, once.
    ///
    /// Linear in the places of the last `n - 1` tokens; a token that was found already, or past the vocabulary, costs no
    /// comparison.
    pub fn forbidden(&self, vocab: usize, mut forbid: impl FnMut(u32)) {
        let hash_of = |run: &Run| run.hash(|i| self.prefix(i), self.len());
        let mut found = TokenSet::new(vocab);
        let mut forbid = |run: &Run, next: u32, before: &dyn Fn(usize) -> u32| {
            if found.may_add(next) && self.ends_with(run, before) {
                found.add(next);
                forbid(next);
            }
        };
        if let Some((run, in_prompt)) = &self.shared.own
            && let Some(hash) = hash_of(run)
        {
            let n_prompt = self.shared.prompt.tokens.len();
            for place in self.places.of(hash, n_prompt).chain(in_prompt.of(hash, 0)) {
                forbid(run, self.token(place), &|i| self.token(place - run.len + i));
            }
        }
        if let Some((run, text, places)) = &self.shared.encoder
            && let Some(hash) = hash_of(run)
        {
            for place in places.of(hash, 0) {
                forbid(run, text.tokens[place], &|i| text.tokens[place - run.len + i]);
            }
        }
    }

    /// True if the last tokens are those of a run.
    fn ends_with(&self, run: &Run, token: &dyn Fn(usize) -> u32) -> bool {
        let start = self.len() - run.len;
        (0..run.len).rev().all(|i| self.token(start + i) == token(i))
    }

    /// Tokens of prompt and completion.
    fn len(&self) -> usize {
        self.shared.prompt.tokens.len() + self.written.len()
    }

    fn token(&self, i: usize) -> u32 {
        let prompt = &self.shared.prompt.tokens;
        prompt.get(i).copied().unwrap_or_else(|| self.written[i - prompt.len()])
    }

    /// Hash of the first `n` tokens of prompt and completion.
    fn prefix(&self, n: usize) -> u64 {
        let prompt = &self.shared.prompt.prefixes;
        prompt.get(n).copied().unwrap_or_else(|| self.prefixes[n - prompt.len()])
    }
}

/// A set of tokens, a bit for each; without memory until the first is looked for.
struct TokenSet {
    vocab: usize,
    words: Vec<u64>,
}

impl TokenSet {
    fn new(vocab: usize) -> Self {
        Self { vocab, words: Vec::new() }
    }

    /// True for a token of the vocabulary that is not there.
    fn may_add(&mut self, token: u32) -> bool {
        if self.words.is_empty() {
            self.words = vec![0; self.vocab.div_ceil(64)];
        }
        let token = token as usize;
        token < self.vocab && self.words[token / 64] >> (token % 64) & 1 == 0
    }

    fn add(&mut self, token: u32) {
        if let Some(word) = self.words.get_mut(token as usize / 64) {
            *word |= 1 << (token % 64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn banned(ngrams: &Ngrams) -> BTreeSet<u32> {
        let mut banned = BTreeSet::new();
        ngrams.forbidden(4, |token| assert!(banned.insert(token), "{token} twice"));
        banned
    }

    /// Reference: every n-gram of `text` whose first tokens are the last of `tokens`.
    fn plainly(text: &[u32], tokens: &[u32], size: u32) -> BTreeSet<u32> {
        let size = size as usize;
        if size == 0 || tokens.len() + 1 < size {
            return BTreeSet::new();
        }
        let last = &tokens[tokens.len() + 1 - size..];
        let repeated = text.windows(size).filter(|ngram| ngram.starts_with(last));
        repeated.map(|ngram| ngram[size - 1]).collect()
    }

    proptest! {
        #[test]
        fn what_is_ruled_out_is_that_of_a_plain_search(
            prompt in prop::collection::vec(0u32..3, 0..12),
            encoder in prop::collection::vec(0u32..3, 0..12),
            steps in prop::collection::vec(prop::option::of(0u32..3), 0..30),
            sizes in [0u32..6, 0u32..6],
        ) {
            let mut ngrams = Ngrams::new(Arc::new(PromptNgrams::new(&prompt, &encoder, sizes)));
            let mut tokens = prompt.clone();
            for step in steps {
                match step {
                    Some(token) => {
                        ngrams.push(token);
                        tokens.push(token);
                    }
                    None => {
                        ngrams.pop();
                        tokens.truncate(prompt.len().max(tokens.len().saturating_sub(1)));
                    }
                }
                let mut expect = plainly(&tokens, &tokens, sizes[0]);
                expect.extend(plainly(&encoder, &tokens, sizes[1]));
                prop_assert_eq!(banned(&ngrams), expect);
            }
        }
    }

    #[test]
    fn a_size_past_every_text_rules_nothing_out() {
        let ngrams = Ngrams::new(Arc::new(PromptNgrams::new(&[1, 2, 1], &[1, 2], [u32::MAX, u32::MAX])));
        assert!(banned(&ngrams).is_empty());
    }
}
