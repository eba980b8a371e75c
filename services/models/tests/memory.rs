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
use triptych_kernels::{Backend, CpuBackend, CpuConfig, Precision};
use triptych_models::decoder::{Decoder, TransformerDecoder};
use triptych_models::encoder::TransformerEncoder;
use triptych_models::model::FootprintBackend;

/// Models whose parts differ: convolution stems and patches, tied and untied heads, tables of positions, gated layers.
const CASES: [&str; 3] = ["whisper_large_v3", "bart_large", "glm_ocr"];

/// Blocks of KV cache, of self-attention and of cross-attention.
const N_BLOCKS: [usize; 2] = [96, 48];

/// Bytes in use.
static IN_USE: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, with a count.
struct Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        IN_USE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's layout.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        IN_USE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's layout.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's pointer and layout.
        unsafe { System.dealloc(ptr, layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        IN_USE.fetch_add(size, Ordering::Relaxed);
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

#[test]
fn stages_take_the_memory_that_is_reported_before_they_are_loaded() {
    for name in CASES {
        let Drawn { spec, weights, .. } = &Drawn::open(name);
        for precision in [Precision::F32, Precision::Bf16, Precision::Int8, Precision::Int4] {
            let config = CpuConfig { threads: 1, precision, ..CpuConfig::default() };
            let backend = CpuBackend::new(config).expect("a back end");
            let what = |stage: &str| format!("{name} {stage} {precision:?}");
            if let Some(spec) = &spec.encoder {
                let told =
                    foretold(precision, |b| drop(TransformerEncoder::load(spec, weights, &b.for_encoders())));
                let (loaded, kept) =
                    kept(|| TransformerEncoder::load(spec, weights, &backend.for_encoders()));
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
        }
    }
}
