//! The compute back end, chosen by settings. Crates above this one name no back end.

use crate::decoder::Decoder;
use crate::encoder::Encoder;
use crate::error::ModelError;
use crate::model::Model;
use crate::packed;
use triptych_core::Modality;
use triptych_kernels::Backend as _;
pub use triptych_kernels::cpu::Precision;
use triptych_kernels::cpu::{CpuBackend, CpuConfig, Isa};
#[cfg(feature = "reference")]
use triptych_kernels::reference::ReferenceBackend;

/// The back ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum BackendKind {
    /// Our own kernels.
    #[default]
    Cpu,
    /// candle-core: slow and plain, to compare with.
    #[cfg(feature = "reference")]
    Reference,
}

/// Settings of the compute back end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ComputeConfig {
    /// Back end that computes.
    pub backend: BackendKind,
    /// Compute threads; 0: one for each core of the machine.
    pub threads: usize,
    /// Precision of weights; encoders compute in [`Precision::of_encoders`].
    pub precision: Precision,
    /// Precision of the KV cache; `None`: that of the weights, and int8 where that is int4.
    pub kv: Option<Precision>,
    /// Instruction set to force; `None`: the best found.
    pub isa: Option<Isa>,
}

/// A back end, ready to take weights. Cheap to clone; the clones share one pool of threads.
#[derive(Clone)]
pub enum Compute {
    /// Our own kernels.
    Cpu(CpuBackend),
    /// candle-core.
    #[cfg(feature = "reference")]
    Reference(ReferenceBackend),
}

impl Compute {
    /// Starts the back end.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if a forced instruction set is not on this machine.
    pub fn new(config: ComputeConfig) -> Result<Self, ModelError> {
        let ComputeConfig { threads, precision, kv, isa, .. } = config;
        Ok(match config.backend {
            BackendKind::Cpu => Self::Cpu(CpuBackend::new(CpuConfig { threads, precision, kv, isa })?),
            #[cfg(feature = "reference")]
            BackendKind::Reference => Self::Reference(ReferenceBackend::new()),
        })
    }

    /// Precision of the weights.
    pub fn precision(&self) -> Precision {
        match self {
            Self::Cpu(b) => b.precision(),
            #[cfg(feature = "reference")]
            Self::Reference(_) => Precision::F32,
        }
    }

    /// Loads the encoder of `modality`, and nothing else.
    ///
    /// # Errors
    /// As [`Model::load_encoder`].
    pub fn load_encoder(&self, model: &Model, modality: Modality) -> Result<Box<dyn Encoder>, ModelError> {
        match self {
            Self::Cpu(b) => {
                let stage = format!("{modality}-encoder");
                packed::load(model.source(), &stage, &b.for_encoders(), |b| model.load_encoder(modality, b))
            }
            #[cfg(feature = "reference")]
            Self::Reference(b) => model.load_encoder(modality, b),
        }
    }

    /// Loads the decoder, and nothing else.
    ///
    /// # Errors
    /// As [`Model::load_decoder`].
    pub fn load_decoder(&self, model: &Model) -> Result<Box<dyn Decoder>, ModelError> {
        match self {
            Self::Cpu(b) => packed::load(model.source(), "decoder", b, |b| model.load_decoder(b)),
            #[cfg(feature = "reference")]
            Self::Reference(b) => model.load_decoder(b),
        }
    }
}
