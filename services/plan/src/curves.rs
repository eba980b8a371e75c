//! Costs of each stage on one kind of machine, as functions of its input: measured by `triptych profile`,
//! stored in a JSON file, read by the simulator.
//!
//! A curve is a list of measured points, so that the measurements stay visible beside the fit. Times are in
//! microseconds, and hold for [`CostCurves::threads`] compute threads that have their cores to themselves.

mod check;
pub mod costs;
mod file;
mod fit;
mod kv;
pub mod interference;
mod joined;
mod pipelining;
mod prompt;
pub mod sample;
mod service;
mod source;
pub mod timed;
mod towers;

pub use costs::{BatchShape, Costs, EncoderCosts, Sized, Spread, StepShape};
pub use file::CurvesError;
pub use fit::Quality;
pub(crate) use fit::{FitPoint, least_squares};
pub use interference::{Interference, Stage, StageInterference, TowerInterference};
pub use joined::JoinError;
pub use kv::{KvSizes, VOCAB};
pub use pipelining::PipeliningSaves;
pub use prompt::{ItemsAt, PromptSpec};
pub use service::ServiceFactors;
pub use source::{ApiEncoders, ApiSource, Unmeasured};
pub use towers::{EncoderCurves, TowerCurves};

use serde::{Deserialize, Serialize};

/// The version of the file that this code writes.
pub const VERSION: u32 = 10;
/// The oldest version that it reads. Version 4 has no times beside neighbours, version 5 no towers, version 6 no factors of service.
pub const OLDEST_VERSION: u32 = 4;

/// Curves of one model on one kind of machine, for workers with a given number of cores.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostCurves {
    /// [`VERSION`], or an older one that can be read.
    pub version: u32,
    /// The model's directory name.
    pub model: String,
    /// `f32`, `bf16`, `int8` or `int4`.
    pub precision: String,
    /// Element type of the KV cache, if it is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_dtype: Option<String>,
    /// Compute threads of the worker that was measured.
    pub threads: usize,
    /// True if forwards and steps run on a device of their own: preprocessing then takes none of their time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub on_device: bool,
    /// Provenance of the measurement.
    pub measured: Provenance,
    /// A forward of the encoder, by what is in the batch.
    pub encode: Vec<EncodePoint>,
    /// Parts of a forward, of about equal cost: between two of them an engine on the same cores may run.
    #[serde(default = "one")]
    pub encode_parts: usize,
    /// Reading and resizing one item before its forward, by its size as in [`ItemPoint`]: of two items that become as many
    /// tokens, the larger takes longer.
    pub preprocess: Vec<Point>,
    /// Output tokens of items, ascending by size.
    pub items: Vec<ItemPoint>,
    /// An engine step, by what stands in it: scheduling, forward and sampling.
    pub step: Vec<StepPoint>,
    /// Publishing an encoder output, by bytes.
    pub publish: Vec<Point>,
    /// Loading one, by bytes.
    pub load: Vec<Point>,
    /// Bytes of one row of encoder output, as it is published.
    pub row_bytes: usize,
    /// Name of the tower that these are of, where several read the same item; empty: no other does.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub tower: String,
    /// The other towers, in the model's order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub more_towers: Vec<TowerCurves>,
    /// Sizes of the KV cache.
    pub kv: KvSizes,
    /// Template tokens of a prompt.
    pub prompt: PromptSpec,
    /// Cost of the proxy.
    pub proxy: ProxyCost,
    /// Core time of client, proxy and network.
    #[serde(rename = "frontend", alias = "front")]
    pub front: FrontCost,
    /// Slowdown of encoder and engine when one process runs both on the same threads.
    #[serde(alias = "together")]
    pub colocated: ColocationSlowdown,
    /// Stages beside neighbours on the same host; `None`: not measured, each runs as if it was alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interference: Option<Interference>,
    /// From the end of an engine step to the start of the next one, in microseconds: its outputs are given on, and commands
    /// are taken.
    #[serde(default)]
    pub between_steps_us: f64,
    /// Time that pipelining saves of a step; nothing passes between two steps then. `None`: not measured, or workers have no device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pipelining: Option<PipeliningSaves>,
    /// Factors by which the measured times are scaled to those of a cluster in service; `None`: they are as measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_service: Option<ServiceFactors>,
    /// The server of another engine that these are of; `None`: a worker of ours.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api: Option<ApiSource>,
}

impl CostCurves {
    /// Items that a worker preprocesses at once where it is not told: on its threads, or beside a device on the host's cores.
    pub fn preprocess_threads(&self) -> usize {
        if self.on_device { self.measured.n_cores.max(1) } else { self.threads }
    }

    /// Curves of a machine whose compute takes `times` as long.
    #[must_use]
    pub fn slowed(&self, times: f64) -> Self {
        let mut slowed = self.clone();
        slowed.scale_encoding(times);
        slowed.scale_steps(times, times);
        slowed
    }

    /// Scales preprocessing and forwards of all encoders.
    fn scale_encoding(&mut self, times: f64) {
        let encode = self.encode.iter_mut().map(|p| [&mut p.p50_us, &mut p.p95_us]);
        let preprocess = self.preprocess.iter_mut().map(|p| [&mut p.p50_us, &mut p.p95_us]);
        let of_towers = self.more_towers.iter_mut().flat_map(|tower| {
            let encode = tower.encode.iter_mut().map(|p| [&mut p.p50_us, &mut p.p95_us]);
            encode.chain(tower.preprocess.iter_mut().map(|p| [&mut p.p50_us, &mut p.p95_us]))
        });
        encode.chain(preprocess).chain(of_towers).flatten().for_each(|us| *us *= times);
    }

    /// Scales engine steps: those without prompt tokens or rows to project, and the others.
    fn scale_steps(&mut self, decode: f64, prefill: f64) {
        for point in &mut self.step {
            let times = if point.prefill_tokens + point.projected_rows > 0 { prefill } else { decode };
            point.p50_us *= times;
            point.p95_us *= times;
        }
    }
}

fn one() -> usize {
    1
}

/// Provenance of a file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// The processor's name.
    pub host: String,
    /// Cores of the machine.
    pub n_cores: usize,
    /// The cores that it was bound to; none: it was not.
    pub cores: Vec<usize>,
    /// Commit of the binary.
    pub commit: String,
    /// Seconds after 1970.
    pub at_s: u64,
    /// Repeats of each point.
    pub rounds: usize,
    /// Part of the machine's time that went to others meanwhile, the hypervisor included: 0 is a quiet machine.
    pub busy: f64,
    /// The store that publishing and loading were measured with, without its password.
    pub store: String,
}

/// One measured point of a curve, which is linear between two points.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Size of the input.
    pub of: f64,
    /// Median time.
    pub p50_us: f64,
    /// 95th percentile.
    pub p95_us: f64,
}

/// One measured forward of the encoder.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EncodePoint {
    /// Items in the batch.
    pub items: u32,
    /// Output tokens of all of them.
    pub tokens: u64,
    /// Squares of the items' output tokens, summed: what attention inside an item grows with.
    pub squares: u64,
    /// Median time.
    pub p50_us: f64,
    /// 95th percentile.
    pub p95_us: f64,
}

/// Sizes of an item.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ItemPoint {
    /// Pixels of an image, milliseconds of audio.
    pub size: f64,
    /// Output tokens.
    pub tokens: u32,
    /// Bytes of the file that was measured.
    pub bytes: usize,
}

/// One measured engine step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepPoint {
    /// Prompt tokens read in the step.
    pub prefill_tokens: u32,
    /// Keys that those tokens attend to, summed over the tokens: a chunk of `n` tokens after `c` that were read before
    /// adds `n * c + n * (n + 1) / 2`.
    pub prefill_context: u64,
    /// Sequences that write a token in the step.
    pub decodes: u32,
    /// Keys that those attend to, summed over the sequences.
    pub decode_context: u64,
    /// Rows of encoder outputs that are projected to cross-attention keys and values in the step; 0 for a decoder-only
    /// model. Keys of cross-attention count in the contexts like others.
    pub projected_rows: u32,
    /// Median time.
    pub p50_us: f64,
    /// 95th percentile.
    pub p95_us: f64,
}

/// Cost of the proxy, in microseconds: the latency that an idle proxy adds to a request,
/// and its processor time for tokens, which are passed on while others are under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProxyCost {
    /// A request, without items.
    pub request_us: f64,
    /// An item: its key, probe, lease and job.
    pub item_us: f64,
    /// A byte of an item.
    pub item_byte_us: f64,
    /// An output token that is passed on.
    pub token_us: f64,
}

/// Processor time, in microseconds, of everything which is not a worker's compute and may be on the same cores: client, proxy and
/// the workers' side of the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontCost {
    /// A request, without items.
    pub request_us: f64,
    /// An item.
    pub item_us: f64,
    /// A byte of an item.
    pub item_byte_us: f64,
    /// A step that gives tokens, however many, sent or held: the tasks of its requests are woken. Of versions before 8 it is in
    /// `write_us`.
    #[serde(default)]
    pub wake_us: f64,
    /// Messages of tokens that leave together, however many: a connection is written to, and whoever reads it is woken.
    #[serde(alias = "step_us")]
    pub write_us: f64,
    /// Each of these messages.
    #[serde(alias = "token_us")]
    pub message_us: f64,
    /// Part of this time that is taken from cores that compute while another core is free, from 0 to 1.
    #[serde(default)]
    pub misplaced: f64,
}

/// Factor on the time of each while the other runs on the same threads; 1: no slowdown, 2: fair halves. Of several towers the
/// first one's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ColocationSlowdown {
    /// An encoder forward beside engine steps.
    pub encode: f64,
    /// An engine step beside encoder forwards.
    pub step: f64,
}

/// Fair halves.
impl Default for ColocationSlowdown {
    fn default() -> Self {
        Self { encode: 2.0, step: 2.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::sample::curves;

    #[test]
    fn a_slower_machine_computes_longer_and_moves_bytes_as_before() {
        let (curves, slowed) = (curves(), curves().slowed(1.5));
        assert_eq!(slowed.encode[0].p50_us, curves.encode[0].p50_us * 1.5);
        assert_eq!(slowed.step[0].p95_us, curves.step[0].p95_us * 1.5);
        assert_eq!(slowed.preprocess[0].p50_us, curves.preprocess[0].p50_us * 1.5);
        assert_eq!((slowed.load, slowed.publish), (curves.load, curves.publish));
    }
}
