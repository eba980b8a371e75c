//! Back ends under test, their tolerances, and the test data.

use std::sync::OnceLock;

use triptych_core::DType;
use triptych_kernels::ops::{Backend, Indices, StageBuilder, WeightView};
use triptych_kernels::{
    CpuBackend, CpuConfig, CudaBackend, CudaConfig, Isa, KernelError, Precision, ReferenceBackend,
};

use triptych_cuda_standin::Standin;

/// A back end under test.
pub struct Subject<B> {
    /// For messages.
    pub name: String,
    /// The device of the stand-in that it runs on.
    device: Option<usize>,
    pub backend: B,
    /// Error of products, relative to one plus the value.
    pub products: f32,
    /// Error of an activation, relative to one plus the value, where activations are rounded.
    pub activations: f32,
    /// `true` if keys and values are the same in pages as outside; bytes in pages are rounded more.
    pub keeps_pages: bool,
    /// `true` if another subject differs from this one by the kind of its weights alone.
    pub is_for_weights: bool,
    /// Element type in which a table of f32 is kept.
    pub tables: DType,
    /// A second back end that may differ in speed only.
    pub other_threads: B,
}

/// The reference; `None` where a device is tested, and nothing else.
pub fn reference() -> Option<Subject<ReferenceBackend>> {
    if triptych_cuda_standin::device().is_some() {
        return None;
    }
    let backend = ReferenceBackend::new();
    Some(Subject {
        name: "reference".to_owned(),
        device: None,
        backend,
        products: 2e-5,
        activations: 0.0,
        keeps_pages: true,
        is_for_weights: false,
        tables: DType::F32,
        other_threads: backend,
    })
}

/// Every instruction set of this machine, in every precision; none where a device is tested.
pub fn cpus() -> Vec<Subject<CpuBackend>> {
    if triptych_cuda_standin::device().is_some() {
        return Vec::new();
    }
    let precisions =
        [(Precision::F32, 2e-5), (Precision::Bf16, 3e-2), (Precision::Int8, 4e-2), (Precision::Int4, 0.15)];
    let each =
        Isa::available().flat_map(|isa| precisions.map(|(precision, products)| (isa, precision, products)));
    each.map(|(isa, precision, products)| {
        let with = |threads| {
            let config = CpuConfig { threads, precision, isa: Some(isa), ..CpuConfig::default() };
            CpuBackend::new(config).expect("an available set")
        };
        let name = format!("cpu {} {precision:?}", isa.as_str());
        let keeps_pages = !matches!(precision, Precision::Int8 | Precision::Int4);
        let tables = if precision == Precision::F32 { DType::F32 } else { DType::Bf16 };
        Subject {
            name,
            device: None,
            backend: with(3),
            products,
            activations: 0.0,
            keeps_pages,
            is_for_weights: precision == Precision::Int4,
            tables,
            other_threads: with(1),
        }
    })
    .collect()
}

/// A back end that keeps the context of a device from test to test: making one takes longer than most of them.
static KEPT: OnceLock<CudaBackend> = OnceLock::new();

/// CUDA on the stand-in for its driver, or on a device, in every precision.
pub fn cudas() -> Vec<Subject<CudaBackend>> {
    if let Some(device) = triptych_cuda_standin::device() {
        KEPT.get_or_init(|| {
            CudaBackend::new(CudaConfig { device, ..CudaConfig::default() }).expect("a device")
        });
    }
    let precisions = [
        (Precision::F32, 2e-5, 0.0),
        (Precision::Bf16, 3e-2, 3e-2),
        (Precision::Int8, 4e-2, 3e-2),
        (Precision::Int4, 0.15, 3e-2),
    ];
    let subject = |(precision, products, activations)| {
        let device = Standin::fast().new_device(precision as u64);
        let backend = CudaBackend::new(CudaConfig { device, precision }).expect("a device");
        let is_f32 = precision == Precision::F32;
        Subject {
            name: format!("cuda {precision:?}"),
            device: Some(device),
            other_threads: backend.clone(),
            backend,
            products,
            activations,
            // Few queries over pages are computed by a kernel of their own.
            keeps_pages: is_f32,
            is_for_weights: matches!(precision, Precision::Int8 | Precision::Int4),
            tables: if is_f32 { DType::F32 } else { DType::Bf16 },
        }
    };
    precisions.map(subject).into()
}

/// A step with the arrays that `add` puts into it, and their handles.
pub fn stage<B: Backend, H>(
    backend: &B,
    add: impl FnOnce(&mut StageBuilder) -> Result<H, KernelError>,
) -> (B::Step, H) {
    let mut builder = StageBuilder::new();
    let handles = add(&mut builder).expect("arrays that fit each other");
    (backend.stage(builder).expect("a step"), handles)
}

/// Error of ops that treat each element alone, relative to one plus the value.
pub const ELEMENTWISE: f32 = 1e-5;

impl<B: Backend> Subject<B> {
    /// An activation.
    pub fn tensor(&self, values: &[f32], n_tokens: usize, width: usize) -> B::Tensor {
        self.backend.upload(values.to_vec(), n_tokens, width).expect("as many values as the dimensions say")
    }

    /// A step of indices.
    pub fn indices(&self, indices: &[u32]) -> (B::Step, Indices) {
        stage(&self.backend, |builder| builder.indices(indices))
    }

    /// An error unless `actual` has the dimensions and, nearly, the values expected; rounded activations are allowed their
    /// own error.
    #[track_caller]
    pub fn close(&self, what: &str, actual: &B::Tensor, expect: (&[f32], usize, usize), tolerance: f32) {
        let (values, n_tokens, width) = expect;
        let tolerance = tolerance.max(self.activations);
        assert_eq!(self.backend.dims(actual), (n_tokens, width), "{}: dimensions of {what}", self.name);
        let actual = self.backend.download(actual);
        let actual =
            actual.unwrap_or_else(|error| panic!("{}: {what}: {error}: {}", self.name, self.fault()));
        assert_eq!(actual.len(), values.len(), "{}: values of {what}", self.name);
        for (i, (&a, &e)) in actual.iter().zip(values).enumerate() {
            let near = (a - e).abs() <= tolerance * (1.0 + e.abs());
            assert!(near, "{}: {what}: value {i} is {a}, not {e}", self.name);
        }
    }

    /// The cause of an error of the device under test, where the stand-in knows it.
    fn fault(&self) -> String {
        self.device.map_or_else(String::new, |device| Standin::fast().fault(device))
    }

    /// The bits of an activation.
    pub fn bits(&self, x: &B::Tensor) -> Vec<u32> {
        let values = self.backend.download(x);
        let values = values.unwrap_or_else(|error| panic!("{}: {error}: {}", self.name, self.fault()));
        values.into_iter().map(f32::to_bits).collect()
    }
}

/// Values in −1 ..= 1 that depend on the seed alone.
pub fn values(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// A tensor as it may lie in a file: bytes that start at an odd address.
pub struct Stored {
    dtype: DType,
    shape: Vec<usize>,
    /// One byte, then the elements.
    bytes: Vec<u8>,
}

impl Stored {
    pub fn f32(values: &[f32], shape: &[usize]) -> Self {
        Self::new(DType::F32, values, shape)
    }

    pub fn new(dtype: DType, values: &[f32], shape: &[usize]) -> Self {
        let mut bytes = vec![0xff];
        for &value in values {
            match dtype {
                DType::F32 => bytes.extend(value.to_le_bytes()),
                DType::Bf16 => bytes.extend(half::bf16::from_f32(value).to_le_bytes()),
                DType::F16 => bytes.extend(half::f16::from_f32(value).to_le_bytes()),
                DType::I8 | DType::F8 => bytes.push(value as i8 as u8),
            }
        }
        Self { dtype, shape: shape.to_vec(), bytes }
    }

    pub fn view(&self) -> WeightView<'_> {
        WeightView { dtype: self.dtype, shape: &self.shape, data: &self.bytes[1..] }
    }
}

/// The values as they are after storage.
pub fn through(dtype: DType, values: &[f32]) -> Vec<f32> {
    let round = |&value: &f32| match dtype {
        DType::F32 => value,
        DType::Bf16 => half::bf16::from_f32(value).to_f32(),
        DType::F16 => half::f16::from_f32(value).to_f32(),
        DType::I8 | DType::F8 => panic!("no weight is stored as {dtype}"),
    };
    values.iter().map(round).collect()
}
