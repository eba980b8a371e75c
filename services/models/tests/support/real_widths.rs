//! Models of two layers at published widths, with weights that follow from their names: SplitMix64 values, as
//! `tests/golden/real_widths.py` draws them.

use crate::golden;
use half::bf16;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
use std::path::Path;
use tempfile::TempDir;
use triptych_models::LoadFormat;
use triptych_models::family::{Config, Family};
use triptych_models::spec::ModelSpec;
use triptych_models::weights::Weights;

/// `n` values in -1..1 of SplitMix64 (<https://prng.di.unimi.it/splitmix64.c>), whose state starts with FNV-1a of the name.
pub fn uniform(name: &str, n: usize) -> impl Iterator<Item = f32> {
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
    let fan_in = match shape {
        // Stacked experts: the lesser side, whichever of both comes first.
        [_, n, m] if name.contains("experts.") || name.contains(".moe.") => *n.min(m),
        _ => shape.iter().skip(1).product(),
    };
    let gain = match name {
        // T5 does not scale scores: its queries are small.
        _ if name.ends_with("Attention.q.weight") => 0.125,
        // A router is sure of its choice, so that rounding seldom decides it.
        _ if name.ends_with(".gate.weight") => 4.0,
        _ => 1.0,
    };
    let (middle, bound) = match shape.len() {
        0 | 1 if name.ends_with("bias") => (0.0, 0.0625),
        0 | 1 => (1.0, 0.125),
        _ => (0.0, (gain * (3.0 / fan_in as f64).sqrt()) as f32),
    };
    for value in uniform(name, shape.iter().product()) {
        out.write_all(&bf16::from_f32(middle + value * bound).to_le_bytes()).expect("room for weights");
    }
}

/// The header of a file of all weights of a case, with its length before it, and the bytes of the weights.
fn header(shapes: &BTreeMap<String, Vec<usize>>) -> (Vec<u8>, usize) {
    let mut header = serde_json::Map::new();
    let mut at = 0;
    for (name, shape) in shapes {
        let end = at + 2 * shape.iter().product::<usize>();
        let tensor = serde_json::json!({ "dtype": "BF16", "shape": shape, "data_offsets": [at, end] });
        header.insert(name.clone(), tensor);
        at = end;
    }
    let header = Value::Object(header).to_string();
    ([&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat(), at)
}

/// A file of all weights of a case.
fn write_weights(dir: &Path, shapes: &BTreeMap<String, Vec<usize>>) {
    let file = std::fs::File::create(dir.join("model.safetensors")).expect("a file");
    let mut out = BufWriter::with_capacity(1 << 20, file);
    out.write_all(&header(shapes).0).expect("a header");
    shapes.iter().for_each(|(name, shape)| write_weight(&mut out, name, shape));
    out.flush().expect("room for weights");
}

/// A model with its weights.
pub struct Drawn {
    pub spec: ModelSpec,
    pub weights: Weights,
    _dir: TempDir,
}

impl Drawn {
    /// The same with weights of zeros, whose file takes no room: for what depends on sizes alone.
    #[allow(dead_code)]
    pub fn hollow(name: &str) -> Self {
        Self::with(name, |dir, shapes| {
            let (header, n_bytes) = header(shapes);
            let mut file = std::fs::File::create(dir.join("model.safetensors")).expect("a file");
            file.write_all(&header).expect("a header");
            file.set_len((header.len() + n_bytes) as u64).expect("a hole");
        })
    }

    /// Draws the weights of a case of `tests/golden/real_widths`.
    pub fn open(name: &str) -> Self {
        Self::with(name, write_weights)
    }

    fn with(name: &str, write: impl Fn(&Path, &BTreeMap<String, Vec<usize>>)) -> Self {
        let given = golden::json(&format!("real_widths/{name}/expected.json"));
        let shapes = serde_json::from_value(given["shapes"].clone()).expect("shapes by name");
        let dir = tempfile::tempdir().expect("a temporary directory");
        write(dir.path(), &shapes);
        let config = Config::new("config.json", &given["config"]);
        let spec = Family::of(&config).and_then(|family| family.spec(&config)).expect("a configuration");
        let weights = Weights::open(dir.path(), LoadFormat::Safetensors).expect("weights");
        Self { spec, weights, _dir: dir }
    }
}
