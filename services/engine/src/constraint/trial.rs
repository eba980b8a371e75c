//! A compilation tried out, in a process whose death is cheap: the job that it reads, and what it finds.
//!
//! A grammar that is compiled cannot be handed from one process to another, so the trial answers a question instead:
//! does this constraint, for this vocabulary, compile and give masks within the limits of its process? Compiling does
//! not depend on chance, so what passed needs as much again where it is used. Neither side here starts a process or
//! sets a limit.

use super::vocabulary::Vocabulary;
use super::{CompiledConstraint, Compiler, Constraints, GrammarMatcher};
use serde_json::{Value, json};
use std::sync::Arc;
use triptych_core::sampling::Constraint;
use triptych_core::{Failure, FailureClass};

/// Stack of a thread that compiles, in bytes. It is reserved, not used, by most constraints.
pub const STACK_BYTES: usize = 64 << 20;
/// Most bytes of a job.
pub const MAX_JOB_BYTES: u64 = 256 << 20;

/// Completions that a trial follows.
const N_WALKS: u64 = 4;
/// Most tokens of each.
const N_STEPS: usize = 24;

/// A constraint, and a vocabulary to try it out with.
pub struct Trial {
    constraint: Constraint,
    compiler: Compiler,
}

/// A job on its way to a trial.
pub struct Job {
    /// The constraint, behind its length.
    pub head: Vec<u8>,
    /// The vocabulary.
    pub vocabulary: Arc<[u8]>,
}

/// Result of a trial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It compiled and gave masks.
    Fits {
        /// Memory of the compiled grammar, in bytes.
        n_bytes: u64,
    },
    /// It is no valid constraint, or exceeds a limit of the library.
    Refused(Failure),
}

impl Constraints {
    /// The job that tries out a constraint for this model.
    ///
    /// # Errors
    /// Internal: the vocabulary cannot be written down.
    pub fn trial(&self, constraint: &Constraint) -> Result<Job, Failure> {
        let wire = || Ok(self.vocabulary()?.to_wire()?.into());
        let vocabulary = self.wire.get_or_init(wire).clone()?;
        let texts: Vec<&str> = match constraint {
            Constraint::JsonObject => Vec::new(),
            Constraint::JsonSchema(text) | Constraint::Regex(text) | Constraint::Grammar(text) => vec![text],
            Constraint::Choice(choices) => choices.iter().map(String::as_str).collect(),
        };
        let text = json!([constraint.field(), texts]).to_string();
        let len = u32::try_from(text.len()).map_err(Failure::internal)?;
        Ok(Job { head: [&len.to_le_bytes(), text.as_bytes()].concat(), vocabulary })
    }
}

impl Trial {
    /// Reads a job, its head, then its vocabulary, and indexes that.
    ///
    /// # Errors
    /// Internal: it is no job.
    pub fn read(job: &[u8]) -> Result<Self, Failure> {
        let (constraint, vocabulary) =
            Self::parts(job).ok_or_else(|| Failure::internal("the job of a grammar's trial is none"))?;
        Ok(Self { constraint, compiler: Compiler::new(&vocabulary)? })
    }

    fn parts(job: &[u8]) -> Option<(Constraint, Vocabulary)> {
        let (len, rest) = job.split_first_chunk::<4>()?;
        let (text, vocabulary) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        let (field, texts): (String, Vec<String>) = serde_json::from_slice(text).ok()?;
        Some((constraint(&field, texts)?, Vocabulary::from_wire(vocabulary)?))
    }

    /// Compiles the constraint, on a thread with a stack of [`STACK_BYTES`].
    ///
    /// # Errors
    /// As [`Constraints::compile`].
    pub fn compile(&self) -> Result<CompiledConstraint, Failure> {
        self.compiler.compile(&self.constraint)
    }
}

fn constraint(field: &str, mut texts: Vec<String>) -> Option<Constraint> {
    let made = match field {
        "response_format" => Constraint::JsonObject,
        "choice" => Constraint::Choice(std::mem::take(&mut texts)),
        "json_schema" => Constraint::JsonSchema(texts.pop()?),
        "regex" => Constraint::Regex(texts.pop()?),
        "grammar" => Constraint::Grammar(texts.pop()?),
        _ => return None,
    };
    (made.field() == field && texts.is_empty()).then_some(made)
}

impl CompiledConstraint {
    /// Follows a few completions of tokens drawn from the masks, as an engine's thread would. A limit on masks ends
    /// one; it is for the request that meets it.
    pub fn walk(&self) {
        for seed in 0..N_WALKS {
            let mut matcher = GrammarMatcher::new(self.fork());
            let (mut tokens, mut draw) = (Vec::new(), seed);
            while tokens.len() < N_STEPS {
                // Numerical Recipes' linear congruential generator.
                draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let Ok(mask) = matcher.mask(&tokens) else { break };
                let Some(token) = mask.allowed_from((draw >> 33) as usize) else { break };
                tokens.push(token);
            }
        }
    }
}

impl Verdict {
    /// The verdict on one line.
    pub fn to_line(&self) -> String {
        let value = match self {
            Self::Fits { n_bytes } => json!({"fits": n_bytes}),
            Self::Refused(failure) => json!({
                "class": failure.class.as_str(), "message": failure.message,
                "param": failure.param, "detail": failure.detail,
            }),
        };
        value.to_string()
    }

    /// The verdict of a line. `None`: it is none.
    pub fn from_line(line: &str) -> Option<Self> {
        let value: Value = serde_json::from_str(line).ok()?;
        if let Some(n_bytes) = value["fits"].as_u64() {
            return Some(Self::Fits { n_bytes });
        }
        let text = |key: &str| value[key].as_str().map(str::to_owned);
        let class = FailureClass::ALL.into_iter().find(|class| value["class"] == class.as_str())?;
        let failure =
            Failure { param: text("param"), detail: text("detail"), ..Failure::new(class, text("message")?) };
        Some(Self::Refused(failure))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_survives_its_line() {
        let failure = Failure::invalid("no \"schema\"").with_param("json_schema").with_detail("a\nb");
        for verdict in [Verdict::Fits { n_bytes: 7 }, Verdict::Refused(failure)] {
            let line = verdict.to_line();
            assert_eq!(line.lines().count(), 1);
            assert_eq!(Verdict::from_line(&line), Some(verdict));
        }
        assert_eq!(Verdict::from_line("{}"), None);
    }

    #[test]
    fn what_is_no_job_is_none() {
        for job in
            [&b""[..], b"\0\0\0\0", b"\xff\xff\xff\xff[]", b"\x02\0\0\0[]\0", b"\x0c\0\0\0[\"regex\",[]]\0"]
        {
            assert!(Trial::read(job).is_err(), "{job:?}");
        }
    }
}
