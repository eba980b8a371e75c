//! One golden case: its model, and its expectations by name.

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;
use triptych_core::item::rows_from_f32;
use triptych_core::{DType, EncodedRows};
use triptych_cuda_standin::Standin;
use triptych_kernels::{CpuBackend, CpuConfig, CudaBackend, CudaConfig, Precision};
use triptych_models::{LoadFormat, Model, ModelSource};

/// Largest error of an f32 run against the reference's f32 run: of encoder rows as it is, of logits, whose
/// root mean square here is 4 to 14, in units of that. The reference's own f32 logits are up to 5e-5 such units
/// from its f64 logits (`qwen2_5_vl_window56`), so less than this would test its rounding, not ours.
const F32_TOLERANCE: f32 = 1e-4;

pub struct Case {
    pub dir: PathBuf,
    pub json: Value,
    tensors: Vec<u8>,
}

impl Case {
    pub fn open(name: &str) -> Self {
        Self::open_part(name, "expected")
    }

    /// `PART.json` and `PART.safetensors` of a case.
    pub fn open_part(name: &str, part: &str) -> Self {
        let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name);
        let read = |file: &str| {
            let path = dir.join(file);
            std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
        };
        let json = serde_json::from_slice(&read(&format!("{part}.json"))).expect("it is JSON");
        Self { json, tensors: read(&format!("{part}.safetensors")), dir }
    }

    pub fn model(&self) -> Model {
        let source = ModelSource {
            dir: self.dir.join("model"),
            name: None,
            format: LoadFormat::Safetensors,
            packed: None,
        };
        Model::open(&source).expect("a golden model opens")
    }

    /// Requests and expected tokens of the engine's matrix test.
    pub fn matrix(&self) -> Value {
        let path = self.dir.join("matrix.json");
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        serde_json::from_slice(&bytes).expect("matrix.json is JSON")
    }

    /// Shape and values of a float or u8 tensor.
    pub fn values(&self, name: &str) -> (Vec<usize>, Vec<f32>) {
        let file = SafeTensors::deserialize(&self.tensors).expect("expected.safetensors is whole");
        let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        let bytes = tensor.data();
        let values = match tensor.dtype() {
            Dtype::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Dtype::U8 => bytes.iter().map(|b| f32::from(*b)).collect(),
            other => panic!("{name} is {other:?}"),
        };
        (tensor.shape().to_vec(), values)
    }

    /// Shape and values of an i64 tensor.
    pub fn ids(&self, name: &str) -> (Vec<usize>, Vec<u32>) {
        let file = SafeTensors::deserialize(&self.tensors).expect("expected.safetensors is whole");
        let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        let words = tensor.data().as_chunks().0.iter();
        (tensor.shape().to_vec(), words.map(|b| i64::from_le_bytes(*b) as u32).collect())
    }

    /// Rows of the greedy tokens.
    pub fn greedy_tokens(&self) -> Vec<Vec<u32>> {
        let (shape, ids) = self.ids("greedy_tokens");
        ids.chunks_exact(shape[1]).map(<[u32]>::to_vec).collect()
    }
}

/// Rows of `hidden` values in f32, as [`encoded`] reads them.
pub fn stored(values: &[f32], hidden: usize) -> Arc<[u8]> {
    rows_from_f32(values, hidden, DType::F32)
}

/// Rows of `hidden` values as an encoder output has them.
pub fn encoded(bytes: &[u8], hidden: usize) -> EncodedRows<'_> {
    EncodedRows::new(DType::F32, hidden, bytes).expect("whole rows")
}

/// The CUDA back end on a device of the stand-in that no other test uses.
pub fn cuda(precision: Precision) -> CudaBackend {
    let device = Standin::fast().new_device(7);
    CudaBackend::new(CudaConfig { device, precision }).expect("a device of the stand-in")
}

/// The CPU back end on two threads and the best instruction set of this machine.
pub fn cpu(precision: Precision) -> CpuBackend {
    CpuBackend::new(CpuConfig { threads: 2, precision, ..CpuConfig::default() }).expect("a back end")
}

/// Largest absolute difference.
pub fn max_error(actual: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(actual.len(), expected.len(), "number of values");
    let worst = actual.iter().zip(expected).map(|(a, e)| (a - e).abs());
    // NaN is the worst of all; `f32::max` would drop it.
    worst.fold(0.0, |worst, e| if e.is_nan() || e > worst { e } else { worst })
}

/// Root mean square of the differences.
pub fn rms_error(actual: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(actual.len(), expected.len(), "number of values");
    let sum: f32 = actual.iter().zip(expected).map(|(a, e)| (a - e) * (a - e)).sum();
    (sum / actual.len() as f32).sqrt()
}

/// Fails unless encoder rows are those of the reference.
pub fn assert_rows_close(what: &str, actual: &[f32], expected: &[f32]) {
    assert_within(what, max_error(actual, expected), F32_TOLERANCE);
}

/// Fails unless logits are those of the reference.
pub fn assert_logits_close(what: &str, actual: &[f32], expected: &[f32]) {
    let scale = rms_error(expected, &vec![0.0; expected.len()]);
    assert_within(what, max_error(actual, expected), F32_TOLERANCE * scale);
}

/// Fails for an error over its limit, NaN included.
pub fn assert_within(what: &str, error: f32, allowed: f32) {
    println!("{what}: max error {error:.1e}, allowed {allowed:.1e}");
    assert!(error <= allowed, "{what}: max error {error}, allowed {allowed}");
}

/// Largest error of an int8 run against the reference's f32 run, both root mean squares: a value in 255 steps of its
/// row's span meets weights in 127 of their output's, layer after layer. These models are narrow and their weights
/// random, so errors average out less than in one that was trained: 0.02 to 0.075 here up to the logits, whose own layer
/// and the keys and values in bytes make it 0.11. Which way values near a half go then decides: with other last digits in the
/// exponential of attention, 1e-5 of a weight, single cases move by a third, up to 0.20, and all of them by 0.03 in the mean.
const INT8_TOLERANCE: f32 = 0.25;

/// Fails unless an int8 run is near `exact`.
pub fn assert_int8_close(what: &str, actual: &[f32], exact: &[f32]) {
    let error = rms_error(actual, exact);
    let scale = rms_error(exact, &vec![0.0; exact.len()]);
    println!("{what}: rms error {:.1e} of rms", error / scale);
    assert!(error <= INT8_TOLERANCE * scale, "{what}: rms error {error}, rms {scale}");
}

/// Largest error of the median row of an int8 run of a decoder with experts, and of all of them.
///
/// Where two experts are about as good for a token, rounding decides which one it goes to, and its row is another function's from
/// there on. That is right, and it is few rows: the median row meets no such choice, and is as near as without experts.
const ROUTED_INT8_TOLERANCES: [f32; 2] = [0.1, 0.3];

/// Fails unless an int8 run of a decoder with experts, in rows of `width` values, is near `exact`.
pub fn assert_routed_int8_close(what: &str, actual: &[f32], exact: &[f32], width: usize) {
    let relative =
        |actual: &[f32], exact: &[f32]| rms_error(actual, exact) / rms_error(exact, &vec![0.0; exact.len()]);
    let rows = actual.chunks_exact(width).zip(exact.chunks_exact(width));
    let mut errors: Vec<f32> = rows.map(|(actual, exact)| relative(actual, exact)).collect();
    errors.sort_by(f32::total_cmp);
    let [median, whole] = [errors[errors.len() / 2], relative(actual, exact)];
    println!("{what}: rms error {whole:.1e} of rms, of the median row {median:.1e}, of rows {errors:.2?}");
    let [of_median, of_all] = ROUTED_INT8_TOLERANCES;
    assert!(median <= of_median && whole <= of_all, "{what}: {whole} of rms, of the median row {median}");
}

/// The same of decoders with weights in four bits: a value in 16 steps of the span of 32. Random weights are as likely large
/// as small, the worst that such steps can meet: 0.27 to 0.47 here.
const INT4_TOLERANCE: f32 = 0.6;

/// Fails unless an int4 run is near `exact`, and farther from it than in more bits.
pub fn assert_int4_close(what: &str, actual: &[f32], exact: &[f32]) {
    let error = rms_error(actual, exact);
    let scale = rms_error(exact, &vec![0.0; exact.len()]);
    println!("{what}: rms error {:.1e} of rms", error / scale);
    assert!(error <= INT4_TOLERANCE * scale, "{what}: rms error {error}, rms {scale}");
    assert!(error > 0.01 * scale, "{what}: so small an error is not one of four bits");
}

/// Largest error of a bf16 run, in errors of the reference's.
///
/// Two right runs round at different places, so their errors agree in size only: 0.6 in the mean of all cases, and in one of them 0.8
/// to 2.1 as the last digits in the exponential of attention are chosen, 1e-5 of a weight.
const BF16_TOLERANCE: f32 = 2.5;

/// Fails unless a bf16 run is about as near to `exact` as the reference's own bf16 run.
pub fn assert_bf16_close(what: &str, actual: &[f32], exact: &[f32], reference_bf16: &[f32]) {
    let own = rms_error(actual, exact);
    let reference = rms_error(reference_bf16, exact);
    println!("{what}: rms error {own:.1e}, of the reference's bf16 {reference:.1e}");
    assert!(
        own <= BF16_TOLERANCE * reference,
        "{what}: rms error {own}, of the reference's bf16 {reference}"
    );
}

/// The tests that every module of cases has, on each back end: of its `matches_reference` in f32, and of its
/// `bf16_is_as_near_as_the_references`.
macro_rules! tests_on_every_back_end {
    () => {
        #[test]
        fn reference_matches() {
            matches_reference(&triptych_kernels::reference::ReferenceBackend::new());
        }

        #[test]
        fn cpu_matches() {
            matches_reference(&crate::case::cpu(triptych_kernels::Precision::F32));
        }

        #[test]
        fn cuda_matches() {
            matches_reference(&crate::case::cuda(triptych_kernels::Precision::F32));
        }

        #[test]
        fn cpu_in_bf16_is_as_near_as_the_references() {
            bf16_is_as_near_as_the_references(&crate::case::cpu(triptych_kernels::Precision::Bf16));
        }

        #[test]
        fn cuda_in_bf16_is_as_near_as_the_references() {
            bf16_is_as_near_as_the_references(&crate::case::cuda(triptych_kernels::Precision::Bf16));
        }
    };
}

pub(crate) use tests_on_every_back_end;

/// Every third case from the `first`. The stand-in takes some hundred times as long as a device, and the three shapes of a family
/// stand one after the other: each family is run, f32 and bf16 by different shapes.
pub fn every_third<'a>(cases: &[&'a str], first: usize) -> Vec<&'a str> {
    let (first, step) = if triptych_cuda_standin::device().is_some() { (0, 1) } else { (first, 3) };
    cases.iter().skip(first).step_by(step).copied().collect()
}

/// [`tests_on_every_back_end`] for modules of many `CASES`, a third of them on the stand-in; all of them by name of the suite.
macro_rules! tests_of_many_cases {
    () => {
        #[test]
        fn reference_matches() {
            matches_reference(&CASES, &triptych_kernels::reference::ReferenceBackend::new());
        }

        #[test]
        fn cpu_matches() {
            matches_reference(&CASES, &crate::case::cpu(triptych_kernels::Precision::F32));
        }

        #[test]
        fn cuda_matches() {
            let cases = crate::case::every_third(&CASES, 0);
            matches_reference(&cases, &crate::case::cuda(triptych_kernels::Precision::F32));
        }

        #[test]
        fn cpu_in_bf16_is_as_near_as_the_references() {
            bf16_is_as_near_as_the_references(&CASES, &crate::case::cpu(triptych_kernels::Precision::Bf16));
        }

        #[test]
        fn cuda_in_bf16_is_as_near_as_the_references() {
            let cases = crate::case::every_third(&CASES, 1);
            bf16_is_as_near_as_the_references(&cases, &crate::case::cuda(triptych_kernels::Precision::Bf16));
        }

        #[test]
        #[ignore = "minutes: `cargo xtask test models-cuda`"]
        fn every_case_matches_on_cuda() {
            matches_reference(&CASES, &crate::case::cuda(triptych_kernels::Precision::F32));
            bf16_is_as_near_as_the_references(&CASES, &crate::case::cuda(triptych_kernels::Precision::Bf16));
        }
    };
}

pub(crate) use tests_of_many_cases;
