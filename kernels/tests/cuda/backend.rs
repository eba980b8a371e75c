//! The back end beside its results, which the conformance suite has: errors of the driver, memory, and an end at which
//! nothing is left over.

use triptych_core::DType;
use triptych_cuda_standin::{Left, Standin};
use triptych_kernels::ops::{
    Activation, AttentionShape, Backend, ChooseBatch, ChooseRow, Edit, KvLayer, KvLayout, KvSlots,
    LinearPart, Mask, PagedBatch, ScoreBias, StageBuilder, WeightView,
};
use triptych_kernels::{CudaBackend, CudaConfig, KernelError, Precision};

use crate::element::values;

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: i32 = 2;
/// `CUDA_ERROR_ILLEGAL_ADDRESS`.
const ILLEGAL_ADDRESS: i32 = 700;

const WIDTH: usize = 64;

fn open(device: usize, precision: Precision) -> Result<CudaBackend, KernelError> {
    CudaBackend::new(CudaConfig { device, precision })
}

/// A small step: a product, keys and values into pages, attention over them. Returns its values.
fn step(backend: &CudaBackend) -> Result<Vec<f32>, KernelError> {
    let weights: Vec<u8> = values(1, 3 * WIDTH * WIDTH).iter().flat_map(|v| v.to_le_bytes()).collect();
    let view = WeightView { dtype: DType::F32, shape: &[3 * WIDTH, WIDTH], data: &weights };
    let layer = backend.load_linear(&[LinearPart::new(view, None)])?;
    let layout = KvLayout { n_layers: 2, n_blocks: 3, n_kv_heads: 2, head_dim: 32 };
    let mut cache = backend.kv_cache(layout)?;
    let mut host = backend.host_kv_cache(layout)?;
    let mut builder = StageBuilder::new();
    let slots = builder.indices(&[32, 33])?;
    let seqs = builder.paged(PagedBatch {
        query_start_loc: &[0, 2],
        table_start_loc: &[0, 1],
        block_tables: &[1],
        seq_lens: &[2],
    })?;
    let staged = backend.stage(builder)?;
    let x = backend.upload(values(2, 2 * WIDTH), 2, WIDTH)?;
    let qkv = backend.linear(&x, &layer, Activation::Silu, None)?;
    let [q, k, v] = [0, WIDTH, 2 * WIDTH].map(|first| backend.columns(&qkv, first, WIDTH));
    backend.write_kv(&staged, KvSlots { cache: &mut cache, layer: 1, slots }, [&k?, &v?])?;
    backend.swap_out(&cache, &mut host, &[(1, 0)])?;
    backend.swap_in(&host, &mut cache, &[(0, 1)])?;
    backend.copy_blocks(&mut cache, &[(1, 2)])?;
    let shape = AttentionShape { n_heads: 2, n_kv_heads: 2, head_dim: 32, scale: 0.2, softcap: None };
    let kv = KvLayer { cache: &cache, layer: 1, seqs, mask: Mask::Causal, bias: ScoreBias::None };
    let out = backend.paged_attention(&staged, &q?, kv, shape)?;
    backend.download(&out)
}

#[test]
fn nothing_is_left_of_a_back_end() {
    for precision in [Precision::F32, Precision::Bf16, Precision::Int8, Precision::Int4] {
        let device = Standin::get().new_device(1);
        let backend = open(device, precision).expect("a device");
        let first = step(&backend).expect("a step");
        let allocated = Standin::get().calls(device, "cuMemAlloc_v2");
        let other = step(&backend.for_encoders()).expect("a step on the other stream");
        // Encoders keep bytes where decoders keep four bits.
        assert_eq!(other == first, precision != Precision::Int4, "{precision:?}");
        assert_eq!(step(&backend).expect("a step"), first);
        assert!(
            Standin::get().calls(device, "cuMemAlloc_v2") > allocated,
            "weights and caches are allocated"
        );
        drop(backend);
        assert_eq!(Standin::get().left(device), Left::default(), "{precision:?}");
    }
}

#[test]
fn activations_of_a_size_that_was_seen_allocate_nothing() {
    let device = Standin::get().new_device(2);
    let backend = open(device, Precision::Bf16).expect("a device");
    let run = || {
        let x = backend.upload(values(2, 5 * WIDTH), 5, WIDTH).expect("an upload");
        let y = backend.gate(&x, Activation::Gelu).expect("a gate");
        backend.download(&y).expect("a download")
    };
    let first = run();
    let allocated = Standin::get().calls(device, "cuMemAlloc_v2");
    for _ in 0..20 {
        assert_eq!(run(), first);
    }
    assert_eq!(Standin::get().calls(device, "cuMemAlloc_v2"), allocated);
}

/// Two words for each row: the token and its status. The logits stay on the device.
#[test]
fn a_greedy_batch_brings_down_at_most_4_kib() {
    let device = Standin::get().new_device(5);
    let backend = open(device, Precision::Bf16).expect("a device");
    let (n_rows, vocab) = (512, 300);
    let logits = backend.upload(values(3, n_rows * vocab), n_rows, vocab).expect("an upload");
    let before = backend.n_downloaded();
    let suppressed = |row| ChooseRow { edits: vec![Edit::forbid(row)], ..ChooseRow::greedy(row) };
    let choices = (0..n_rows as u32).map(suppressed).collect();
    let chosen = backend.choose(logits, &ChooseBatch { choices, whole: Vec::new() }).expect("choices");
    assert!(chosen.choices.iter().all(Result::is_ok));
    assert_eq!(backend.n_downloaded() - before, 4096);
}

#[test]
fn every_call_that_fails_is_an_error_and_leaves_nothing() {
    let entries = [
        "cuDevicePrimaryCtxRetain",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuFuncSetAttribute",
        "cuStreamCreate",
        "cuMemAlloc_v2",
        "cuMemHostAlloc",
        "cuEventCreate",
        "cuEventRecord",
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyDtoDAsync_v2",
        "cuMemsetD8Async",
        "cuLaunchKernel",
        "cuStreamSynchronize",
    ];
    for entry in entries {
        let mut n_failed = 0;
        for nth in [1, 2, 3, 5, 9] {
            let device = Standin::get().new_device(u64::from(nth));
            Standin::get().fail(device, entry, nth, ILLEGAL_ADDRESS);
            match open(device, Precision::Bf16).and_then(|backend| step(&backend)) {
                Ok(_) => continue,
                Err(KernelError::DeviceLost { message, .. }) => {
                    assert!(message.contains("ILLEGAL_ADDRESS"), "{entry} {nth}: {message}");
                }
                // A kernel that cannot be looked up is named with its error.
                Err(KernelError::Library { message, .. }) => {
                    assert!(message.starts_with("kernel "), "{entry} {nth}: {message}");
                }
                Err(other) => panic!("{entry} {nth}: {other}"),
            }
            n_failed += 1;
            assert_eq!(Standin::get().left(device), Left::default(), "{entry} {nth}");
        }
        assert!(n_failed > 0, "{entry} is never called");
    }
}

#[test]
fn a_device_without_room_says_so_and_can_be_used_further() {
    Standin::get().needed_to("give a test memory that no other test takes");
    let device = Standin::get().new_device(3);
    let backend = open(device, Precision::F32).expect("a device");
    let before = backend.memory().expect("its memory");
    let large = KvLayout { n_layers: 64, n_blocks: 1 << 20, n_kv_heads: 8, head_dim: 128 };
    let refused = backend.kv_cache(large).map(|_| ()).expect_err("more than a device has");
    assert!(matches!(refused, KernelError::OutOfMemory { op: "kv_cache", .. }), "{refused}");
    assert_eq!(backend.memory().expect("its memory"), before);
    step(&backend).expect("a step");
    // Activations that nobody has make room for others.
    drop(backend.zeros(1000, WIDTH).expect("zeros"));
    Standin::get().fail(device, "cuMemAlloc_v2", 1, OUT_OF_MEMORY);
    backend.zeros(77, WIDTH).expect("the second attempt");
}

#[test]
fn a_product_for_which_the_layers_algorithm_is_refused_has_one_of_its_own() {
    let device = Standin::get().new_device(4);
    let backend = open(device, Precision::F32).expect("a device");
    let weights: Vec<u8> = values(1, WIDTH * WIDTH).iter().flat_map(|v| v.to_le_bytes()).collect();
    let view = WeightView { dtype: DType::F32, shape: &[WIDTH, WIDTH], data: &weights };
    let layer = backend.load_linear(&[LinearPart::new(view, None)]).expect("a layer");
    // As many rows as no other test has.
    let x = backend.upload(values(2, 61 * WIDTH), 61, WIDTH).expect("an upload");
    let product = || {
        let y = backend.linear(&x, &layer, Activation::None, None).expect("a product");
        backend.download(&y).expect("a download")
    };
    let expected = product();
    Standin::get().refuse_algorithms_of_others(61);
    assert_eq!(product(), expected);
}

#[test]
fn a_device_that_is_not_there_is_refused() {
    Standin::get();
    let n_devices = triptych_kernels::cuda::device_count().expect("the stand-in's devices");
    let refused = open(n_devices, Precision::F32).map(|_| ()).expect_err("one too many");
    assert!(
        matches!(refused, KernelError::Index { what: "device", index, len, .. } if index == n_devices && len == n_devices),
        "{refused}"
    );
}
