//! Memory of loaded stages beside what [`triptych_models::model::Inventory`] reports before they are loaded.
//!
//! An allocator counts the bytes in use. The tests of this binary take turns with it.

#[path = "support/real_widths.rs"]
mod drawn;
#[path = "support/golden.rs"]
mod golden;
#[path = "support/planes.rs"]
mod planes;
#[path = "golden_models/wide_input.rs"]
mod wide_input;

use drawn::Drawn;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use triptych_core::Extent;
use triptych_kernels::{Backend, CpuBackend, CpuConfig, Precision};
use triptych_models::decoder::{Decoder, TransformerDecoder};
use triptych_models::encoder::{Encoder, TransformerEncoder};
use triptych_models::family::{Config, Family};
use triptych_models::model::{FootprintBackend, activation_bytes};
use triptych_models::preprocess::{EncoderInput, Features, TileRows};
use triptych_models::spec::{EncoderSpec, MelWindows, StemSpec};
use triptych_models::weights::Weights;

/// Models whose parts differ: convolution stems and patches, tied and untied heads, tables of positions, gated layers, states.
const CASES: [&str; 4] = ["whisper_large_v3", "bart_large", "glm_ocr", "qwen3_5_0_8b_text"];

/// Blocks of KV cache, of self-attention and of cross-attention.
const N_BLOCKS: [usize; 2] = [96, 48];

/// Slots of recurrent states.
const N_STATES: usize = 12;

/// Held by the test that counts.
static TURN: Mutex<()> = Mutex::new(());

/// Bytes in use.
static IN_USE: AtomicUsize = AtomicUsize::new(0);

/// The most bytes in use since it was set.
static MOST: AtomicUsize = AtomicUsize::new(0);

/// Counts bytes that were allocated.
fn add(n_bytes: usize) {
    let before = IN_USE.fetch_add(n_bytes, Ordering::Relaxed);
    MOST.fetch_max(before.saturating_add(n_bytes), Ordering::Relaxed);
}

/// The system's allocator, with a count.
struct Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's layout.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's layout.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's pointer and layout.
        unsafe { System.dealloc(ptr, layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(size);
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's pointer, layout and size.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The value that `make` returns, and the bytes that it leaves in use.
fn kept<T>(make: impl FnOnce() -> T) -> (T, usize) {
    let before = IN_USE.load(Ordering::Relaxed);
    let made = make();
    let grown = IN_USE.load(Ordering::Relaxed).saturating_sub(before);
    (made, grown)
}

/// The most bytes that a piece of work has in use at once, beside those before it.
fn most(work: impl FnOnce()) -> usize {
    let before = IN_USE.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    work();
    MOST.load(Ordering::Relaxed).saturating_sub(before)
}

/// Items of zeros of some kilobytes a layer: a window of audio, a text, a grid of patches, or tiles. `None` for encoders that read
/// others.
fn plain(spec: &EncoderSpec) -> Option<EncoderInput> {
    let grid = |h: usize, w: usize| Extent::Grid { t: 1, h: h as u32, w: w as u32 };
    let (extent, n_rows, features) = match &spec.stem {
        StemSpec::Tokens { max_tokens, .. } => {
            let n_tokens = (*max_tokens).min(300);
            (Extent::Tokens, n_tokens, Features::Tokens(vec![1; n_tokens]))
        }
        StemSpec::Mel { n_mels, n_frames, windows } => {
            let mel = vec![0.0; n_mels * n_frames];
            let features = match windows {
                MelWindows::Masked => Features::MaskedMel { mel, n_valid: *n_frames as u32 },
                MelWindows::Separate | MelWindows::Joined => Features::Mel(mel),
            };
            (Extent::windows(1, 0), n_frames / 2, features)
        }
        StemSpec::Wave(wave) => {
            let samples = vec![0.0; wave.window.min(160_000)];
            let n_rows = wave.n_rows(samples.len());
            (Extent::windows(1, 0), n_rows, Features::Samples(samples))
        }
        StemSpec::Patches { .. } => {
            let patches = vec![0.0; 24 * 40 * spec.stem.patch_values()];
            (grid(24, 40), 24 * 40, Features::Patches(patches))
        }
        StemSpec::PrefixedPatches { grid: [h, w], .. } => {
            let n_rows = spec.image_tokens([*h, *w])? * spec.merged_rows();
            let patches = vec![0.0; h * w * spec.stem.patch_values()];
            let rows = TileRows::whole((n_rows / spec.merged_rows()) as u32);
            (grid(*h, *w), n_rows, Features::Tiles { patches, rows })
        }
        _ => return None,
    };
    Some(EncoderInput { extent, n_tokens: (n_rows / spec.merged_rows()) as u32, features })
}

/// The item of each tower: a plain one, or that of the case.
fn items(json: &Value, first: &EncoderSpec) -> Vec<EncoderInput> {
    let has_towers = json["input"]["towers"].is_array();
    match plain(first).filter(|_| !has_towers) {
        Some(item) => vec![item],
        None => wide_input::inputs(json, first),
    }
}

/// Bytes of the activations of a forward over those that are foretold. On a thread of its own, which keeps nothing of others'
/// tensors.
fn activation_ratio(name: &str, tower: Tower<'_>, run: Forward) -> f64 {
    let Tower { spec, weights, item } = tower;
    let Forward { precision, n_items } = run;
    let batch = vec![item; n_items];
    let told = activation_bytes(spec, weights, precision, &batch).expect("a forward");
    let config = CpuConfig { threads: 1, precision, ..CpuConfig::default() };
    let backend = CpuBackend::new(config).expect("a back end").for_encoders();
    let mut encoder = TransformerEncoder::load(spec, weights, &backend).expect("an encoder");
    let n_bytes = std::thread::scope(|scope| {
        let forward = || most(|| (0..2).for_each(|_| drop(encoder.encode(&batch).expect("an item"))));
        scope.spawn(forward).join().expect("a forward")
    });
    let ratio = n_bytes as f64 / told as f64;
    println!("{name} activations of {run:?}: {n_bytes} bytes, {told} foretold, ratio {ratio:.4}");
    ratio
}

/// Ratios of activations that are foretold well.
const WELL: std::ops::RangeInclusive<f64> = 0.95..=1.05;

/// A tower and its item.
#[derive(Clone, Copy)]
struct Tower<'a> {
    spec: &'a EncoderSpec,
    weights: &'a Weights,
    item: &'a EncoderInput,
}

/// A forward whose activations are measured.
#[derive(Clone, Copy, Debug)]
struct Forward {
    precision: Precision,
    n_items: usize,
}

/// Bytes that a stage is said to take.
fn foretold(precision: Precision, load: impl FnOnce(&FootprintBackend)) -> usize {
    let backend = FootprintBackend::new(precision).expect("a back end");
    load(&backend);
    backend.footprint().n_bytes
}

fn assert_foretold(what: &str, kept: usize, foretold: usize) {
    let ratio = kept as f64 / foretold as f64;
    println!("{what}: {kept} bytes kept, {foretold} foretold, ratio {ratio:.4}");
    assert!((0.99..=1.01).contains(&ratio), "{what}: {kept} bytes kept, {foretold} foretold");
}

/// Holds the stages of a case, and their caches, to what is said of them.
fn check(name: &str, forwards: &[Forward]) {
    let Drawn { spec, weights, .. } = &Drawn::open(name);
    let json = golden::json(&format!("real_widths/{name}/expected.json"));
    if let Some(first) = &spec.encoder {
        for (spec, item) in first.towers().zip(&items(&json, first)) {
            for forward in forwards {
                let ratio = activation_ratio(name, Tower { spec, weights, item }, *forward);
                assert!(WELL.contains(&ratio), "{name} {forward:?}: {ratio:.4} of what is foretold");
            }
        }
    }
    for precision in [Precision::F32, Precision::Bf16, Precision::Int8, Precision::Int4] {
        let config = CpuConfig { threads: 1, precision, ..CpuConfig::default() };
        let backend = CpuBackend::new(config).expect("a back end");
        let what = |stage: &str| format!("{name} {stage} {precision:?}");
        for spec in spec.encoder.iter().flat_map(|first| first.towers()) {
            let told =
                foretold(precision, |b| drop(TransformerEncoder::load(spec, weights, &b.for_encoders())));
            let (loaded, kept) = kept(|| TransformerEncoder::load(spec, weights, &backend.for_encoders()));
            assert!(loaded.is_ok());
            assert_foretold(&what("encoder"), kept, told);
        }
        let told = foretold(precision, |b| drop(TransformerDecoder::load(&spec.decoder, weights, b)));
        let (decoder, n_bytes) = kept(|| TransformerDecoder::load(&spec.decoder, weights, &backend));
        assert_foretold(&what("decoder"), n_bytes, told);
        let mut decoder = decoder.expect("a decoder");
        let info = decoder.info();
        let ((), n_bytes) = kept(|| decoder.allocate_kv(N_BLOCKS[0], N_BLOCKS[1]).expect("room"));
        let told = N_BLOCKS[0] * info.self_block_bytes + N_BLOCKS[1] * info.cross_block_bytes;
        assert_foretold(&what("KV"), n_bytes, told);
        if let Some(slot) = info.state_slot_bytes {
            let ((), n_bytes) = kept(|| decoder.allocate_states(N_STATES).expect("room"));
            assert_foretold(&what("states"), n_bytes, N_STATES * slot.get());
        }
    }
}

/// Encoders that no case at published widths has: a golden configuration, keys of its encoder at published widths with two layers
/// of each kind, and an image.
fn widened() -> Vec<(&'static str, Value)> {
    let image = |side: usize| json!({"planes": [1, 3, side, side]});
    let vit = |image_size: usize, patch_size: usize| {
        json!({
            "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "mlp_ratio": 4,
            "image_size": image_size, "patch_size": patch_size,
        })
    };
    let swin = |window: usize, image_size: usize| {
        json!({
            "embed_dim": 96, "depths": [2, 2, 2, 2], "num_heads": [3, 6, 12, 24], "num_layers": 4, "hidden_size": 768,
            "mlp_ratio": 4.0, "window_size": window, "image_size": image_size,
        })
    };
    let cases = [
        ("swinv2_trocr", swin(8, 256), image(256), 64),
        ("swin_gpt2", swin(7, 224), image(224), 49),
        ("vit_gpt2", vit(224, 16), image(224), 197),
        ("deit_smaller", vit(224, 16), image(224), 198),
        ("trocr_beit", vit(224, 16), image(224), 197),
        ("dinov2_cropped", vit(224, 14), image(224), 257),
        ("dinov2_larger_gated", vit(224, 14), image(224), 257),
        ("clip_trocr", vit(224, 16), image(224), 197),
    ];
    let made = cases.into_iter().map(|(name, encoder, input, n_rows)| {
        let mut config = golden::json(&format!("{name}/model/config.json"));
        for (key, value) in encoder.as_object().expect("keys") {
            // Keys that a kind does not know would be refused, or read as another's.
            if config["encoder"].get(key).is_some() {
                config["encoder"][key] = value.clone();
            }
        }
        // The decoder is told the encoder's width, or nothing.
        if config["decoder"]["cross_attention_hidden_size"].is_number() {
            config["decoder"]["cross_attention_hidden_size"] = config["encoder"]["hidden_size"].clone();
        }
        (name, json!({"config": config, "input": input, "n_rows": n_rows}))
    });
    made.collect()
}

/// Cases at published widths, in the order of their names.
fn published() -> Vec<String> {
    let all = std::fs::read_dir(golden::path("real_widths")).expect("cases");
    let mut names: Vec<String> =
        all.map(|entry| entry.expect("a case").file_name().into_string().expect("a name")).collect();
    names.sort_unstable();
    names
}

/// Encoders of the gate: one of each stem and of each way of its rows to the output.
const KINDS: [&str; 7] = [
    "moonshine_base",
    "donut_base",
    "florence_2_base",
    "deepseek_ocr_2",
    "qwen2_audio_7b",
    "qwen3_asr_1_7b",
    "qwen2_5_vl_7b",
];

/// Larger ones of these kinds.
const LARGER: [&str; 9] = [
    "llama_3_2_11b_vision",
    "step3_vl",
    "voxtral_mini_3b",
    "whisper_large_v3",
    "trocr_base",
    "llava_1_6_mistral_7b",
    "gemma_3_4b",
    "pixtral_12b",
    "qwen3_vl_8b",
];

/// Encoders of models at published widths that take more or less than is foretold. Weights are zeros: what an encoder takes is a
/// question of sizes.
fn wrongly_foretold(names: &[&str]) -> Vec<String> {
    let one = |name: &&str| {
        let json = golden::json(&format!("real_widths/{name}/expected.json"));
        let hollow = Drawn::hollow(name);
        let first = hollow.spec.encoder.as_ref().expect("an encoder");
        wrong_towers(name, (&json, first), &hollow.weights)
    };
    names.iter().flat_map(one).collect()
}

fn wrong_towers(name: &str, (json, first): (&Value, &EncoderSpec), weights: &Weights) -> Vec<String> {
    let mut wrong = Vec::new();
    for (spec, item) in first.towers().zip(&items(json, first)) {
        let forward = Forward { precision: Precision::Bf16, n_items: 1 };
        let ratio = activation_ratio(name, Tower { spec, weights, item }, forward);
        if !WELL.contains(&ratio) {
            wrong.push(format!("{name}: {ratio:.4}"));
        }
    }
    wrong
}

#[test]
fn activations_of_every_kind_of_encoder_are_foretold() {
    let _turn = TURN.lock();
    let mut wrong = wrongly_foretold(&KINDS);
    for (name, json) in widened() {
        let config = Config::new("config.json", &json["config"]);
        let spec = Family::of(&config).and_then(|family| family.spec(&config)).expect("a configuration");
        let first = spec.encoder.as_ref().expect("an encoder");
        wrong.extend(wrong_towers(name, (&json, first), &Weights::Dummy { seed: 1 }));
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
#[ignore = "minutes: `cargo test -p triptych-models --test memory -- --ignored activations`"]
fn activations_of_larger_encoders_are_foretold() {
    let _turn = TURN.lock();
    let wrong = wrongly_foretold(&LARGER);
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn stages_take_the_memory_that_is_reported_before_they_are_loaded() {
    let _turn = TURN.lock();
    let forward = Forward { precision: Precision::Bf16, n_items: 1 };
    CASES.iter().for_each(|name| check(name, &[forward]));
}

#[test]
#[ignore = "gigabytes of weights, minutes: `cargo test -p triptych-models --test memory -- --ignored --nocapture`"]
fn stages_of_every_published_width_do() {
    let _turn = TURN.lock();
    let mut names = published();
    assert!(names.len() >= 12, "{names:?}");
    let forwards = [(Precision::F32, 1), (Precision::Bf16, 3), (Precision::Int8, 1)]
        .map(|(precision, n_items)| Forward { precision, n_items });
    // All are measured, so that one run tells all that is wrong.
    names.retain(|name| std::panic::catch_unwind(|| check(name, &forwards)).is_err());
    assert!(names.is_empty(), "wrong: {names:?}");
}
