//! Structured output: token masks that keep a completion within a grammar.
//!
//! A constraint is compiled before its request reaches the engine; the engine only follows it, with one mask for each
//! token. The grammars are llguidance's (<https://github.com/guidance-ai/llguidance>), over the byte strings of the
//! model's own tokens, so that any tokenization of a valid text is allowed. Compiling recurses, and may take memory
//! and time out of all proportion to the text: [`limits`] refuses what is known to, [`trial`] compiles in a process
//! whose death is cheap, and only what passed there is compiled where others are served. Masks have limits on work of
//! their own. It knows no sampler, no process and no text of the completion.

mod grammar;
mod guard;
mod limits;
mod matcher;
pub mod trial;
mod vocabulary;

pub use matcher::{GrammarMatcher, TokenMask};

use guard::{guarded, refused};
use llguidance::api::ParserLimits;
use llguidance::toktrie::TokEnv;
use llguidance::{Matcher, ParserFactory};
use std::fmt;
use std::sync::{Arc, OnceLock};
use triptych_core::Failure;
use triptych_core::sampling::Constraint;
use triptych_models::tokenization::Tokenizer;
use vocabulary::Vocabulary;

/// Compiles constraints for one model. Cheap to share behind an `Arc`; the vocabulary is indexed at the first
/// constraint.
pub struct Constraints {
    tokenizer: Arc<Tokenizer>,
    n_tokens: usize,
    compiler: OnceLock<Result<Compiler, Failure>>,
    /// Vocabulary as a trial reads it.
    wire: OnceLock<Result<Arc<[u8]>, Failure>>,
}

/// A constraint compiled for one model, before its first token. Clones share the states of its lexer;
/// [`Self::fork`] shares nothing.
#[derive(Clone)]
pub struct CompiledConstraint {
    matcher: Matcher,
    vocab: usize,
    field: &'static str,
}

impl Constraints {
    /// For a model with logits of `vocab` tokens.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab: usize) -> Self {
        Self { tokenizer, n_tokens: vocab, compiler: OnceLock::new(), wire: OnceLock::new() }
    }

    /// Refuses a constraint that is known to be too costly, before anything is compiled. At most milliseconds.
    ///
    /// # Errors
    /// Invalid: the text is no JSON, or exceeds a limit, which the message names with the value.
    pub fn check(&self, constraint: &Constraint) -> Result<(), Failure> {
        grammar::grammar(constraint, false).map(drop)
    }

    /// Compiles a constraint, on a thread with a stack of [`trial::STACK_BYTES`]. May take a fraction of a second, and
    /// far more for a constraint that has not passed its [`trial`].
    ///
    /// # Errors
    /// Invalid: the text is no schema, expression or grammar, uses an unsupported feature, or exceeds a limit.
    pub fn compile(&self, constraint: &Constraint) -> Result<CompiledConstraint, Failure> {
        let made = self.compiler.get_or_init(|| self.vocabulary().and_then(|words| Compiler::new(&words)));
        made.as_ref().map_err(Clone::clone)?.compile(constraint)
    }

    fn vocabulary(&self) -> Result<Vocabulary, Failure> {
        Vocabulary::of(&self.tokenizer, self.n_tokens)
    }
}

impl CompiledConstraint {
    /// A copy with lexer states of its own: work that one request causes counts for no other.
    pub fn fork(&self) -> Self {
        Self { matcher: self.matcher.deep_clone(), ..*self }
    }
}

/// A vocabulary indexed for the library.
struct Compiler {
    factory: ParserFactory,
    n_tokens: usize,
    drops_first_space: bool,
}

impl Compiler {
    fn new(vocabulary: &Vocabulary) -> Result<Self, Failure> {
        let env: TokEnv = Arc::new(vocabulary.index()?);
        let mut factory = ParserFactory::new_simple(&env).map_err(Failure::internal)?;
        factory.quiet();
        *factory.limits_mut() = parser_limits();
        Ok(Self {
            factory,
            n_tokens: vocabulary.n_tokens(),
            drops_first_space: vocabulary.drops_first_space(),
        })
    }

    fn compile(&self, constraint: &Constraint) -> Result<CompiledConstraint, Failure> {
        let field = constraint.field();
        let grammar = grammar::grammar(constraint, self.drops_first_space)?;
        guarded(field, || {
            let mut matcher = Matcher::new(self.factory.create_parser(grammar));
            // The first mask finds faults that show only in use, such as a limit on work.
            let first = matcher.compute_mask_or_eos().map_err(|e| refused(field, &e))?;
            if first.is_zero() {
                let text = "the constraint cannot be met: no token of this model may begin a completion";
                return Err(Failure::invalid(text).with_param(field));
            }
            Ok(CompiledConstraint { matcher, vocab: self.n_tokens, field })
        })
    }
}

impl fmt::Debug for Constraints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraints").field("n_tokens", &self.n_tokens).finish_non_exhaustive()
    }
}

impl fmt::Debug for CompiledConstraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompiledConstraint").field("field", &self.field).finish_non_exhaustive()
    }
}

/// Bounds on one constraint: some 40 MB of lexer states, and about ten milliseconds for a mask.
fn parser_limits() -> ParserLimits {
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
