//! Ops that move rows or treat each alone, norms, rotations and convolutions: one launch each.

use super::arguments::{Rotation, Windows};
use super::memory::Fixed;
use super::queue::{Argument, Launch, Queue};
use super::tensor::CudaTensor;
use crate::check::Dims;
use crate::ops::{Activation, NormKind, Result};

/// Threads of a block of these kernels.
const THREADS: u32 = 256;

/// Blocks that share the work of a launch, at most: enough for every device.
const MAX_BLOCKS: usize = 2048;

/// Scale and bias of a norm, f32 `[width]` each.
#[derive(Debug)]
pub struct CudaNorm {
    pub(super) kind: NormKind,
    pub(super) width: usize,
    pub(super) scale: Fixed,
    pub(super) bias: Option<Fixed>,
    pub(super) eps: f32,
}

/// An embedding table in the element of activations, `[n_rows, width]`.
#[derive(Debug)]
pub struct CudaTable {
    pub(super) rows: Fixed,
    pub(super) dims: Dims,
}

/// Taps of a depthwise convolution, f32: `[down · across, channels]`, and `[channels]`.
#[derive(Debug)]
pub struct CudaDepthwise {
    pub(super) channels: usize,
    pub(super) kernel: [usize; 2],
    pub(super) weight: Fixed,
    pub(super) bias: Option<Fixed>,
}

/// The number of an activation in `activation.cuh`.
pub(super) fn activation_number(act: Activation) -> u32 {
    match act {
        Activation::None => 0,
        Activation::Gelu => 1,
        Activation::GeluTanh => 2,
        Activation::QuickGelu => 3,
        Activation::Silu => 4,
        Activation::Relu => 5,
        Activation::Tanh => 6,
        Activation::Sigmoid => 7,
    }
}

/// A launch in which all blocks share the work on so many values.
pub(super) fn shared_work(n_values: usize) -> Launch {
    let blocks = n_values.div_ceil(THREADS as usize).min(MAX_BLOCKS);
    Launch { grid: [blocks, 1, 1], threads: THREADS, shared_bytes: 0 }
}

/// Rows of a matrix at `from` of which `rows` are the indices.
pub(super) fn gather(
    op: &'static str,
    queue: &Queue,
    from: u64,
    rows: u64,
    dims: Dims,
) -> Result<CudaTensor> {
    let y = CudaTensor::new(op, queue, dims)?;
    let function = queue.kernel(queue.device().kernels.gather_rows);
    let [n_rows, width] = [dims.0, dims.1].map(|n| n as u32);
    let arguments: [&dyn Argument; 5] = [&y.address(), &from, &rows, &n_rows, &width];
    queue.launch(op, function, shared_work(y.n_values()), arguments)?;
    Ok(y)
}

/// Device addresses of the terms of weighted sums, `[n_sums, n_terms]` each.
pub(super) struct Terms {
    pub(super) rows: u64,
    pub(super) weights: u64,
    pub(super) n_terms: usize,
}

/// Weighted sums of rows of a matrix at `from`.
pub(super) fn weighted(queue: &Queue, from: u64, terms: Terms, dims: Dims) -> Result<CudaTensor> {
    let op = "embed_weighted";
    let y = CudaTensor::new(op, queue, dims)?;
    let function = queue.kernel(queue.device().kernels.weighted_rows);
    let Terms { rows, weights, n_terms } = terms;
    let [n_sums, n_terms, width] = [dims.0, n_terms, dims.1].map(|n| n as u32);
    let arguments: [&dyn Argument; 7] = [&y.address(), &from, &rows, &weights, &n_sums, &n_terms, &width];
    queue.launch(op, function, shared_work(y.n_values()), arguments)?;
    Ok(y)
}

/// `y = act(sums + bias) + residual`, sums in f32; an address of 0 is none.
pub(super) fn finish_linear(
    queue: &Queue,
    [y, sums]: [&CudaTensor; 2],
    [bias, residual]: [u64; 2],
    act: Activation,
) -> Result<()> {
    let function = queue.kernel(queue.device().kernels.finish_linear);
    let [n_rows, width] = [y.dims().0, y.dims().1].map(|n| n as u32);
    let (act, x) = (activation_number(act), sums.address());
    let arguments: [&dyn Argument; 7] = [&y.address(), &x, &bias, &residual, &act, &n_rows, &width];
    queue.launch("linear", function, shared_work(y.n_values()), arguments)
}

/// `x = c · tanh(x / c)`.
pub(super) fn softcap(queue: &Queue, x: &mut CudaTensor, c: f32) -> Result<()> {
    let op = "softcap";
    let at = x.write(op, queue)?;
    let [n_rows, width] = [x.dims().0, x.dims().1].map(|n| n as u32);
    let function = queue.kernel(queue.device().kernels.softcap);
    let arguments: [&dyn Argument; 4] = [&at, &c, &n_rows, &width];
    queue.launch(op, function, shared_work(x.n_values()), arguments)
}

/// `x = x · act(gate)`.
pub(super) fn multiply_gated(
    queue: &Queue,
    x: &mut CudaTensor,
    gate: &CudaTensor,
    act: Activation,
) -> Result<()> {
    let op = "multiply_gated";
    let at = x.write(op, queue)?;
    let [n_rows, width] = [x.dims().0, x.dims().1].map(|n| n as u32);
    let (act, function) = (activation_number(act), queue.kernel(queue.device().kernels.multiply_gated));
    let arguments: [&dyn Argument; 5] = [&at, &gate.address(), &act, &n_rows, &width];
    queue.launch(op, function, shared_work(x.n_values()), arguments)
}

/// Each row normalised.
pub(super) fn norm(queue: &Queue, x: &CudaTensor, norm: &CudaNorm) -> Result<CudaTensor> {
    let op = "norm";
    let y = CudaTensor::new(op, queue, x.dims())?;
    if y.n_values() == 0 {
        return Ok(y);
    }
    let function = queue.kernel(queue.device().kernels.norm);
    let launch = Launch { grid: [x.dims().0, 1, 1], threads: THREADS, shared_bytes: 0 };
    let (none, bias) = (0_u64, norm.bias.as_ref().map_or(0, Fixed::address));
    let (is_layer, width) = (u32::from(norm.kind == NormKind::Layer), norm.width as u32);
    let arguments: [&dyn Argument; 9] = [
        &y.address(),
        &none,
        &x.address(),
        &none,
        &norm.scale.address(),
        &bias,
        &norm.eps,
        &is_layer,
        &width,
    ];
    queue.launch(op, function, launch, arguments)?;
    Ok(y)
}

/// Each sequence normalised as a whole; `starts` are the offsets of `n_seqs`.
pub(super) fn group_norm(
    queue: &Queue,
    x: &CudaTensor,
    norm: &CudaNorm,
    starts: u64,
    n_seqs: usize,
) -> Result<CudaTensor> {
    let op = "group_norm";
    let y = CudaTensor::new(op, queue, x.dims())?;
    if y.n_values() == 0 {
        return Ok(y);
    }
    let function = queue.kernel(queue.device().kernels.group_norm);
    let launch = Launch { grid: [n_seqs, 1, 1], threads: THREADS, shared_bytes: 0 };
    let bias = norm.bias.as_ref().map_or(0, Fixed::address);
    let (is_layer, width) = (u32::from(norm.kind == NormKind::Layer), norm.width as u32);
    let arguments: [&dyn Argument; 8] =
        [&y.address(), &x.address(), &starts, &norm.scale.address(), &bias, &norm.eps, &is_layer, &width];
    queue.launch(op, function, launch, arguments)?;
    Ok(y)
}

/// Rotates the heads of `x` in place.
pub(super) fn rope(queue: &Queue, x: &mut CudaTensor, head_dim: usize, rotation: Rotation) -> Result<()> {
    let op = "rope";
    let (n_tokens, width) = x.dims();
    let n_heads = width / head_dim;
    let n_pairs = n_tokens * n_heads * (rotation.rotary_dim as usize / 2);
    if n_pairs == 0 {
        return Ok(());
    }
    let function = queue.kernel(queue.device().kernels.rope);
    let at = x.write(op, queue)?;
    let [n_tokens, n_heads, head_dim, width] = [n_tokens, n_heads, head_dim, width].map(|n| n as u32);
    let arguments: [&dyn Argument; 6] = [&at, &rotation, &n_tokens, &n_heads, &head_dim, &width];
    queue.launch(op, function, shared_work(n_pairs), arguments)
}

/// Windows for a product: `[windows, channels · taps]`.
pub(super) fn unfold(
    op: &'static str,
    queue: &Queue,
    x: &CudaTensor,
    windows: Windows,
    dims: Dims,
) -> Result<CudaTensor> {
    let y = CudaTensor::new(op, queue, dims)?;
    let function = queue.kernel(queue.device().kernels.unfold);
    let channels = x.dims().1 as u32;
    let arguments: [&dyn Argument; 4] = [&y.address(), &x.address(), &windows, &channels];
    queue.launch(op, function, shared_work(y.n_values()), arguments)?;
    Ok(y)
}

/// Each channel convolved by itself: `[windows, channels]`.
pub(super) fn depthwise(
    queue: &Queue,
    x: &CudaTensor,
    w: &CudaDepthwise,
    windows: Windows,
    n_rows: usize,
) -> Result<CudaTensor> {
    let op = "depthwise2d";
    let y = CudaTensor::new(op, queue, (n_rows, w.channels))?;
    let function = queue.kernel(queue.device().kernels.depthwise);
    let (bias, channels) = (w.bias.as_ref().map_or(0, Fixed::address), w.channels as u32);
    let arguments: [&dyn Argument; 6] =
        [&y.address(), &x.address(), &w.weight.address(), &bias, &windows, &channels];
    queue.launch(op, function, shared_work(y.n_values()), arguments)?;
    Ok(y)
}
