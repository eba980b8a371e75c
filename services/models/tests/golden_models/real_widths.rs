//! Arithmetic at the widths of published models: encoder rows and logits of two layers of each kind beside transformers'.
//!
//! Weights are not stored. Their values follow from their names, here as in `tests/golden/real_widths.py`.

use crate::case::{Case, assert_bf16_close, assert_int8_close, assert_logits_close, cpu, rms_error};
use crate::greedy::{Sequence, teacher_forced};
use crate::towers::patches;
use half::bf16;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
use std::path::Path;
use tempfile::TempDir;
use triptych_core::Extent;
use triptych_kernels::{CpuBackend, Precision};
use triptych_models::LoadFormat;
use triptych_models::decoder::TransformerDecoder;
use triptych_models::encoder::{Encoder, TransformerEncoder};
use triptych_models::family::{Config, Family};
use triptych_models::preprocess::{EncoderInput, Features, TileRows};
use triptych_models::spec::{EncoderSpec, ModelSpec, StemSpec};
use triptych_models::weights::Weights;

/// Cases of the gate: one of each way of an item into a decoder, the lightest.
const LIGHT: [&str; 4] = ["whisper_large_v3", "bart_large", "glm_ocr", "smolvlm_2_2b"];

/// The rest.
const HEAVY: [&str; 15] = [
    "pegasus_large",
    "nllb_3_3b",
    "flan_t5_xl",
    "llama_3_1_8b",
    "mistral_7b",
    "qwen2_5_7b",
    "qwen3_8b",
    "gemma_2_9b",
    "qwen2_vl_7b",
    "qwen2_5_vl_7b",
    "qwen3_vl_8b",
    "llava_1_5_7b",
    "internvl3_8b",
    "gemma_3_4b",
    "pixtral_12b",
];

/// `n` values in -1..1 of SplitMix64 (<https://prng.di.unimi.it/splitmix64.c>), whose state starts with FNV-1a of the name.
fn uniform(name: &str, n: usize) -> impl Iterator<Item = f32> {
    let start = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    (1..=n as u64).map(move |i| {
        let z = start.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        2.0 * (((z ^ (z >> 31)) >> 40) as f32 / (1_u64 << 24) as f32) - 1.0
    })
}

/// Writes a weight in bf16: a matrix of variance 1 / fan-in, a scale about 1, a bias about 0.
fn write_weight(out: &mut impl Write, name: &str, shape: &[usize]) {
    let fan_in: usize = shape.iter().skip(1).product();
    let (middle, bound) = match shape.len() {
        0 | 1 if name.ends_with("bias") => (0.0, 0.0625),
        0 | 1 => (1.0, 0.125),
        _ => (0.0, (3.0 / fan_in as f64).sqrt() as f32),
    };
    for value in uniform(name, shape.iter().product()) {
        out.write_all(&bf16::from_f32(middle + value * bound).to_le_bytes()).expect("room for weights");
    }
}

/// A file of all weights of a case.
fn write_weights(dir: &Path, shapes: &BTreeMap<String, Vec<usize>>) {
    let mut header = serde_json::Map::new();
    let mut at = 0;
    for (name, shape) in shapes {
        let end = at + 2 * shape.iter().product::<usize>();
        let tensor = serde_json::json!({ "dtype": "BF16", "shape": shape, "data_offsets": [at, end] });
        header.insert(name.clone(), tensor);
        at = end;
    }
    let header = Value::Object(header).to_string();
    let file = std::fs::File::create(dir.join("model.safetensors")).expect("a file");
    let mut out = BufWriter::with_capacity(1 << 20, file);
    out.write_all(&(header.len() as u64).to_le_bytes()).expect("a length");
    out.write_all(header.as_bytes()).expect("a header");
    shapes.iter().for_each(|(name, shape)| write_weight(&mut out, name, shape));
    out.flush().expect("room for weights");
}

/// A case with its weights.
struct Wide {
    name: &'static str,
    case: Case,
    spec: ModelSpec,
    weights: Weights,
    _dir: TempDir,
}

impl Wide {
    fn open(name: &'static str) -> Self {
        let case = Case::open(&format!("real_widths/{name}"));
        let shapes = serde_json::from_value(case.json["shapes"].clone()).expect("shapes by name");
        let dir = tempfile::tempdir().expect("a temporary directory");
        write_weights(dir.path(), &shapes);
        let config = Config::new("config.json", &case.json["config"]);
        let spec = Family::of(&config).and_then(|family| family.spec(&config)).expect("a configuration");
        let weights = Weights::open(dir.path(), LoadFormat::Safetensors).expect("weights");
        Self { name, case, spec, weights, _dir: dir }
    }

    fn numbers<T: serde::de::DeserializeOwned>(&self, key: &str) -> T {
        serde_json::from_value(self.case.json[key].clone())
            .unwrap_or_else(|e| panic!("{}: {key}: {e}", self.name))
    }

    /// The item of a case.
    fn input(&self, encoder: &EncoderSpec) -> EncoderInput {
        let given = &self.case.json["input"];
        let shape =
            |key: &str| -> Vec<usize> { serde_json::from_value(given[key].clone()).expect("a shape") };
        let values = |shape: &[usize]| -> Vec<f32> {
            uniform("features", shape.iter().product()).map(|value| value * 3_f64.sqrt() as f32).collect()
        };
        if let Ok(ids) = serde_json::from_value::<Vec<u32>>(given["tokens"].clone()) {
            return EncoderInput {
                extent: Extent::Tokens,
                n_tokens: ids.len() as u32,
                features: Features::Tokens(ids),
            };
        }
        if given.get("mel").is_some() {
            let shape = shape("mel");
            return EncoderInput {
                extent: Extent::windows(1, 0),
                n_tokens: shape[1] as u32 / 2,
                features: Features::Mel(values(&shape)),
            };
        }
        let n_tokens = self.numbers::<[u32; 2]>("item")[1];
        if given.get("patches").is_some() {
            let grid = shape("grid");
            let extent = Extent::Grid { t: grid[0] as u32, h: grid[1] as u32, w: grid[2] as u32 };
            return EncoderInput { extent, n_tokens, features: Features::Patches(values(&shape("patches"))) };
        }
        let shape = shape("planes");
        let side = encoder.stem.patch_side().expect("patches");
        let extent = Extent::Grid { t: 1, h: (shape[2] / side) as u32, w: (shape[3] / side) as u32 };
        let patches = patches(&(shape.clone(), values(&shape)), encoder);
        let features = match encoder.stem {
            StemSpec::PrefixedPatches { .. } => Features::Tiles { patches, rows: TileRows::whole(n_tokens) },
            _ => Features::Patches(patches),
        };
        EncoderInput { extent, n_tokens, features }
    }

    /// Stored values of rows `[n, width]`.
    fn stored(&self, values: &[f32], width: usize, at: &str) -> Vec<f32> {
        let (rows, stride) = (self.numbers::<Vec<usize>>(at), self.numbers::<usize>("stride"));
        rows.iter().flat_map(|row| values[row * width..][..width].iter().step_by(stride)).copied().collect()
    }

    /// Encoder rows, where there are any, and logits of the prompt; as far as they are stored.
    fn run(&self, backend: &CpuBackend) -> (Option<Vec<f32>>, Vec<f32>) {
        let prompt: Vec<u32> = self.numbers("prompt");
        let mut sequence = Sequence {
            positions: (0..prompt.len() as u32).map(|i| [i; 3]).collect(),
            next_position: prompt.len() as u32,
            prompt,
            hidden: self.spec.decoder.stack.hidden,
            ..Sequence::default()
        };
        if self.case.json.get("positions").is_some() {
            let [t, h, w] = self.numbers::<[Vec<u32>; 3]>("positions");
            sequence.positions = t.into_iter().zip(h).zip(w).map(|((t, h), w)| [t, h, w]).collect();
        }
        let rows = self.spec.encoder.as_ref().map(|spec| {
            let mut encoder = TransformerEncoder::load(spec, &self.weights, backend).expect("an encoder");
            let rows = encoder.encode(&[&self.input(spec)]).expect("an item that fits").remove(0);
            sequence.hidden = encoder.hidden();
            match self.case.json.get("item") {
                Some(_) => sequence.embeds = vec![(self.numbers::<[usize; 2]>("item")[0], rows.clone())],
                None => sequence.cross.clone_from(&rows),
            }
            self.stored(&rows, encoder.hidden(), "rows")
        });
        let mut decoder =
            TransformerDecoder::load(&self.spec.decoder, &self.weights, backend).expect("a decoder");
        let logits = teacher_forced(&mut decoder, &sequence);
        (rows, self.stored(&logits, self.spec.decoder.vocab, "logit_rows"))
    }

    fn expected(&self, tensor: &str) -> Vec<f32> {
        self.case.values(tensor).1
    }

    /// Holds the case to the reference in each precision.
    fn check(&self) {
        let what = |part: &str| format!("{} {part}", self.name);
        let exact = self.expected("logits");
        let (rows, logits) = self.run(&cpu(Precision::F32));
        if let Some(rows) = rows {
            assert_logits_close(&what("rows"), &rows, &self.expected("rows"));
        }
        assert_logits_close(&what("logits"), &logits, &exact);
        let (rows, logits) = self.run(&cpu(Precision::Bf16));
        if let Some(rows) = rows {
            assert_bf16_close(&what("rows"), &rows, &self.expected("rows"), &self.expected("rows_bf16"));
        }
        assert_bf16_close(&what("logits"), &logits, &exact, &self.expected("logits_bf16"));
        let (_, logits) = self.run(&cpu(Precision::Int8));
        assert_int8_close(&what("logits"), &logits, &exact);
        assert!(rms_error(&logits, &exact) > 0.0, "{}: int8 is not exact", self.name);
    }
}

#[test]
fn two_layers_of_the_lightest_match() {
    LIGHT.iter().for_each(|name| Wide::open(name).check());
}

#[test]
#[ignore = "gigabytes of weights, minutes: `cargo xtask test real-widths`"]
fn two_layers_of_every_model_match() {
    LIGHT.iter().chain(&HEAVY).for_each(|name| Wide::open(name).check());
}
