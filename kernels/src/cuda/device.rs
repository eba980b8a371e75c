//! A CUDA device: its driver, its context and the kernels.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::Arc;

use cudarc::driver::sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
use cudarc::driver::sys::{CUdevice_attribute_enum, CUfunction, CUmodule};
use cudarc::driver::{CudaContext, DriverError, result};

use super::error::{InOp, describe};
use super::images::IMAGES;
use crate::ops::{AttentionShape, KernelError, Result};

/// Widths of heads that attention on tensor cores has kernels for; other heads are padded to the next.
const HEAD_WIDTHS: [usize; 6] = [32, 64, 80, 96, 128, 256];

/// The same of attention whose scores are capped, which few models have.
const CAPPED_WIDTHS: [usize; 2] = [128, 256];

/// Dynamic shared memory that a kernel has without asking, bytes.
const SHARED_BYTES: u32 = 48 << 10;

/// The oldest compute capability that the kernels are built for.
const OLDEST: (i32, i32) = (8, 0);

/// A kernel of a loaded module.
#[derive(Clone, Copy, Debug)]
pub(super) struct Function(pub(super) CUfunction);

// SAFETY: a handle of the driver, which any thread may use; its module is loaded as long as the device.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// A loaded module.
#[derive(Debug)]
struct Module {
    handle: CUmodule,
    context: Arc<CudaContext>,
}

// SAFETY: a handle of the driver, which any thread may use.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// The kernels. Pairs are for f32 and for bf16 activations.
#[derive(Debug)]
pub(super) struct Kernels {
    pub(super) gather_rows: [Function; 2],
    pub(super) weighted_rows: [Function; 2],
    pub(super) scatter_rows: [Function; 2],
    pub(super) softcap: [Function; 2],
    pub(super) columns: [Function; 2],
    pub(super) add: [Function; 2],
    pub(super) finish_linear: [Function; 2],
    pub(super) gate: [Function; 2],
    pub(super) multiply_gated: [Function; 2],
    pub(super) transpose: [Function; 2],
    pub(super) norm: [Function; 2],
    pub(super) group_norm: [Function; 2],
    pub(super) rope: [Function; 2],
    pub(super) write_kv: [Function; 2],
    pub(super) write_qkv: [Function; 2],
    pub(super) unfold: [Function; 2],
    pub(super) depthwise: [Function; 2],
    pub(super) causal_conv: [Function; 2],
    pub(super) gated_delta_rule: [Function; 2],
    pub(super) read_bytes: [Function; 2],
    pub(super) attention_weights: [Function; 2],
    pub(super) attention_wide: [Function; 2],
    pub(super) widen_bf16: Function,
    pub(super) narrow_bf16: Function,
    pub(super) linear_bf16: Function,
    pub(super) linear_int8: Function,
    pub(super) linear_int4: Function,
    pub(super) route: [Function; 2],
    pub(super) count_routes: Function,
    pub(super) place_routes: Function,
    pub(super) experts_f32: Function,
    pub(super) experts_bf16: Function,
    pub(super) experts_int8: Function,
    pub(super) experts_int4: Function,
    pub(super) sum_experts: [Function; 2],
    pub(super) attention_f32: Function,
    pub(super) paged_attention_f32: Function,
    pub(super) attention_bf16: ByWidth,
    pub(super) paged_attention_bf16: ByWidth,
    pub(super) decode_bf16: ByWidth,
    pub(super) decode_shared_bf16: ByWidth,
    pub(super) join_splits_bf16: Function,
    pub(super) edit_logits: Function,
    pub(super) choose: Function,
    pub(super) log_probabilities: Function,
    pub(super) carry_tokens: Function,
}

/// Kernels of one job, for each padded width of a head: those without a cap on scores, and the few with one.
#[derive(Debug)]
pub(super) struct ByWidth {
    plain: [Function; HEAD_WIDTHS.len()],
    capped: [Function; CAPPED_WIDTHS.len()],
    shared_bytes: fn(usize) -> u32,
}

impl ByWidth {
    /// The kernel for heads that are at most as wide as the widest, and its shared memory.
    pub(super) fn of(&self, shape: AttentionShape) -> (Function, u32) {
        let narrowest = |widths: &[usize]| {
            widths.iter().position(|width| *width >= shape.head_dim).unwrap_or(widths.len() - 1)
        };
        let (function, width) = match shape.softcap {
            None => {
                let i = narrowest(&HEAD_WIDTHS);
                (self.plain[i], HEAD_WIDTHS[i])
            }
            Some(_) => {
                let i = narrowest(&CAPPED_WIDTHS);
                (self.capped[i], CAPPED_WIDTHS[i])
            }
        };
        (function, (self.shared_bytes)(width))
    }
}

/// A device with its kernels loaded.
#[derive(Debug)]
pub(super) struct Device {
    context: Arc<CudaContext>,
    /// Loaded as long as the kernels.
    _modules: Vec<Module>,
    pub(super) kernels: Kernels,
}

/// Bytes of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes that nobody has allocated.
    pub free: usize,
    /// Bytes of the device.
    pub total: usize,
}

/// Number of CUDA devices; the error says what is missing where there is no driver.
///
/// # Errors
/// [`KernelError::Library`] without a driver, or if it does not start.
pub fn device_count() -> Result<usize> {
    let op = "cuda";
    driver()?;
    result::init().op(op)?;
    Ok(usize::try_from(result::device::get_count().op(op)?).unwrap_or(0))
}

/// An error unless the driver's library is there: cudarc panics where it is not.
fn driver() -> Result<()> {
    // SAFETY: a library whose constructors are the driver's own.
    if unsafe { cudarc::driver::sys::is_culib_present() } {
        return Ok(());
    }
    Err(missing("libcuda.so.1 is not found: install the NVIDIA driver, or run on the CPU (--device cpu)"))
}

/// An error unless cublasLt's library is there.
fn cublaslt() -> Result<()> {
    // SAFETY: a library whose constructors are cublasLt's own.
    if unsafe { cudarc::cublaslt::sys::is_culib_present() } {
        return Ok(());
    }
    Err(missing("libcublasLt.so.13 is not found: install CUDA's cuBLAS, or run on the CPU (--device cpu)"))
}

fn missing(message: &str) -> KernelError {
    KernelError::Library { op: "cuda", message: message.to_owned() }
}

impl Device {
    /// The device of a number, from 0.
    pub(super) fn new(ordinal: usize) -> Result<Self> {
        let op = "cuda";
        let n_devices = device_count()?;
        cublaslt()?;
        if ordinal >= n_devices {
            return Err(KernelError::Index { op, what: "device", index: ordinal, len: n_devices });
        }
        let context = CudaContext::new(ordinal).op(op)?;
        // SAFETY: the back end orders its streams itself; cudarc's events would break a capture.
        unsafe { context.disable_event_tracking() };
        let of_capability = |attribute| context.attribute(attribute).op(op);
        let major = of_capability(CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = of_capability(CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if (major, minor) < OLDEST {
            let (oldest, least) = OLDEST;
            let message = format!(
                "device {ordinal} has compute capability {major}.{minor}; {oldest}.{least} or later is needed"
            );
            return Err(KernelError::Library { op, message });
        }
        let mut loading = Loading { context: &context, modules: HashMap::new() };
        let kernels = loading.kernels()?;
        let modules = loading.modules.into_values().collect();
        Ok(Self { context, _modules: modules, kernels })
    }

    /// Makes this device the current one of the calling thread.
    pub(super) fn bind(&self, op: &'static str) -> Result<()> {
        self.context.bind_to_thread().op(op)
    }

    /// The context.
    pub(super) fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Its memory.
    pub(super) fn memory(&self) -> Result<DeviceMemory> {
        let op = "device_memory";
        self.bind(op)?;
        let (free, total) = result::mem_get_info().op(op)?;
        Ok(DeviceMemory { free, total })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // A lost device cannot be tidied, and need not be.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: nothing launches a kernel of the module after its device.
            let _ = unsafe { result::module::unload(self.handle) };
        }
    }
}

/// Modules while kernels are looked up in them.
struct Loading<'a> {
    context: &'a Arc<CudaContext>,
    /// By the names of their images.
    modules: HashMap<&'static str, Module>,
}

impl Loading<'_> {
    fn kernels(&mut self) -> Result<Kernels> {
        Ok(Kernels {
            gather_rows: self.pair("rows", "gather_rows")?,
            weighted_rows: self.pair("rows", "weighted_rows")?,
            scatter_rows: self.pair("rows", "scatter_rows")?,
            softcap: self.pair("rows", "softcap")?,
            columns: self.pair("rows", "columns")?,
            add: self.pair("rows", "add")?,
            finish_linear: self.pair("rows", "finish_linear")?,
            gate: self.pair("rows", "gate")?,
            multiply_gated: self.pair("rows", "multiply_gated")?,
            transpose: self.pair("transpose", "transpose")?,
            norm: self.pair("norm", "norm")?,
            group_norm: self.pair("norm", "group_norm")?,
            rope: self.pair("rope", "rope")?,
            write_kv: self.pair("rope", "write_kv")?,
            write_qkv: self.pair("rope", "write_qkv")?,
            unfold: self.pair("conv", "unfold")?,
            depthwise: self.pair("conv", "depthwise")?,
            causal_conv: self.pair("recurrent", "causal_conv")?,
            gated_delta_rule: self.pair("recurrent", "gated_delta_rule")?,
            read_bytes: self.pair("stored_rows", "read_bytes")?,
            attention_weights: self.pair("attention_weights", "attention_weights")?,
            attention_wide: self.pair("attention_wide", "attention_wide")?,
            widen_bf16: self.function("stored_rows", "widen_bf16", 0)?,
            narrow_bf16: self.function("stored_rows", "narrow_bf16", 0)?,
            linear_bf16: self.function("linear", "linear_bf16", 0)?,
            linear_int8: self.function("linear", "linear_int8", 0)?,
            linear_int4: self.function("linear", "linear_int4", 0)?,
            route: self.pair("experts", "route")?,
            count_routes: self.function("experts", "count_routes", 0)?,
            place_routes: self.function("experts", "place_routes", 0)?,
            experts_f32: self.function("experts", "experts_f32", 0)?,
            experts_bf16: self.function("experts", "experts_bf16", 0)?,
            experts_int8: self.function("experts", "experts_int8", 0)?,
            experts_int4: self.function("experts", "experts_int4", 0)?,
            sum_experts: self.pair("experts", "sum_experts")?,
            attention_f32: self.function("attention_f32", "attention_f32", F32_SHARED_BYTES)?,
            paged_attention_f32: self.function("attention_f32", "paged_attention_f32", F32_SHARED_BYTES)?,
            attention_bf16: self.widths(
                "attention",
                ["attention_bf16", "capped_attention_bf16"],
                attention_shared_bytes,
            )?,
            paged_attention_bf16: self.widths(
                "attention",
                ["paged_attention_bf16", "paged_capped_attention_bf16"],
                attention_shared_bytes,
            )?,
            decode_bf16: self.widths("decode", ["decode_bf16", "capped_decode_bf16"], decode_shared_bytes)?,
            decode_shared_bf16: self.widths(
                "decode",
                ["decode_shared_bf16", "capped_decode_shared_bf16"],
                decode_shared_bytes,
            )?,
            join_splits_bf16: self.function("decode", "join_splits_bf16", 0)?,
            edit_logits: self.function("choose", "edit_logits", 0)?,
            choose: self.function("choose", "choose", 0)?,
            log_probabilities: self.function("choose", "log_probabilities", 0)?,
            carry_tokens: self.function("choose", "carry_tokens", 0)?,
        })
    }

    fn pair(&mut self, image: &'static str, name: &str) -> Result<[Function; 2]> {
        Ok([
            self.function(image, &format!("{name}_f32"), 0)?,
            self.function(image, &format!("{name}_bf16"), 0)?,
        ])
    }

    /// The kernels of `image` that are called `name`, where scores are capped `capped_name`, with the width behind.
    fn widths(
        &mut self,
        image: &'static str,
        name: [&str; 2],
        shared_bytes: fn(usize) -> u32,
    ) -> Result<ByWidth> {
        let [name, capped_name] = name;
        let none = Function(std::ptr::null_mut());
        let mut found =
            ByWidth { plain: [none; HEAD_WIDTHS.len()], capped: [none; CAPPED_WIDTHS.len()], shared_bytes };
        for (function, width) in found.plain.iter_mut().zip(HEAD_WIDTHS) {
            *function = self.function(image, &format!("{name}_{width}"), shared_bytes(width))?;
        }
        for (function, width) in found.capped.iter_mut().zip(CAPPED_WIDTHS) {
            *function = self.function(image, &format!("{capped_name}_{width}"), shared_bytes(width))?;
        }
        Ok(found)
    }

    /// A kernel, allowed to have so many bytes of dynamic shared memory.
    fn function(&mut self, image: &'static str, name: &str, shared_bytes: u32) -> Result<Function> {
        let module = self.module(image)?;
        let unknown = |error: DriverError| {
            let message = format!("kernel {name}: {}", describe(error));
            KernelError::Library { op: "cuda", message }
        };
        let text = CString::new(name).map_err(|_| missing("a kernel's name with a zero"))?;
        // SAFETY: the module is loaded until the device is dropped.
        let function = unsafe { result::module::get_function(module, text) }.map_err(unknown)?;
        if shared_bytes > SHARED_BYTES {
            let attribute = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is of this module; an int holds what a block can have.
            unsafe { result::function::set_function_attribute(function, attribute, shared_bytes as i32) }
                .map_err(unknown)?;
        }
        Ok(Function(function))
    }

    fn module(&mut self, image: &'static str) -> Result<CUmodule> {
        if let Some(module) = self.modules.get(image) {
            return Ok(module.handle);
        }
        let Some(found) = IMAGES.iter().find(|one| one.name == image) else {
            return Err(missing("a kernel's image is missing"));
        };
        // SAFETY: a fat binary as the compiler wrote it.
        let handle = unsafe { result::module::load_data(found.bytes.as_ptr().cast()) }.op("cuda")?;
        self.modules.insert(image, Module { handle, context: Arc::clone(self.context) });
        Ok(handle)
    }
}

/// Dynamic shared memory of attention in f32, as `attention_f32.cu` lays it out.
pub(super) const F32_SHARED_BYTES: u32 = (2 * 32 * 257 + 8 * (256 + 32)) * 4;

/// Dynamic shared memory of attention over heads of a padded width, as `attention.cuh` lays it out.
pub(super) fn attention_shared_bytes(width: usize) -> u32 {
    let (keys, queries) = if width > 128 { (32, 64) } else { (64, 0) };
    ((4 * keys + queries) * (width + 8) * 2) as u32
}

/// The same of decoding, as `decode.cu` lays it out.
pub(super) fn decode_shared_bytes(width: usize) -> u32 {
    let (keys, queries) = if width > 128 { (16, 16) } else { (32, 0) };
    (4 * (2 * keys + queries) * (width + 8) * 2) as u32
}
