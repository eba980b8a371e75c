//! Flags of the engine of a PD worker.

use crate::units::{mib, size};
use clap::Args;
use std::ffi::OsString;
use std::time::Duration;
use triptych_pd::EngineSettings;

/// Flag of the TPOT SLO that a PD worker is told.
pub const TPOT_SLO: &str = "--tpot-slo";

/// Flag of the time to which it gives way.
const MAX_TPOT_SLO: &str = "--max-tpot-slo";

/// TPOT SLO of a worker that shares its cores and is told none: ten tokens a second, as DistServe asks of a chatbot with a model
/// of 13 B (<https://arxiv.org/abs/2401.09670>, table 1).
const SHARED_TPOT_SLO: Duration = Duration::from_millis(100);

/// Time to which that SLO gives way while first tokens are waited for: the pace of reading aloud, 150 words a minute of 1.3 tokens.
const SHARED_MAX_TPOT_SLO: Duration = Duration::from_millis(300);

/// Sizes of each model's engine.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Engine, for each model")]
pub struct EngineArgs {
    /// MiB of self-attention KV cache. Default: 1024; on a GPU the model's part of nine tenths of the memory that all weights
    /// leave free
    #[arg(long, value_name = "MIB", env = "TRIPTYCH_KV_MIB", value_parser = clap::value_parser!(u32).range(1..))]
    pub kv_mib: Option<u32>,
    /// MiB of cross-attention KV cache, for encoder-decoder models. Default: 1024; on a GPU half of that part
    #[arg(long, value_name = "MIB", env = "TRIPTYCH_CROSS_KV_MIB", value_parser = clap::value_parser!(u32).range(1..))]
    pub cross_kv_mib: Option<u32>,
    /// MiB of recurrent states, for models with linear attention: one of each sequence that runs, and checkpoints of prefixes.
    /// Default: 1024; on a GPU a quarter of that part
    #[arg(long, value_name = "MIB", env = "TRIPTYCH_STATE_CACHE_MIB", value_parser = clap::value_parser!(u32).range(1..))]
    pub state_cache_mib: Option<u32>,
    /// MiB of host memory for the KV of sequences that have to give way. 0: they are computed again
    #[arg(long, value_name = "MIB", env = "TRIPTYCH_HOST_KV_MIB", default_value_t = 256)]
    pub host_kv_mib: u32,
    /// Draft tokens ahead of greedy answers, from what came after the same words before. 0: none
    #[arg(long, value_name = "N", env = "TRIPTYCH_LOOKUP_TOKENS", default_value_t = 0,
          value_parser = clap::value_parser!(u32).range(..=64))]
    pub lookup_tokens: u32,
    /// Token rows of a step: less shortens the pauses that a long prompt causes, more raises throughput
    #[arg(long, value_name = "N", env = "TRIPTYCH_TOKEN_BUDGET", default_value_t = 512,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub token_budget: u32,
    /// Percent of the time in which answers go on alone while prompts are read: answers keep at least this share of their
    /// speed, prompts the rest. 0: prompts first, and answers stand nearly still meanwhile. Default: 33, where there is no
    /// --tpot-slo
    #[arg(long, value_name = "PERCENT", env = "TRIPTYCH_DECODE_SHARE", value_parser = clap::value_parser!(u8).range(..=90))]
    pub decode_share: Option<u8>,
    /// SLO of the mean time per token after the first, in milliseconds, 0 to 60000. Prompts are then read, and items
    /// encoded on a worker with encoders, as far as that delays no answer beyond it; while one is late anyway, answers have half of
    /// the time. Where workers share the cores of a host, as under `up`, decode steps wait while others encode, as far as no
    /// answer is late by it. 0: no SLO, and --decode-share alone. Default: 100 for workers on CPUs that share their
    /// cores and are told no --decode-share; else 0
    #[arg(long, value_name = "MS", env = "TRIPTYCH_TPOT_SLO", value_parser = tpot_slo)]
    pub tpot_slo: Option<Duration>,
    /// Time to which the TPOT SLO gives way while others wait to begin, in milliseconds, 0 to 60000: while a first token has been
    /// waited for longer than 20 tokens of the SLO, a further token may take a 20th of that wait, up to this. Requests that
    /// are less urgent than one that is answered do not count. 0: the SLO stays as it is. Default: 300 where --tpot-slo has its
    /// default of 100; else 0
    #[arg(long, value_name = "MS", env = "TRIPTYCH_MAX_TPOT_SLO", value_parser = tpot_slo)]
    pub max_tpot_slo: Option<Duration>,
    /// Sequences that run at once
    #[arg(long, value_name = "N", env = "TRIPTYCH_MAX_SEQUENCES", default_value_t = 64,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub max_sequences: u32,
    /// Least time between two messages of an answer that streams: tokens that come faster share a message. First and last
    /// tokens never wait. 0: a message for each step
    #[arg(long, value_name = "MS", env = "TRIPTYCH_STREAM_INTERVAL", default_value_t = 10,
          value_parser = clap::value_parser!(u16).range(..=1000))]
    pub stream_interval: u16,
    /// Tokens that a draft model proposes at once
    #[arg(long, value_name = "N", env = "TRIPTYCH_DRAFT_TOKENS", default_value_t = 4,
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub draft_tokens: u32,
    /// MiB of GPU memory for decode steps that are captured as CUDA graphs, one for each power of two of sequences and bucket of
    /// context lengths, at their first use. What finds no memory runs without a graph. 0: no graphs
    #[arg(long, value_name = "MIB", env = "TRIPTYCH_DECODE_GRAPH_MIB", default_value_t = 512)]
    pub decode_graph_mib: u32,
}

impl EngineArgs {
    /// The settings. `shares_cores`: other workers compute on the same cores.
    pub fn settings(self, shares_cores: bool) -> EngineSettings {
        let default = EngineSettings::default();
        let is_told = self.tpot_slo.is_some() || self.decode_share.is_some();
        let by_default = |slo: Duration| (shares_cores && !is_told).then_some(slo);
        let tpot_slo = self.tpot_slo.or(by_default(SHARED_TPOT_SLO));
        let max_tpot_slo = self.max_tpot_slo.or(by_default(SHARED_MAX_TPOT_SLO));
        EngineSettings {
            self_kv_bytes: self.kv_mib.map(mib),
            cross_kv_bytes: self.cross_kv_mib.map(mib),
            state_bytes: self.state_cache_mib.map(mib),
            host_kv_bytes: mib(self.host_kv_mib),
            lookup_tokens: size(self.lookup_tokens),
            token_budget: size(self.token_budget),
            decode_share: self.decode_share.unwrap_or(default.decode_share),
            tpot_slo: tpot_slo.filter(|slo| !slo.is_zero()),
            max_tpot_slo: max_tpot_slo.filter(|slo| !slo.is_zero()),
            max_sequences: size(self.max_sequences),
            stream_interval: Duration::from_millis(self.stream_interval.into()),
            draft_tokens: size(self.draft_tokens),
            graph_bytes: mib(self.decode_graph_mib),
            ..default
        }
    }

    /// The flags, for a child.
    pub fn to_flags(self) -> Vec<OsString> {
        let set = [
            ("--kv-mib", self.kv_mib),
            ("--cross-kv-mib", self.cross_kv_mib),
            ("--state-cache-mib", self.state_cache_mib),
            ("--host-kv-mib", Some(self.host_kv_mib)),
            ("--lookup-tokens", Some(self.lookup_tokens)),
            ("--token-budget", Some(self.token_budget)),
            ("--decode-share", self.decode_share.map(Into::into)),
            ("--max-sequences", Some(self.max_sequences)),
            ("--stream-interval", Some(self.stream_interval.into())),
            ("--draft-tokens", Some(self.draft_tokens)),
            ("--decode-graph-mib", Some(self.decode_graph_mib)),
        ];
        let flags =
            set.into_iter().filter_map(|(flag, value)| Some([flag.into(), value?.to_string().into()]));
        let slos = [(TPOT_SLO, self.tpot_slo), (MAX_TPOT_SLO, self.max_tpot_slo)];
        let slos = slos.into_iter().filter_map(|(flag, slo)| Some(slo_flags(flag, slo?)));
        flags.flatten().chain(slos.flatten()).collect()
    }
}

/// The flag of a TPOT SLO, for a child.
pub fn tpot_flags(slo: Duration) -> [OsString; 2] {
    slo_flags(TPOT_SLO, slo)
}

fn slo_flags(flag: &str, slo: Duration) -> [OsString; 2] {
    [flag.into(), (slo.as_secs_f64() * 1e3).to_string().into()]
}

/// Longest TPOT SLO, in milliseconds.
const MAX_TPOT_SLO_MS: f64 = 60_000.0;

fn tpot_slo(text: &str) -> Result<Duration, String> {
    let ms = text.parse::<f64>().ok().filter(|ms| (0.0..=MAX_TPOT_SLO_MS).contains(ms));
    let ms = ms.ok_or_else(|| format!("allowed are 0 to {MAX_TPOT_SLO_MS} milliseconds, as in 20 or 2.5"))?;
    Ok(Duration::from_secs_f64(ms / 1e3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        engine: EngineArgs,
    }

    fn parse(flags: impl IntoIterator<Item = OsString>) -> EngineArgs {
        Flags::parse_from(std::iter::once("x".into()).chain(flags)).engine
    }

    #[test]
    fn a_child_has_the_settings_of_its_supervisor() {
        let sizes = "--kv-mib 1 --cross-kv-mib 2 --state-cache-mib 3 --host-kv-mib 4 --lookup-tokens 5 --token-budget 6";
        let rest = "--decode-share 7 --tpot-slo 2.5 --max-tpot-slo 7.5 --max-sequences 8 --stream-interval 9 --draft-tokens 10 --decode-graph-mib 11";
        let given = || sizes.split(' ').chain(rest.split(' ')).map(OsString::from);
        let set = parse(given());
        let default = parse(std::iter::empty());
        assert_eq!(format!("{:?}", parse(set.to_flags())), format!("{set:?}"));
        assert_eq!(format!("{:?}", parse(default.to_flags())), format!("{default:?}"));
        let slos = |args: EngineArgs| {
            [false, true].map(|shares_cores| {
                let settings = args.settings(shares_cores);
                [settings.tpot_slo, settings.max_tpot_slo].map(|slo| slo.map(|slo| slo.as_secs_f64() * 1e3))
            })
        };
        let of = |flags: &str| slos(parse(flags.split_whitespace().map(OsString::from)));
        assert_eq!(slos(set), [[Some(2.5), Some(7.5)]; 2]);
        assert_eq!(slos(default), [[None; 2], [Some(100.0), Some(300.0)]]);
        assert_eq!(of("--max-tpot-slo 0"), [[None; 2], [Some(100.0), None]]);
        assert_eq!(of("--max-tpot-slo 200"), [[None, Some(200.0)], [Some(100.0), Some(200.0)]]);
        for (told, slo) in
            [("--tpot-slo 0", None), ("--decode-share 40", None), ("--tpot-slo 20", Some(20.0))]
        {
            assert_eq!(of(told), [[slo, None]; 2], "{told}");
        }
        let flags: Vec<_> = given().filter(|flag| flag.as_encoded_bytes().starts_with(b"--")).collect();
        let n_flags = <Flags as clap::CommandFactory>::command().get_arguments().count();
        assert_eq!(flags.len(), n_flags, "every flag is tried");
    }

    #[test]
    fn a_tpot_slo_is_a_time_of_a_minute_at_most() {
        for wrong in ["-1", "60001", "NaN", "inf", "soon", ""] {
            assert!(tpot_slo(wrong).is_err(), "{wrong}");
        }
        assert_eq!(tpot_slo("60000"), Ok(Duration::from_secs(60)));
    }
}
