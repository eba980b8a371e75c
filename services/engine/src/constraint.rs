//! Structured output: token masks that keep a completion within a grammar.
//!
//! A constraint is compiled before its request reaches the engine, on the thread that prepares requests; the
//! engine only follows it, with one mask for each token. The grammars are llguidance's
//! (<https://github.com/guidance-ai/llguidance>), over the byte strings of the model's own tokens, so that any
//! tokenization of a valid text is allowed. Compiling and masking have limits of size and work; a constraint
//! that exceeds one is refused with the limit's name. It knows no sampler and no text of the completion.

mod matcher;
mod grammar;

pub use matcher::{GrammarMatcher, TokenMask};

use llguidance::api::ParserLimits;
use llguidance::toktrie::{TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};
use std::fmt;
use std::sync::{Arc, OnceLock};
use triptych_core::Failure;
use triptych_core::sampling::Constraint;
use triptych_models::tokenization::Tokenizer;

/// Longest library message in a failure, in characters.
const MAX_MESSAGE: usize = 400;

/// Compiles constraints for one model. Cheap to share behind an `Arc`; the vocabulary is indexed at the first
/// constraint.
pub struct Constraints {
    tokenizer: Arc<Tokenizer>,
    vocab: usize,
    factory: OnceLock<Result<ParserFactory, String>>,
}

/// A constraint compiled for one model, before its first token.
#[derive(Clone)]
pub struct CompiledConstraint {
    matcher: Matcher,
    vocab: usize,
    field: &'static str,
}

impl Constraints {
    /// For a model with logits of `vocab` tokens.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab: usize) -> Self {
        Self { tokenizer, vocab, factory: OnceLock::new() }
    }

    /// Compiles a constraint. May take a fraction of a second: not for the engine's thread.
    ///
    /// # Errors
    /// Invalid: the text is no schema, expression or grammar, uses an unsupported feature, or exceeds a limit.
    pub fn compile(&self, constraint: &Constraint) -> Result<CompiledConstraint, Failure> {
        let field = constraint.field();
        let grammar = grammar::grammar(constraint, self.tokenizer.drops_first_space())?;
        let factory = self.factory.get_or_init(|| factory(&self.tokenizer, self.vocab));
        let factory = factory.as_ref().map_err(Failure::internal)?;
        let mut matcher = Matcher::new(factory.create_parser(grammar));
        // The first mask finds faults that show only in use, such as a limit on work.
        let first = matcher.compute_mask_or_eos().map_err(|e| refused(field, &e))?;
        if first.is_zero() {
            let text = "the constraint cannot be met: no token of this model may begin a completion";
            return Err(Failure::invalid(text).with_param(field));
        }
        Ok(CompiledConstraint { matcher, vocab: self.vocab, field })
    }
}

impl fmt::Debug for Constraints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraints").field("vocab", &self.vocab).finish_non_exhaustive()
    }
}

impl fmt::Debug for CompiledConstraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompiledConstraint").field("field", &self.field).finish_non_exhaustive()
    }
}

/// The library's refusal as an invalid-request failure; its text is put on one line.
fn refused(field: &'static str, error: &impl fmt::Display) -> Failure {
    let text = error.to_string();
    let line: Vec<&str> = text.split_whitespace().collect();
    let short: String = line.join(" ").chars().take(MAX_MESSAGE).collect();
    Failure::invalid(format!("{field} cannot be used: {short}")).with_param(field).with_detail(text)
}

/// Bounds on one constraint: some 40 MB of lexer states, and about ten milliseconds for a mask.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 2_000,
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 100_000,
        step_max_items: 50_000,
        max_lexer_states: 20_000,
        max_grammar_size: 200_000,
        precompute_large_lexemes: false,
        verbose_errors: false,
    }
}

fn factory(tokenizer: &Tokenizer, vocab: usize) -> Result<ParserFactory, String> {
    let env: TokEnv = Arc::new(Vocabulary::new(tokenizer, vocab)?);
    let mut factory = ParserFactory::new_simple(&env).map_err(|e| e.to_string())?;
    factory.quiet();
    *factory.limits_mut() = limits();
    Ok(factory)
}

/// Tokens of a model as byte strings. One further token stands for every end token, since the end tokens depend
/// on the request.
struct Vocabulary {
    trie: TokTrie,
}

impl Vocabulary {
    fn new(tokenizer: &Tokenizer, vocab: usize) -> Result<Self, String> {
        let end = u32::try_from(vocab).map_err(|_| format!("a vocabulary of {vocab} tokens"))?;
        // Tokens without text, such as special ones, have no bytes and are never allowed.
        let mut words: Vec<Vec<u8>> =
            (0..end).map(|id| tokenizer.token_bytes(id).unwrap_or_default()).collect();
        // Without this, the library would take the first byte of a marker for its own.
        words.iter_mut().filter(|w| w.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER)).for_each(Vec::clear);
        words.push([&[TokTrie::SPECIAL_TOKEN_MARKER][..], b"<end>"].concat());
        Ok(Self { trie: TokTrie::from(&TokRxInfo::new(end + 1, end), &words) })
    }
}

impl TokenizerEnv for Vocabulary {
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
