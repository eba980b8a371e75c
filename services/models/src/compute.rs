//! The compute back end, chosen by settings. Crates above this one name no back end.

mod timed;

use crate::decoder::Decoder;
use crate::encoder::Encoder;
use crate::error::ModelError;
use crate::model::Model;
use crate::packed;
use triptych_core::EncoderId;
use triptych_kernels::Backend as _;
pub use triptych_kernels::Precision;
pub use triptych_kernels::cpu::{Cores, KEPT_BYTES, share_cores, stop_sharing_cores};
use triptych_kernels::cpu::{CpuBackend, CpuConfig, Isa};
use triptych_kernels::cuda::{self, CudaBackend, CudaConfig};
#[cfg(feature = "reference")]
use triptych_kernels::reference::ReferenceBackend;

pub use timed::{ForwardTimes, StepSizes, TimedForwards};

/// Devices to compute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Device {
    /// The first CUDA device where there is one with a driver, else the CPU.
    Auto,
    /// The CPU.
    #[default]
    Cpu,
    /// A CUDA device, by its number from 0.
    Cuda(usize),
    /// The CPU by candle-core: slow and plain, to compare with.
    #[cfg(feature = "reference")]
    Reference,
}

impl Device {
    /// The device of a setting: `auto`, `cpu`, `cuda` or `cuda:N`.
    ///
    /// # Errors
    /// The names that there are.
    pub fn named(name: &str) -> Result<Self, String> {
        let ordinal = name.strip_prefix("cuda:").and_then(|n| n.parse().ok());
        match (name, ordinal) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            ("cuda", _) => Ok(Self::Cuda(0)),
            (_, Some(ordinal)) => Ok(Self::Cuda(ordinal)),
            _ => Err(format!("{name:?} is no device: auto, cpu, cuda or cuda:N, N from 0")),
        }
    }
}

impl Device {
    /// `true` if the CPU computes: [`Device::Auto`] means it where there is no CUDA device.
    pub fn is_cpu(self) -> bool {
        match self {
            Self::Cpu => true,
            Self::Cuda(_) => false,
            Self::Auto => !matches!(cuda::device_count(), Ok(1..)),
            #[cfg(feature = "reference")]
            Self::Reference => true,
        }
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            #[cfg(feature = "reference")]
            Self::Reference => f.write_str("reference"),
        }
    }
}

/// Settings of the compute back end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ComputeConfig {
    /// Device that computes.
    pub device: Device,
    /// Compute threads of the CPU; 0: one for each core of the machine.
    pub threads: usize,
    /// Precision of weights; encoders compute in [`Precision::of_encoders`].
    pub precision: Precision,
    /// Precision of the KV cache; `None`: that of the weights, and int8 where that is int4. CUDA keeps it in f32 with f32
    /// weights, else in bf16.
    pub kv: Option<Precision>,
    /// Instruction set to force; `None`: the best found.
    pub isa: Option<Isa>,
    /// Times that forwards take instead of computing anything; `None`: they compute.
    pub timed: Option<TimedForwards>,
}

/// A back end, ready to take weights. Cheap to clone; the clones share one pool of threads.
#[derive(Clone)]
pub enum Compute {
    /// The CPU.
    Cpu(CpuBackend),
    /// A CUDA device.
    Cuda(CudaBackend),
    /// The CPU's models with the times of another machine, which compute nothing.
    Timed(CpuBackend, TimedForwards),
    /// candle-core.
    #[cfg(feature = "reference")]
    Reference(ReferenceBackend),
}

impl Compute {
    /// Starts the back end.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if a forced instruction set or a named device is not on this machine;
    /// [`ModelError::Device`] for a setting that the device does not have.
    pub fn new(config: ComputeConfig) -> Result<Self, ModelError> {
        let ComputeConfig { threads, precision, kv, isa, device, timed } = config;
        if let Some(times) = timed {
            return Ok(Self::Timed(CpuBackend::new(CpuConfig { threads: 1, precision, kv, isa })?, times));
        }
        match device {
            Device::Cpu => Ok(Self::Cpu(CpuBackend::new(CpuConfig { threads, precision, kv, isa })?)),
            Device::Cuda(ordinal) => cuda(ordinal, precision, kv),
            Device::Auto => Self::found(config),
            #[cfg(feature = "reference")]
            Device::Reference => Ok(Self::Reference(ReferenceBackend::new())),
        }
    }

    /// The first CUDA device, or the CPU where there is none that can be used.
    fn found(config: ComputeConfig) -> Result<Self, ModelError> {
        let on_cpu = || Self::new(ComputeConfig { device: Device::Cpu, ..config });
        match cuda::device_count() {
            Ok(1..) => match Self::new(ComputeConfig { device: Device::Cuda(0), ..config }) {
                Err(ModelError::Kernel(error)) => {
                    tracing::warn!(%error, "a CUDA device is there and cannot be used; computing on the CPU");
                    on_cpu()
                }
                other => other,
            },
            Ok(0) | Err(_) => on_cpu(),
        }
    }

    /// The device that computes.
    pub fn device(&self) -> Device {
        match self {
            Self::Cpu(_) | Self::Timed(..) => Device::Cpu,
            Self::Cuda(b) => Device::Cuda(b.ordinal()),
            #[cfg(feature = "reference")]
            Self::Reference(_) => Device::Reference,
        }
    }

    /// True if forwards run on a device of their own, or as if they did, beside the host's cores.
    pub fn is_on_device(&self) -> bool {
        match self {
            Self::Cuda(_) | Self::Timed(..) => true,
            Self::Cpu(_) => false,
            #[cfg(feature = "reference")]
            Self::Reference(_) => false,
        }
    }

    /// Free bytes of a device that has memory of its own; `None`: it computes in the machine's.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if the device does not answer.
    pub fn free_device_bytes(&self) -> Result<Option<usize>, ModelError> {
        match self {
            Self::Cpu(_) | Self::Timed(..) => Ok(None),
            Self::Cuda(b) => Ok(Some(b.memory()?.free)),
            #[cfg(feature = "reference")]
            Self::Reference(_) => Ok(None),
        }
    }

    /// Precision of the weights.
    pub fn precision(&self) -> Precision {
        match self {
            Self::Cpu(b) | Self::Timed(b, _) => b.precision(),
            Self::Cuda(b) => b.precision(),
            #[cfg(feature = "reference")]
            Self::Reference(_) => Precision::F32,
        }
    }

    /// Loads an encoder, and nothing else.
    ///
    /// # Errors
    /// As [`Model::load_encoder`].
    pub fn load_encoder(
        &self,
        model: &Model,
        encoder: impl Into<EncoderId>,
    ) -> Result<Box<dyn Encoder>, ModelError> {
        let id = encoder.into();
        match self {
            Self::Cpu(b) => {
                // One encoder reads all of a model's kinds of items.
                let first = model.modalities().first().copied().unwrap_or(id.modality);
                let stage = match model.towers().nth(id.tower.0.into()) {
                    None | Some((_, "")) => format!("{first}-encoder"),
                    Some((_, tower)) => format!("{first}-{tower}-encoder"),
                };
                packed::load(model.source(), &stage, &b.for_encoders(), |b| model.load_encoder(id, b))
            }
            Self::Cuda(b) => model.load_encoder(id, b),
            Self::Timed(b, times) => {
                let encoder = model.load_encoder(id, &b.for_encoders())?;
                Ok(Box::new(timed::TimedEncoder::new(&*encoder, id.tower, *times)))
            }
            #[cfg(feature = "reference")]
            Self::Reference(b) => model.load_encoder(id, b),
        }
    }

    /// Loads the decoder, and nothing else.
    ///
    /// # Errors
    /// As [`Model::load_decoder`].
    pub fn load_decoder(&self, model: &Model) -> Result<Box<dyn Decoder>, ModelError> {
        match self {
            Self::Cpu(b) => packed::load(model.source(), "decoder", b, |b| model.load_decoder(b)),
            Self::Cuda(b) => model.load_decoder(b),
            Self::Timed(b, times) => {
                let decoder = model.load_decoder(b)?;
                Ok(Box::new(timed::TimedDecoder::new(&*decoder, *times)))
            }
            #[cfg(feature = "reference")]
            Self::Reference(b) => model.load_decoder(b),
        }
    }
}

/// The back end of a CUDA device.
fn cuda(device: usize, precision: Precision, kv: Option<Precision>) -> Result<Compute, ModelError> {
    let kept = if precision == Precision::F32 { Precision::F32 } else { Precision::Bf16 };
    if let Some(asked) = kv.filter(|kv| *kv != kept) {
        let message = format!(
            "a KV cache in {} with weights in {}: on CUDA it is {}",
            asked.as_str(),
            precision.as_str(),
            kept.as_str()
        );
        return Err(ModelError::Device { device: Device::Cuda(device).to_string(), message });
    }
    let backend = CudaBackend::new(CudaConfig { device, precision })?;
    let free_mib = backend.memory()?.free >> 20;
    tracing::info!(device = %Device::Cuda(device), precision = precision.as_str(), free_mib, "computing on CUDA");
    Ok(Compute::Cuda(backend))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_names() {
        for name in ["auto", "cpu", "cuda:0", "cuda:7"] {
            assert_eq!(Device::named(name).unwrap().to_string(), name);
        }
        assert_eq!(Device::named("cuda"), Ok(Device::Cuda(0)));
        for name in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CPU"] {
            let refused = Device::named(name).unwrap_err();
            assert!(refused.contains("auto, cpu, cuda or cuda:N"), "{refused}");
        }
    }

    #[test]
    fn a_cache_that_cuda_does_not_have_is_refused_before_the_device_is_looked_for() {
        let config = ComputeConfig {
            device: Device::Cuda(0),
            precision: Precision::Int8,
            kv: Some(Precision::Int8),
            ..ComputeConfig::default()
        };
        let refused = Compute::new(config).map(|_| ()).unwrap_err().to_string();
        assert_eq!(refused, "cuda:0: a KV cache in int8 with weights in int8: on CUDA it is bf16");
    }
}
