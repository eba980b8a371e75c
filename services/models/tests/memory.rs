//! Memory of loaded stages beside what [`triptych_models::model::Inventory`] reports before they are loaded.
//!
//! An allocator counts the bytes in use. The one test of this binary has it to itself.

#[path = "support/real_widths.rs"]
mod drawn;
#[path = "support/golden.rs"]
mod golden;

use drawn::Drawn;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use triptych_core::Extent;
use triptych_kernels::{Backend, CpuBackend, CpuConfig, Precision};
use triptych_models::decoder::{Decoder, TransformerDecoder};
use triptych_models::encoder::{Encoder, TransformerEncoder};
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

/// An item of zeros: a window of audio, a text, a grid of patches, or a tile. `None` for encoders that read another.
fn item(spec: &EncoderSpec) -> Option<EncoderInput> {
    let grid = |h: usize, w: usize| Extent::Grid { t: 1, h: h as u32, w: w as u32 };
    let (extent, n_rows, features) = match spec.stem {
        StemSpec::Tokens { .. } => (Extent::Tokens, 300, Features::Tokens(vec![1; 300])),
        StemSpec::Mel { windows: MelWindows::Masked, .. } => return None,
        StemSpec::Mel { n_mels, n_frames, .. } => {
            let mel = vec![0.0; n_mels * n_frames];
            (Extent::windows(1, 0), n_frames / 2, Features::Mel(mel))
        }
        StemSpec::Patches { .. } => {
            let patches = vec![0.0; 24 * 40 * spec.stem.patch_values()];
            (grid(24, 40), 24 * 40, Features::Patches(patches))
        }
        StemSpec::PrefixedPatches { grid: [h, w], .. } => {
            let n_rows = spec.image_tokens([h, w])? * spec.merged_rows();
            let patches = vec![0.0; h * w * spec.stem.patch_values()];
            let rows = TileRows::whole((n_rows / spec.merged_rows()) as u32);
            (grid(h, w), n_rows, Features::Tiles { patches, rows })
        }
        _ => return None,
    };
    Some(EncoderInput { extent, n_tokens: (n_rows / spec.merged_rows()) as u32, features })
}

/// Holds the activations of a forward of so many items to what is foretold. On a thread of its own, which keeps nothing of
/// others' tensors.
fn check_activations(name: &str, (spec, weights): (&EncoderSpec, &Weights), run: Forward) {
    let Some(input) = item(spec) else { return };
    let Forward { precision, n_items } = run;
    let batch = vec![&input; n_items];
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
    assert!((0.95..=1.05).contains(&ratio), "{name} {run:?}: {n_bytes} bytes, {told} foretold");
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
    for spec in spec.encoder.iter().flat_map(|first| first.towers()) {
        forwards.iter().for_each(|forward| check_activations(name, (spec, weights), *forward));
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

#[test]
fn stages_take_the_memory_that_is_reported_before_they_are_loaded() {
    let forward = Forward { precision: Precision::Bf16, n_items: 1 };
    CASES.iter().for_each(|name| check(name, &[forward]));
}

#[test]
#[ignore = "gigabytes of weights, minutes: `cargo test -p triptych-models --test memory -- --ignored --nocapture`"]
fn stages_of_every_published_width_do() {
    let all = std::fs::read_dir(golden::path("real_widths")).expect("cases");
    let mut names: Vec<String> =
        all.map(|entry| entry.expect("a case").file_name().into_string().expect("a name")).collect();
    names.sort_unstable();
    assert!(names.len() >= 12, "{names:?}");
    let forwards = [(Precision::F32, 1), (Precision::Bf16, 3), (Precision::Int8, 1)]
        .map(|(precision, n_items)| Forward { precision, n_items });
    // All are measured, so that one run tells all that is wrong.
    names.retain(|name| std::panic::catch_unwind(|| check(name, &forwards)).is_err());
    assert!(names.is_empty(), "wrong: {names:?}");
}
