//! What each stage costs on one kind of machine, as functions of what it is given: measured by `triptych profile`,
//! kept in a JSON file, read by the simulator.
//!
//! A curve is a list of measured places, so that what was measured stays visible beside what is made of it. Times are in
//! microseconds, and hold for [`CostCurves::threads`] compute threads that have their cores to themselves.

mod check;
pub mod costs;
mod file;
mod fit;
mod prompt;
pub mod sample;

pub use costs::{BatchShape, Costs, Sized, Spread, StepShape};
pub use file::CurvesError;
pub use fit::Quality;
pub use prompt::{ItemsAt, PromptSpec};

use serde::{Deserialize, Serialize};

/// The version of the file that this code writes.
pub const VERSION: u32 = 4;

/// Of one model on one kind of machine, for workers with a given number of cores.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostCurves {
    /// [`VERSION`].
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
    /// Where, when and how well it was measured.
    pub measured: Provenance,
    /// A forward of the encoder, by what is in the batch.
    pub encode: Vec<EncodePoint>,
    /// Parts of a forward, of about equal cost: between two of them an engine on the same cores may have its turn.
    #[serde(default = "one")]
    pub encode_parts: usize,
    /// Reading and resizing one item before its forward, by its size as in [`ItemPoint`]: of two items that become as many
    /// tokens, the larger takes longer.
    pub preprocess: Vec<Point>,
    /// What items become, ascending by size.
    pub items: Vec<ItemPoint>,
    /// An engine step, by what stands in it: scheduling, forward and sampling.
    pub step: Vec<StepPoint>,
    /// Publishing an encoder output, by bytes.
    pub publish: Vec<Point>,
    /// Loading one, by bytes.
    pub load: Vec<Point>,
    /// Bytes of one row of encoder output, as it is published.
    pub row_bytes: usize,
    /// What the decoder keeps.
    pub kv: KvSizes,
    /// What the model's template adds to a prompt.
    pub prompt: PromptSpec,
    /// What passing through the proxy takes.
    pub proxy: ProxyCost,
    /// What everything around the compute takes of the machine's cores.
    pub front: FrontCost,
    /// What encoder and engine do to each other when one process runs both at once on the same threads.
    pub together: Together,
}

impl CostCurves {
    /// The same of a machine whose cores take so many times as long for what they compute.
    #[must_use]
    pub fn slowed(&self, times: f64) -> Self {
        let mut slowed = self.clone();
        let encode = slowed.encode.iter_mut().map(|p| [&mut p.p50_us, &mut p.p95_us]);
        let step = slowed.step.iter_mut().map(|p| [&mut p.p50_us, &mut p.p95_us]);
        let preprocess = slowed.preprocess.iter_mut().map(|p| [&mut p.p50_us, &mut p.p95_us]);
        for us in encode.chain(step).chain(preprocess).flatten() {
            *us *= times;
        }
        slowed
    }
}

fn one() -> usize {
    1
}

/// Where a file comes from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// The processor's name.
    pub host: String,
    /// Cores of the machine.
    pub n_cores: usize,
    /// The cores that it was bound to; none: it was not.
    pub cores: Vec<usize>,
    /// Of the binary.
    pub commit: String,
    /// Seconds after 1970.
    pub at_s: u64,
    /// How many times each place was measured.
    pub rounds: usize,
    /// Part of the machine's time that went to others meanwhile, the hypervisor included: 0 is a quiet machine.
    pub busy: f64,
    /// The store that publishing and loading were measured with, without its password.
    pub store: String,
}

/// One measured place of a curve; between two places it is a straight line.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// What was given.
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

/// What an item of a size becomes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ItemPoint {
    /// Pixels of a picture, milliseconds of a sound.
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

/// What the decoder keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvSizes {
    /// Bytes of one token's keys and values, all layers.
    pub token_bytes: usize,
    /// The same of a row of encoder output that is cross-attended to; 0 for a decoder-only model.
    pub cross_row_bytes: usize,
    /// Tokens a sequence may have.
    pub max_context: usize,
}

/// What passing through the proxy takes, beside the work of others, in microseconds: what a request waits for an idle proxy,
/// and for tokens, which are passed on while others are on their way, its processor time.
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

/// Time of one core, in microseconds, that everything which is not a worker's compute takes from it where both are on the
/// same cores: client, proxy and the workers' side of the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontCost {
    /// A request, without items.
    pub request_us: f64,
    /// An item.
    pub item_us: f64,
    /// A byte of an item.
    pub item_byte_us: f64,
    /// A step that gives tokens, however many: somebody is woken.
    pub step_us: f64,
    /// Each of its tokens.
    pub token_us: f64,
}

/// How much longer each takes while the other runs, on the same threads; 1 is no longer, 2 is fair halves.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Together {
    /// An encoder forward beside engine steps.
    pub encode: f64,
    /// An engine step beside encoder forwards.
    pub step: f64,
}

/// Fair halves.
impl Default for Together {
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
