//! The commands and their help. Flags of several commands are in [`crate::args`].

use crate::ask::AskArgs;
use crate::bench::BenchArgs;
use crate::config::{ConfigArgs, ConfigCommandArgs, unset};
use crate::ec::EcCommandArgs;
use crate::health::HealthArgs;
use crate::keys::KeysArgs;
use crate::models::ModelsArgs;
use crate::plan::PlanArgs;
use crate::profile::ProfileArgs;
use crate::role::encoder::EncoderArgs;
use crate::role::pd::{GRAMMAR_TRIAL, PdArgs};
use crate::role::proxy::ProxyArgs;
use crate::role::store::StoreArgs;
use crate::top::TopArgs;
use crate::up::UpArgs;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use std::ffi::OsString;

const EXAMPLES: &str = "\
Examples:
  triptych up                                       a whole cluster on this machine, with the sample models
  triptych ask \"What is in this picture?\" --image scene.png
  triptych ask --audio digits.wav

`triptych COMMAND --help` has examples for each command.";

/// The version, and the commit if it is known.
const VERSION: &str = match env!("TRIPTYCH_COMMIT").is_empty() {
    true => env!("CARGO_PKG_VERSION"),
    false => concat!(env!("CARGO_PKG_VERSION"), " (", env!("TRIPTYCH_COMMIT"), ")"),
};

/// Serves multimodal and encoder-decoder models with disaggregated encode, prefill and decode.
#[derive(Debug, Parser)]
#[command(name = "triptych", version = VERSION, after_help = EXAMPLES)]
pub struct Cli {
    /// Command.
    #[command(subcommand)]
    pub command: Command,
    /// Process id of the supervisor: end when it ends.
    #[arg(long, global = true, hide = true)]
    pub supervised_by: Option<u32>,
}

impl Cli {
    /// Of a command line that the config file has completed.
    ///
    /// # Errors
    /// Clap's for one that is wrong, and its answers to `--help` and the like.
    pub fn of_completed(args: Vec<OsString>) -> Result<Self, clap::Error> {
        let command = Self::command();
        let matches = command.clone().try_get_matches_from(args)?;
        let mut cli = Self::from_arg_matches(&matches)?;
        if let Command::Up(up) = &mut cli.command {
            up.unset = unset(&command, &matches);
        }
        Ok(cli)
    }
}

/// A role's flags, and leave to check them only.
#[derive(Args, Debug)]
pub struct RoleArgs<A: Args> {
    /// The role's own.
    #[command(flatten)]
    pub role: A,
    /// Config file
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Read the settings, start nothing, and end: with 0 if the role could start with them, else with 2 and what is wrong
    #[arg(long, help_heading = "Settings")]
    pub check: bool,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a cluster on this machine: proxy, encoders, PD workers and store, watched and restarted
    #[command(after_help = UP_EXAMPLES)]
    Up(UpArgs),
    /// Ask a running cluster, with images or audio
    #[command(after_help = ASK_EXAMPLES)]
    Ask(AskArgs),
    /// Show the facts of a model directory, its stages, and the memory that they take
    #[command(after_help = MODELS_EXAMPLES)]
    Models(ModelsArgs),
    /// Inspect a store of encoder outputs, verify it, clean it up, fill it from another
    #[command(after_help = EC_EXAMPLES)]
    Ec(EcCommandArgs),
    /// Load a server, and measure its goodput
    #[command(after_help = BENCH_EXAMPLES)]
    Bench(BenchArgs),
    /// Measure what a model costs on this machine, for `triptych plan`
    #[command(after_help = PROFILE_EXAMPLES)]
    Profile(Box<ProfileArgs>),
    /// Plan how many encoders and PD workers a workload needs, or whether colocated workers are enough
    #[command(after_help = PLAN_EXAMPLES)]
    Plan(Box<PlanArgs>),
    /// Watch a running cluster: pools, queues, rates, latencies, goodput
    #[command(after_help = TOP_EXAMPLES)]
    Top(TopArgs),
    /// Make API keys
    #[command(after_help = KEYS_EXAMPLES)]
    Keys(KeysArgs),
    /// Print a config file with every key; check one; show the settings that a role would start with
    #[command(after_help = CONFIG_EXAMPLES)]
    Config(ConfigCommandArgs),
    /// Check the health of a process: a probe for images without a shell
    #[command(after_help = HEALTH_EXAMPLES)]
    Health(HealthArgs),
    /// Run the frontend alone: OpenAI's HTTP API and gRPC
    #[command(after_help = PROXY_EXAMPLES)]
    Proxy(RoleArgs<ProxyArgs>),
    /// Run one encoder worker alone
    #[command(after_help = ENCODER_EXAMPLES)]
    Encoder(RoleArgs<EncoderArgs>),
    /// Run one prefill/decode worker alone
    #[command(after_help = PD_EXAMPLES)]
    Pd(RoleArgs<PdArgs>),
    /// Run the memory store of encoder outputs alone, for the others to share
    #[command(after_help = STORE_EXAMPLES)]
    Store(RoleArgs<StoreArgs>),
    /// Try out the grammar on stdin, for a PD worker that starts this as its child
    #[command(name = GRAMMAR_TRIAL, hide = true)]
    GrammarTrial,
}

const UP_EXAMPLES: &str = "\
Examples:
  triptych up                                       the sample models, one worker of each kind
  triptych up --model ./whisper-tiny.en             a Hugging Face directory
  triptych up --model Qwen/Qwen2-VL-2B-Instruct     a model of the hub, fetched once
  triptych up --model eyes=./my-qwen2-vl --encoders 2 --pds 2 --precision bf16
  triptych up --encoders 0 --with-encoder            no encoder workers: PD workers encode
  triptych up --ec redis://127.0.0.1:6379 --http 0.0.0.0:8080

Ctrl-C lets running requests end, stops the workers and exits with 0. Requests that run for longer than
--drain-grace, and all of them at a second Ctrl-C, end with an error; it exits with 1 then.";

const ASK_EXAMPLES: &str = "\
Examples:
  triptych ask \"What is in this picture?\" --image scene.png
  triptych ask \"What is different?\" --image before.png --image after.png
  triptych ask --audio digits.wav                   transcribe speech
  triptych ask --audio speech.mp3 --translate       the same, in English
  triptych ask \"Why?\" --timeout 30s --json         for a script: one JSON object, or status 124

The answer goes to stdout as it comes; the time in each stage and where each item came from go to
stderr, and on a terminal what is waited for meanwhile.";

const MODELS_EXAMPLES: &str = "\
Examples:
  triptych models ./whisper-tiny.en                 what it is, and what each stage of it takes
  triptych models ./flan-t5-small --json            the same for a program
  triptych models ./my-qwen2-vl --measure           load each stage too, and show its memory
  triptych models                                   the sample models

An encoder worker loads the encoder's tensors only, a PD worker the decoder's only; tensors that
both read are named. KV is what a token of a sequence keeps in memory; cross-KV is what a row of
encoder output keeps there, once for all requests about the same item. Unused tensors are in the
files and read by neither stage.

Exits with 1 for a directory that cannot be served, and says why as `triptych up` would.";

const EC_EXAMPLES: &str = "\
Examples:
  triptych ec ls --ec disk:/var/lib/triptych/ec     what is there
  triptych ec show 3fa9c1 --ec shm                  one object, by the first digits of its key
  triptych ec verify --ec disk:DIR --quarantine     read everything, take out what is bad
  triptych ec gc --ec disk:DIR --older-than 7d --to-mib 4096 --dry-run
  triptych ec warm --from s3://bucket/ec --to shm   fill this host's slab";

const BENCH_EXAMPLES: &str = "\
Examples:
  triptych bench run --grpc 127.0.0.1:50051 --workload epd-short:images=2 --slo ttft=500ms,tpot=50ms
  triptych bench run --url http://127.0.0.1:8000    any OpenAI-compatible server
  triptych bench suite --model DIR --quick          clusters with the same cores, compared
  triptych bench report results/*.json --out report.html
  triptych bench report results --out report.md";

const PROFILE_EXAMPLES: &str = "\
Examples:
  triptych profile ./my-qwen2-vl --threads 1 --cores 0         a worker with one core
  triptych profile ./my-qwen2-vl --load-format dummy --threads 2 --precision bf16 -o two.json
  triptych profile tests/models/shapes-qwen2-vl --quick --rounds 2
  triptych profile --url http://gpu1:8000 -o vllm.json         a vLLM server, through its API

Run it on an idle machine: the load of other processes is measured too, and reported. The file has
the costs of a worker with so many threads for an encoder batch, an engine step, publishing and
loading an output, and the cost of the proxy. The summary goes to stdout, progress to stderr.

A server of another engine gets fresh prompts, streams side by side, and fresh images against texts of
as many tokens; nobody else may use it meanwhile. What its API does not show is named in the file.";

const PLAN_EXAMPLES: &str = "\
Examples:
  triptych profile ./my-qwen2-vl --threads 1 -o one.json        first: the costs of a worker
  triptych plan --curves one.json --workload epd-short:images=2 --slo ttft=2s,tpot=100ms \\
                --budget 8cores
  triptych plan --curves one.json --curves two.json --workload random-mm --slo ttft=1s \\
                --budget 8cores --json
  triptych plan --curves ours.json --pd-curves vllm.json --slo ttft=2s,tpot=100ms --budget 6workers
  triptych plan --curves one.json --slo ttft=2s,tpot=100ms --watch http://127.0.0.1:8080/metrics \\
                --encoders 2 --pds 2 --apply-command './scale.sh {pool} {replicas}'
  triptych plan --curves one.json --slo ttft=2s,tpot=100ms --watch http://proxy:8080/metrics \\
                --apply kubernetes:prod --encoder-deployment vl-encoder --pd-deployment vl-pd
  triptych plan --curves cog.json --slo ttft=2s,tpot=100ms --watch http://proxy:8080/metrics \\
                --apply kubernetes:prod --encoder-deployment low=cog-low,high=cog-high --pd-deployment cog-pd
  triptych plan fleets --curves one.json --slo ttft=2s,tpot=100ms --output results
  triptych plan validate --curves one.json --slo ttft=2s,tpot=100ms --model ./my-qwen2-vl

Plans are simulated with the scheduler and the router that serve; `plan validate` shows the error of
the simulation on this machine.";

const KEYS_EXAMPLES: &str = "\
Examples:
  triptych keys new --tenant acme >> keys           the key is shown, its hash goes into the file
  triptych keys new --tenant acme --models vl,asr
  triptych proxy --api-keys keys …                  requests then need `Authorization: Bearer KEY`";

const TOP_EXAMPLES: &str = "\
Examples:
  triptych top                                      the cluster of `triptych up`, every two seconds
  triptych top --admin proxy:9090 --admin-token-file token --slo ttft=500ms,tpot=50ms
  triptych top --once --json                        for a script: two looks an interval apart, one JSON object

Rates and latencies are of the time between two looks. The list of workers needs the admin API.";

const CONFIG_EXAMPLES: &str = "\
Examples:
  triptych config > triptych.toml                   every key with its help, its variable and its default
  triptych config check triptych.toml               everything that is wrong with it, at once
  triptych config show --config triptych.toml proxy --max-in-flight 64
  triptych proxy --config triptych.toml             TRIPTYCH_CONFIG=triptych.toml does the same";

const HEALTH_EXAMPLES: &str = "\
Examples:
  triptych health                                   in a container of a role: its variables say where
  triptych health --admin 127.0.0.1:7011 --ready    whether it takes work
  triptych health --grpc 10.0.0.2:7001 --ready      the same over gRPC

Exits with 0 if the process is well, and with 1 and the reason if not.";

const PROXY_EXAMPLES: &str = "\
Examples:
  triptych proxy --encoder 10.0.0.2:7001 --pd 10.0.0.3:7002 --ec grpc://10.0.0.1:7400 \\
                 --http 0.0.0.0:8080 --grpc 0.0.0.0:50051 \\
                 --tls-cert part.pem --tls-key part.key --tls-ca ca.pem --api-keys keys
  triptych proxy --encoder k8s:prod/encoders:grpc --pd dns:decoders:7002 --ec redis://10.0.0.1
  triptych proxy --discover redis://10.0.0.1 --ec redis://10.0.0.1      workers that use --register";

const ENCODER_EXAMPLES: &str = "\
Example:
  triptych encoder --model ./whisper-tiny.en --ec grpc://10.0.0.1:7400 --grpc 0.0.0.0:7001 \\
                 --tls-cert part.pem --tls-key part.key --tls-ca ca.pem";

const PD_EXAMPLES: &str = "\
Example:
  triptych pd --model ./whisper-tiny.en --ec grpc://10.0.0.1:7400 --grpc 0.0.0.0:7002 \\
                 --tls-cert part.pem --tls-key part.key --tls-ca ca.pem";

const STORE_EXAMPLES: &str = "\
Example:
  triptych store --grpc 127.0.0.1:7400              the others then use --ec grpc://127.0.0.1:7400
  triptych store --grpc 0.0.0.0:7400 --tls-cert part.pem --tls-key part.key --tls-ca ca.pem";

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_commands_are_consistent() {
        Cli::command().debug_assert();
    }
}
