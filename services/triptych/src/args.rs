//! Flags that several commands share, and the same flags written down again for child processes.
//!
//! Every flag of a role can also come from a `TRIPTYCH_*` variable; a flag wins over its variable.
//!
//! One file over 600 lines: a group of flags stands beside the words of its values and its way to a child.

pub mod api;
pub mod auth;
pub mod bounds;
pub mod cores;
pub mod tls;
pub mod discovery;
pub mod drain;
pub mod encoder_weights;
pub mod engine;
pub mod graphs;
pub mod limits;
pub mod lora;
pub mod memory;
pub mod model_updates;
pub mod operator;
pub mod rows;
pub mod timed;
pub mod watchdog;

use crate::ec_choice::{Others, Surroundings, check, choose};
use crate::ec_meters::TierMeters;
use crate::error::{CliError, chain};
use clap::builder::FalseyValueParser;
use clap::{Args, ValueEnum};
use graphs::EncoderGraphArgs;
use rows::RowArgs;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use timed::TimedArg;
use tls::TlsArgs;
use triptych_core::limits::Limits;
use triptych_core::prompt::ToolSyntax;
use triptych_core::{DType, RowTypes};
use triptych_ec::breaker::BreakerTuning;
use triptych_ec::limit::Bounds;
use triptych_ec::retry::RetryPolicy;
use triptych_ec::{Access, EcError, EcSetting, EcStore, OpenOptions, Scope};
use triptych_kernels::{Isa, Precision};
use triptych_models::LoadFormat;
use triptych_models::compute::{ComputeConfig, Device};
use triptych_proxy::fetch::{AllowRule, FetchPolicy, NotARule, Reach};
use triptych_runtime::grpc::Dialer;
use triptych_runtime::telemetry::TelemetryConfig;
use triptych_runtime::timeline::Rotation;
use triptych_runtime::{Drain, MetricsRegistry, trace_context};

/// Flags of logs and traces.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Logs and traces")]
pub struct LogArgs {
    /// Log filter, as in `info,triptych_engine=debug`. Traces and the timeline are whole whatever it says
    #[arg(long, value_name = "FILTER", env = "TRIPTYCH_LOG", default_value = "info,h2=warn,hyper=warn")]
    pub log: String,
    /// Log one JSON object a line
    #[arg(long, env = "TRIPTYCH_LOG_JSON", value_parser = FalseyValueParser::new())]
    pub log_json: bool,
    /// Export spans to this OTLP/gRPC collector, as in `http://127.0.0.1:4317`
    #[arg(long, value_name = "URL", env = "TRIPTYCH_OTLP")]
    pub otlp: Option<String>,
    /// Append a timeline to this file, for `https://ui.perfetto.dev`: what the threads that compute do, and the stages of
    /// every request. Processes of one machine may share a file, and those of `up` do
    #[arg(long, value_name = "FILE", env = "TRIPTYCH_TRACE_FILE")]
    pub trace_file: Option<PathBuf>,
    /// Size above which the timeline is renamed to FILE.1 and begins anew; 0: never
    #[arg(long, value_name = "MIB", env = "TRIPTYCH_TRACE_FILE_MIB", default_value_t = 128,
          value_parser = clap::value_parser!(u64).range(..=1 << 30))]
    pub trace_file_mib: u64,
    /// Renamed timelines that are kept, FILE.1 the youngest
    #[arg(long, value_name = "N", env = "TRIPTYCH_TRACE_FILES", default_value_t = 4,
          value_parser = clap::value_parser!(u32).range(..=1000))]
    pub trace_files: u32,
}

impl LogArgs {
    /// Settings of `runtime::telemetry`.
    pub fn telemetry(&self, role: &str) -> TelemetryConfig {
        TelemetryConfig {
            role: role.to_owned(),
            filter: self.log.clone(),
            json: self.log_json,
            otlp_endpoint: self.otlp.clone(),
            timeline: self.trace_file.clone(),
            rotation: Rotation { max_bytes: self.trace_file_mib << 20, keep: self.trace_files as usize },
        }
    }

    /// The flags, for a child.
    pub fn to_flags(&self) -> Vec<OsString> {
        let mut flags: Vec<OsString> = vec!["--log".into(), self.log.clone().into()];
        if self.log_json {
            flags.push("--log-json".into());
        }
        if let Some(url) = &self.otlp {
            flags.extend(["--otlp".into(), url.into()]);
        }
        if let Some(file) = &self.trace_file {
            let (mib, files) = (self.trace_file_mib.to_string(), self.trace_files.to_string());
            flags.extend(["--trace-file".into(), file.into()]);
            flags.extend(["--trace-file-mib".into(), mib.into(), "--trace-files".into(), files.into()]);
        }
        flags
    }
}

/// Error of a role without a model.
pub const NO_MODEL: &str = "no model to serve; name one with --model DIR";

/// Flags of the models and of computation.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Models")]
pub struct ModelArgs {
    /// A Hugging Face directory, a model id of the hub, or `sample:NAME` for one that this binary carries; repeat, or
    /// part by commas, for several models. `NAME=` sets the name that clients use
    #[arg(
        long = "model",
        value_name = "[NAME=]DIR_OR_HUB_ID",
        env = "TRIPTYCH_MODEL",
        value_delimiter = ','
    )]
    pub models: Vec<String>,
    /// Computation
    #[command(flatten)]
    pub compute: ComputeArgs,
    /// Format of encoder outputs
    #[command(flatten)]
    pub rows: RowArgs,
    /// Encoder graphs
    #[command(flatten)]
    pub graphs: EncoderGraphArgs,
}

impl ModelArgs {
    /// Checks the flags without opening the models.
    ///
    /// # Errors
    /// [`CliError::Setting`] if there is none.
    pub fn check(&self) -> Result<(), CliError> {
        match self.models.is_empty() {
            true => Err(CliError::Setting(NO_MODEL.into())),
            false => Ok(()),
        }
    }

    /// Element types in which encoder outputs travel; encoders and PD workers must agree on them.
    pub fn row_types(&self) -> RowTypes {
        self.rows.types(self.compute.encoder_dtype())
    }
}

/// Flags of computation.
#[derive(Args, Clone, Debug)]
pub struct ComputeArgs {
    /// Source of the weights; `dummy` makes random ones from the configuration, for benchmarks
    #[arg(long, value_name = "FORMAT", env = "TRIPTYCH_LOAD_FORMAT", default_value = "safetensors")]
    pub load_format: LoadFormatArg,
    /// Element type of weights, KV cache and encoder outputs. int8 is of linear layers and KV; outputs are then bf16. int4
    /// is of the decoder's linear layers; all else is then as with int8, encoders too
    #[arg(long, value_name = "TYPE", env = "TRIPTYCH_PRECISION", default_value = "f32")]
    pub precision: PrecisionArg,
    /// Element type of the KV cache. Default: that of --precision, or int8 where that is int4
    #[arg(long, value_name = "TYPE", env = "TRIPTYCH_KV_CACHE_DTYPE")]
    pub kv_cache_dtype: Option<KvDtypeArg>,
    /// Device to compute on: cpu; cuda or cuda:N for a GPU; auto: the first GPU where there is one with a driver, else the CPU
    #[arg(long, value_name = "DEVICE", env = "TRIPTYCH_DEVICE", default_value = "auto", value_parser = Device::named)]
    pub device: Device,
    /// Compute threads of each worker on the CPU; 0: one for each core
    #[arg(long, value_name = "N", env = "TRIPTYCH_THREADS", default_value_t = 0)]
    pub threads: usize,
    /// Instruction set to compute with, as avx2 on a machine that has AVX-512, so that unlike machines compute alike. Default:
    /// the fastest that the machine has
    #[arg(long, value_name = "SET", env = "TRIPTYCH_INSTRUCTION_SET", value_parser = Isa::named)]
    pub instruction_set: Option<Isa>,
    /// Disk space for int8 and int4 weights as they were packed at a start, in triptych/packed under XDG_CACHE_HOME or
    /// ~/.cache: the next start with the same files and settings reads those. 0 keeps none
    #[arg(long, value_name = "MIB", env = "TRIPTYCH_PACKED_MIB", default_value_t = 16 << 10)]
    pub packed_mib: u64,
    /// Compute nothing, and take the time of forwards from this file of cost curves: for measuring everything else. Answers
    /// mean nothing
    #[arg(long, value_name = "FILE", hide = true, value_parser = TimedArg::read)]
    pub timed_by: Option<TimedArg>,
}

/// `--tool-parser`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum ToolParserArg {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen.
    Hermes,
    /// `{"name": …, "parameters": …}`, after `<|python_tag|>` or bare: Llama 3.
    #[value(name = "llama3_json")]
    Llama3Json,
    /// `[TOOL_CALLS]` and a list, or names with `[ARGS]`: Mistral.
    Mistral,
    /// `<function=NAME>` and `<parameter=KEY>` within `<tool_call>`: Qwen3-Coder.
    #[value(name = "qwen3_coder")]
    Qwen3Coder,
    /// `<arg_key>` and `<arg_value>` within `<tool_call>`: GLM-4.5 and later.
    #[value(name = "glm45")]
    Glm45,
}

impl From<ToolParserArg> for ToolSyntax {
    fn from(arg: ToolParserArg) -> Self {
        match arg {
            ToolParserArg::Hermes => Self::Hermes,
            ToolParserArg::Llama3Json => Self::Llama3Json,
            ToolParserArg::Mistral => Self::Mistral,
            ToolParserArg::Qwen3Coder => Self::Qwen3Coder,
            ToolParserArg::Glm45 => Self::Glm45,
        }
    }
}

/// `--load-format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LoadFormatArg {
    /// The directory's weight files: safetensors, or else `pytorch_model.bin`.
    Safetensors,
    /// Random numbers.
    Dummy,
}

impl From<LoadFormatArg> for LoadFormat {
    fn from(arg: LoadFormatArg) -> Self {
        match arg {
            LoadFormatArg::Safetensors => Self::Safetensors,
            LoadFormatArg::Dummy => Self::Dummy { seed: 0 },
        }
    }
}

/// `--precision`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PrecisionArg {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    Bf16,
    /// Bytes with scales, quantized as they are loaded or written: of weights the linear layers, all else bfloat16.
    Int8,
    /// Four bits with a scale for each 32, of the decoder's linear layers but its logits: the least memory, and the most
    /// tokens a second for few sequences; it costs the most accuracy.
    Int4,
}

/// `--kv-cache-dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvDtypeArg {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    Bf16,
    /// Bytes, with a scale for each head of a token.
    Int8,
}

impl From<KvDtypeArg> for Precision {
    fn from(arg: KvDtypeArg) -> Self {
        match arg {
            KvDtypeArg::F32 => Self::F32,
            KvDtypeArg::Bf16 => Self::Bf16,
            KvDtypeArg::Int8 => Self::Int8,
        }
    }
}

impl From<PrecisionArg> for Precision {
    fn from(arg: PrecisionArg) -> Self {
        match arg {
            PrecisionArg::F32 => Self::F32,
            PrecisionArg::Bf16 => Self::Bf16,
            PrecisionArg::Int8 => Self::Int8,
            PrecisionArg::Int4 => Self::Int4,
        }
    }
}

impl ComputeArgs {
    /// Settings of `models::compute`.
    pub fn config(&self) -> ComputeConfig {
        ComputeConfig {
            threads: self.threads,
            precision: self.precision.into(),
            kv: self.kv_cache_dtype.map(Precision::from),
            isa: self.instruction_set,
            device: self.device,
            timed: self.timed_by.as_ref().map(|timed| timed.forwards),
        }
    }

    /// Element type of encoder outputs where nothing else is said.
    pub const fn encoder_dtype(&self) -> DType {
        match self.precision {
            PrecisionArg::F32 => DType::F32,
            PrecisionArg::Bf16 | PrecisionArg::Int8 | PrecisionArg::Int4 => DType::Bf16,
        }
    }

    /// The flags, for a child.
    pub fn to_flags(&self) -> Vec<OsString> {
        let mut flags = vec![
            "--load-format".into(),
            name_of(self.load_format).into(),
            "--precision".into(),
            name_of(self.precision).into(),
            "--threads".into(),
            self.threads.to_string().into(),
            "--packed-mib".into(),
            self.packed_mib.to_string().into(),
            "--device".into(),
            self.device.to_string().into(),
        ];
        if let Some(dtype) = self.kv_cache_dtype {
            flags.extend(["--kv-cache-dtype".into(), name_of(dtype).into()]);
        }
        if let Some(set) = self.instruction_set {
            flags.extend(["--instruction-set".into(), set.as_str().into()]);
        }
        if let Some(timed) = &self.timed_by {
            flags.extend(["--timed-by".into(), timed.file.clone().into()]);
        }
        flags
    }
}

/// Flags of items by URL.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Items by URL")]
pub struct FetchArgs {
    /// Allowed destinations of URLs: those allowed by name, public addresses too, or private ones too
    #[arg(long, value_name = "REACH", env = "TRIPTYCH_FETCH", default_value = "public")]
    pub fetch: ReachArg,
    /// A host, `*.` and a host, or a network that URLs may lead to in any case; repeat for several
    #[arg(long, value_name = "HOST_OR_NETWORK", env = "TRIPTYCH_FETCH_ALLOW", value_delimiter = ',',
          value_parser = checked_rule)]
    pub fetch_allow: Vec<String>,
}

/// `--fetch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReachArg {
    /// Destinations allowed by name.
    Listed,
    /// Public addresses.
    Public,
    /// Private addresses too.
    Private,
}

/// The text of a rule, so that it can be written down again for a child.
fn checked_rule(text: &str) -> Result<String, NotARule> {
    text.parse::<AllowRule>().map(|_| text.to_owned())
}

impl FetchArgs {
    /// Settings of the fetcher.
    pub fn policy(&self) -> FetchPolicy {
        let reach = match self.fetch {
            ReachArg::Listed => Reach::Listed,
            ReachArg::Public => Reach::Public,
            ReachArg::Private => Reach::Private,
        };
        // Each text was checked when it was read.
        let allow = self.fetch_allow.iter().filter_map(|text| text.parse().ok()).collect();
        FetchPolicy { reach, allow, ..FetchPolicy::default() }
    }

    /// The flags, for a child.
    pub fn to_flags(&self) -> Vec<OsString> {
        let mut flags = vec!["--fetch".into(), name_of(self.fetch).into()];
        for rule in &self.fetch_allow {
            flags.extend(["--fetch-allow".into(), rule.into()]);
        }
        flags
    }
}

/// A value as it is written on a command line.
pub fn name_of(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned())
}

/// `--ec`: the setting as it was written, since only that text has the password, and its meaning.
#[derive(Clone)]
pub struct EcArg {
    /// The text of the setting, which may hold a password. Never print it.
    pub text: String,
    /// The parsed setting.
    pub setting: EcSetting,
}

impl FromStr for EcArg {
    type Err = EcError;

    fn from_str(text: &str) -> Result<Self, EcError> {
        Ok(Self { text: text.to_owned(), setting: text.parse()? })
    }
}

impl fmt::Debug for EcArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.setting.fmt(f)
    }
}

/// The variable of `--ec`. Children get the setting through it, since a command line is everybody's to read.
pub const EC_VARIABLE: &str = "TRIPTYCH_EC";

/// The store that the parts of a cluster share.
#[derive(Args, Clone, Debug)]
pub struct EcArgs {
    /// Store of encoder outputs: `shm` for one host, `disk:DIR`, `redis://…`,
    /// `grpc://HOST:PORT` of a `triptych store`, `memory[:MIB]`;
    /// repeat for tiers, the fastest first. Default: chosen from where this runs, and shown at the start
    #[arg(long = "ec", value_name = "STORE", env = EC_VARIABLE, hide_env_values = true)]
    stores: Vec<EcArg>,
}

impl EcArgs {
    /// The given tiers as one setting; `None` without any.
    ///
    /// # Errors
    /// [`CliError::Setting`] for tiers that cannot be combined.
    pub fn given(&self) -> Result<Option<EcArg>, CliError> {
        let texts: Vec<&str> = self.stores.iter().map(|arg| arg.text.as_str()).collect();
        if texts.is_empty() {
            return Ok(None);
        }
        let joined = texts.join(" ").parse::<EcArg>();
        joined.map(Some).map_err(|e| CliError::Setting(chain(&e)))
    }

    /// Opens the store for an operator's tool: as it is, and the one that a role on this host would choose.
    ///
    /// # Errors
    /// Those of [`Self::open_for_role`], and for a store that is not there.
    pub async fn open_over(
        &self,
        dialer: &Dialer,
        limits: &Limits,
        access: Access,
    ) -> Result<Arc<dyn EcStore>, CliError> {
        let setting = self.setting(&Surroundings::look(Others::Here))?;
        let dial = Some(dialer.as_fn());
        let with = OpenOptions { limits: limits.clone(), dial, access, ..OpenOptions::default() };
        triptych_ec::open_with(&setting, &with).await.map_err(|e| not_opened(&e))
    }

    /// Opens the store of a role, or one that is chosen; store processes are reached by `dialer`.
    ///
    /// # Errors
    /// [`CliError::Setting`] for a store that the other processes cannot see, or that cannot be opened.
    pub async fn open_for_role(
        &self,
        dialer: &Dialer,
        limits: &Limits,
        others: Others,
        metrics: &MetricsRegistry,
    ) -> Result<Arc<dyn EcStore>, CliError> {
        let setting = self.setting(&Surroundings::look(others))?;
        if setting.scope() == Scope::Host && !matches!(others, Others::Here | Others::None) {
            tracing::warn!(%setting, "other hosts see this store only if it lies on a mount that all of them have");
        }
        let opening = OpenOptions {
            limits: limits.clone(),
            dial: Some(dialer.as_fn()),
            observer: Some(Arc::new(TierMeters::new(metrics))),
            bounds: Some(Bounds::default()),
            breaker: Some(BreakerTuning::default()),
            trace: Some(trace_context::injected),
            retry: Some(RetryPolicy::default()),
            ..OpenOptions::default()
        };
        triptych_ec::open_with(&setting, &opening).await.map_err(|e| CliError::Setting(chain(&e)))
    }

    /// Checks the setting of a role without opening the store.
    ///
    /// # Errors
    /// [`CliError::Setting`] for a store that the other processes cannot see.
    pub fn check(&self, others: Others) -> Result<(), CliError> {
        self.setting(&Surroundings::look(others)).map(|_| ())
    }

    /// The store that was given or else is chosen, if others can see it.
    fn setting(&self, around: &Surroundings) -> Result<EcSetting, CliError> {
        let setting = match self.given()? {
            Some(given) => given.setting,
            None => chosen(around)?,
        };
        check(&setting, around).map_err(|e| CliError::Setting(e.to_string()))?;
        if setting.scope() == Scope::Process && around.others != Others::None {
            return Err(CliError::Setting(
                "--ec memory would be this process's alone; run `triptych store` and give its address here, \
                 as in --ec grpc://127.0.0.1:7400"
                    .into(),
            ));
        }
        Ok(setting)
    }
}

/// The store of a command that is no part of the cluster.
#[derive(Args, Clone, Debug)]
pub struct OperatorEcArgs {
    /// The store.
    #[command(flatten)]
    ec: EcArgs,
    /// TLS towards store processes.
    #[command(flatten)]
    tls: TlsArgs,
}

impl OperatorEcArgs {
    /// Opens a store that is there.
    ///
    /// # Errors
    /// Those of [`EcArgs::open_over`], and for TLS files that cannot be used.
    pub async fn open(&self, limits: &Limits, access: Access) -> Result<Arc<dyn EcStore>, CliError> {
        self.ec.open_over(&self.tls.links(&Drain::new())?.dialer(), limits, access).await
    }

    /// Opens the store, or the default store of a cluster on this host alone, and returns its name, without passwords. That this
    /// runs in a container changes nothing: all users of the store here are in it too.
    ///
    /// # Errors
    /// Those of [`Self::open`], but for a store that is not there: it is made.
    pub async fn open_alone(&self, limits: &Limits) -> Result<(Arc<dyn EcStore>, String), CliError> {
        let around = Surroundings { kubernetes: false, container: false, ..Surroundings::look(Others::Here) };
        let setting = self.ec.setting(&around)?;
        let dialer = self.tls.links(&Drain::new())?.dialer();
        let with =
            OpenOptions { limits: limits.clone(), dial: Some(dialer.as_fn()), ..OpenOptions::default() };
        let store = triptych_ec::open_with(&setting, &with).await;
        Ok((store.map_err(|e| CliError::Setting(chain(&e)))?, setting.to_string()))
    }
}

/// A store that an operator's tool cannot open; a missing one with where to find the right one.
pub fn not_opened(e: &EcError) -> CliError {
    CliError::Setting(match e {
        EcError::NoStore { .. } => {
            format!("{}; --ec names another, and `triptych up` prints where its own is", chain(e))
        }
        e => chain(e),
    })
}

/// The store that goes with where this process runs.
fn chosen(around: &Surroundings) -> Result<EcSetting, CliError> {
    let choice = choose(around).map_err(|e| CliError::Setting(e.to_string()))?;
    tracing::info!(store = choice.setting, why = choice.why, "no store is set; this one was chosen");
    choice.setting.parse().map_err(|e: EcError| CliError::Setting(chain(&e)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Flags {
        #[command(flatten)]
        log: LogArgs,
        #[command(flatten)]
        compute: ComputeArgs,
        #[command(flatten)]
        fetch: FetchArgs,
    }

    #[test]
    fn flags_written_for_a_child_read_back_the_same() {
        let args = "x --log debug --log-json --otlp http://h:1 --trace-file t.json --trace-file-mib 9 --trace-files 2 --precision bf16 --instruction-set portable --fetch listed --fetch-allow a.b,::1/128";
        let first = Flags::parse_from(args.split(' '));
        let child = [first.log.to_flags(), first.compute.to_flags(), first.fetch.to_flags()].concat();
        let second = Flags::parse_from(std::iter::once(OsString::from("x")).chain(child));
        assert_eq!(format!("{first:?}"), format!("{second:?}"));
        assert_eq!(second.compute.encoder_dtype(), DType::Bf16);
        assert_eq!(second.fetch.policy().allow.len(), 2);
    }

    #[test]
    fn the_store_setting_keeps_its_password_for_children_and_shows_it_to_nobody() {
        let arg: EcArg = "redis://:s3cret@h:6379".parse().unwrap();
        assert!(arg.text.contains("s3cret"));
        assert!(!format!("{arg:?}").contains("s3cret"));
    }

    #[test]
    fn stores_named_one_by_one_or_in_one_text_are_tiers() {
        #[derive(Parser)]
        struct Flags {
            #[command(flatten)]
            ec: EcArgs,
        }
        let given = |line: &[&str]| Flags::parse_from([&["x"], line].concat()).ec.given().unwrap().unwrap();
        let (repeated, joined) =
            (given(&["--ec", "memory:9", "--ec", "grpc://h:1"]), given(&["--ec", "memory:9 grpc://h:1"]));
        assert_eq!(repeated.text, joined.text);
        assert_eq!(repeated.setting.to_string(), "memory:9 grpc://h:1");
        assert!(Flags::parse_from(["x"]).ec.given().unwrap().is_none());
    }
}
