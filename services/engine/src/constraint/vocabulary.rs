//! Tokens of a model as byte strings: indexed for the grammar library, and on the way to a trial.

use llguidance::toktrie::{TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use triptych_core::Failure;
use triptych_models::tokenization::Tokenizer;

/// Most tokens of a vocabulary; token ids of the library have 24 bits beside flags.
const MAX_TOKENS: usize = 1 << 24;

/// The byte string of each token; empty for those without text, such as special ones, which are never allowed.
pub(super) struct Vocabulary {
    words: Vec<Vec<u8>>,
    drops_first_space: bool,
}

impl Vocabulary {
    /// The first `n_tokens` tokens of a model.
    pub(super) fn of(tokenizer: &Tokenizer, n_tokens: usize) -> Result<Self, Failure> {
        let end = u32::try_from(n_tokens).ok().filter(|_| n_tokens < MAX_TOKENS);
        let end = end.ok_or_else(|| Failure::internal(format!("a vocabulary of {n_tokens} tokens")))?;
        let mut words: Vec<Vec<u8>> =
            (0..end).map(|id| tokenizer.token_bytes(id).unwrap_or_default()).collect();
        // Without this, the library would take the first byte of a marker for its own.
        words.iter_mut().filter(|w| w.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER)).for_each(Vec::clear);
        Ok(Self { words, drops_first_space: tokenizer.drops_first_space() })
    }

    pub(super) fn n_tokens(&self) -> usize {
        self.words.len()
    }

    /// True if the model's texts begin with a space that is no part of them.
    pub(super) fn drops_first_space(&self) -> bool {
        self.drops_first_space
    }

    /// The index. One further token stands for every end token, since the end tokens depend on the request.
    pub(super) fn index(&self) -> Result<TokenIndex, Failure> {
        let end = u32::try_from(self.words.len()).map_err(Failure::internal)?;
        let mut words = self.words.clone();
        words.push([&[TokTrie::SPECIAL_TOKEN_MARKER][..], b"<end>"].concat());
        Ok(TokenIndex { trie: TokTrie::from(&TokRxInfo::new(end + 1, end), &words) })
    }

    /// One byte for the first space, then each word behind its length in two bytes.
    pub(super) fn to_wire(&self) -> Result<Vec<u8>, Failure> {
        let mut wire = vec![u8::from(self.drops_first_space)];
        for word in &self.words {
            let len = u16::try_from(word.len()).map_err(Failure::internal)?;
            wire.extend(len.to_le_bytes());
            wire.extend(word);
        }
        Ok(wire)
    }

    /// `None`: no vocabulary.
    pub(super) fn from_wire(wire: &[u8]) -> Option<Self> {
        let (first, mut rest) = wire.split_first()?;
        let mut words = Vec::new();
        while let Some((len, more)) = rest.split_first_chunk::<2>() {
            let (word, more) = more.split_at_checked(u16::from_le_bytes(*len).into())?;
            words.push(word.to_vec());
            rest = more;
        }
        (rest.is_empty() && words.len() < MAX_TOKENS)
            .then_some(Self { words, drops_first_space: *first == 1 })
    }
}

/// A vocabulary as the library asks for it.
pub(super) struct TokenIndex {
    trie: TokTrie,
}

impl TokenizerEnv for TokenIndex {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.greedy_tokenize(bytes)
    }

    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vocabulary_survives_the_wire_and_a_cut_one_is_none() {
        let words = vec![b"a".to_vec(), Vec::new(), vec![0xff; 300]];
        for drops_first_space in [false, true] {
            let wire = Vocabulary { words: words.clone(), drops_first_space }.to_wire().unwrap();
            let read = Vocabulary::from_wire(&wire).unwrap();
            assert_eq!((read.words, read.drops_first_space), (words.clone(), drops_first_space));
            assert!(Vocabulary::from_wire(&wire[..wire.len() - 1]).is_none());
        }
        assert!(Vocabulary::from_wire(&[]).is_none());
    }
}
