//! What each stage costs on one kind of machine, as functions of what it is given: measured by `triptych profile`,
//! kept in a JSON file, read by the simulator.

use serde::{Deserialize, Serialize};

/// Of one model on one kind of machine, for workers with a given number of cores.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CostCurves {
    /// The model's directory name.
    pub model: String,
    /// Compute threads of the worker that was measured.
    pub threads: usize,
    /// A forward of the encoder, by output tokens of the batch, in microseconds.
    pub encode: Vec<Point>,
    /// Reading and resizing one item before its forward, by output tokens, in microseconds.
    pub preprocess: Vec<Point>,
    /// An engine step, by what stands in it.
    pub step: Vec<StepPoint>,
    /// Publishing an encoder output, by bytes, in microseconds.
    pub publish: Vec<Point>,
    /// Loading one, by bytes, in microseconds.
    pub load: Vec<Point>,
    /// Bytes of one row of encoder output.
    pub row_bytes: usize,
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

/// One measured engine step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepPoint {
    /// Prompt tokens read in the step.
    pub prefill_tokens: u32,
    /// Keys and values that those tokens attend to, summed over sequences, in tokens.
    pub prefill_context: u64,
    /// Sequences that write a token in the step.
    pub decodes: u32,
    /// Keys and values that those attend to, summed, in tokens.
    pub decode_context: u64,
    /// Median time.
    pub p50_us: f64,
    /// 95th percentile.
    pub p95_us: f64,
}
