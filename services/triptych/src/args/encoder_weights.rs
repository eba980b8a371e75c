//! Flags of the encoder weights of a PD worker with encoders.

use crate::error::CliError;
use clap::{Args, ValueEnum};
use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;
use triptych_core::clock::SystemClock;
use triptych_encoder::{LazyRules, WeightsPolicy};
use triptych_pd::ColocatedEncoders;
use triptych_runtime::memory_budget::MemoryBudget;

/// Presence of encoder weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum EncoderWeights {
    /// Loaded at the start and kept.
    #[default]
    Eager,
    /// Loaded for a job or with the role of an encoder, and dropped when idle.
    Lazy,
}

/// Encoder weights of a PD worker.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Encoders")]
pub struct EncoderWeightsArgs {
    /// Encoder weights of a worker with encoders: `eager`, loaded at the start and kept; `lazy`, loaded for the first job, or when
    /// the proxy gives the worker the role of an encoder, and dropped when they are idle or memory is short
    #[arg(long, value_name = "WHEN", env = "TRIPTYCH_ENCODER_WEIGHTS", value_enum, default_value_t = EncoderWeights::Eager)]
    pub encoder_weights: EncoderWeights,
    /// Seconds without a job after which lazy encoder weights are dropped. 0: only when less than a sixteenth of the memory limit
    /// is left
    #[arg(long, value_name = "S", env = "TRIPTYCH_ENCODER_WEIGHTS_IDLE", default_value_t = 300)]
    pub encoder_weights_idle: u64,
}

impl EncoderWeightsArgs {
    /// Refuses lazy weights of encoders that are not there.
    ///
    /// # Errors
    /// [`CliError::Setting`].
    pub fn check(&self, with_encoder: bool) -> Result<(), CliError> {
        match self.encoder_weights {
            EncoderWeights::Lazy if !with_encoder => {
                let text =
                    "--encoder-weights lazy is for PD workers that hold encoders: set --with-encoder too";
                Err(CliError::Setting(text.into()))
            }
            EncoderWeights::Lazy | EncoderWeights::Eager => Ok(()),
        }
    }

    /// The policy, within a limit on memory in bytes.
    pub fn policy(&self, memory_bytes: Option<u64>) -> WeightsPolicy {
        match self.encoder_weights {
            EncoderWeights::Eager => WeightsPolicy::Eager,
            EncoderWeights::Lazy => WeightsPolicy::Lazy(LazyRules {
                idle: Some(self.encoder_weights_idle).filter(|s| *s > 0).map(Duration::from_secs),
                memory: MemoryBudget::of_process(memory_bytes),
                clock: Arc::new(SystemClock),
            }),
        }
    }

    /// The encoders in the memory of a worker that has some.
    pub const fn memory(&self) -> ColocatedEncoders {
        match self.encoder_weights {
            EncoderWeights::Eager => ColocatedEncoders::Held,
            EncoderWeights::Lazy => ColocatedEncoders::Lazy,
        }
    }

    /// The flags, for a child.
    pub fn to_flags(self) -> Vec<OsString> {
        let when = match self.encoder_weights {
            EncoderWeights::Eager => "eager",
            EncoderWeights::Lazy => "lazy",
        };
        let idle = self.encoder_weights_idle.to_string();
        ["--encoder-weights", when, "--encoder-weights-idle", &idle].map(OsString::from).to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        weights: EncoderWeightsArgs,
    }

    fn parsed(flags: &[&str]) -> EncoderWeightsArgs {
        Flags::parse_from([&["x"], flags].concat()).weights
    }

    #[test]
    fn zero_seconds_are_no_limit_and_weights_are_eager_by_default() {
        assert!(matches!(parsed(&[]).policy(None), WeightsPolicy::Eager));
        let idle = |flags: &[&str]| match parsed(flags).policy(None) {
            WeightsPolicy::Lazy(rules) => rules.idle,
            WeightsPolicy::Eager => panic!("{flags:?}"),
        };
        let lazy = ["--encoder-weights", "lazy", "--encoder-weights-idle"];
        assert_eq!(idle(&[&lazy[..], &["7"]].concat()), Some(Duration::from_secs(7)));
        assert_eq!(idle(&[&lazy[..], &["0"]].concat()), None);
        assert_eq!(idle(&lazy[..2]), Some(Duration::from_secs(300)));
    }

    #[test]
    fn lazy_weights_need_encoders() {
        let lazy = parsed(&["--encoder-weights", "lazy"]);
        assert!(lazy.check(false).unwrap_err().to_string().contains("--with-encoder"));
        assert!(lazy.check(true).is_ok() && parsed(&[]).check(false).is_ok());
    }

    #[test]
    fn a_child_has_the_setting_of_its_supervisor() {
        let given = parsed(&["--encoder-weights", "lazy", "--encoder-weights-idle", "9"]);
        let child = Flags::parse_from(std::iter::once(OsString::from("x")).chain(given.to_flags())).weights;
        assert_eq!((child.encoder_weights, child.encoder_weights_idle), (EncoderWeights::Lazy, 9));
    }
}
