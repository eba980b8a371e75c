//! A tower of stages whose layers attend inside windows, then between channels (DaViT).
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/florence2/modeling_florence2.py>
//! (`Florence2VisionBackbone`); paper: <https://arxiv.org/abs/2204.03645>. Rows are pixels, then positions of ever
//! coarser grids. Padding of windows takes part, with the bias as its keys and values. Images are computed one by one.

use super::windows::{StagedWindows, WindowPartition};
use crate::error::ModelError;
use crate::layers::{FeedForward, LinearShape, Loader, Residual, SelfAttention};
use crate::spec::{DavitSpec, DavitStageSpec};
use triptych_kernels::ops::{
    Activation, AttentionShape, Conv2d, Mask, Qkv, ScoreBias, Sequences, StageBuilder, Varlen,
};
use triptych_kernels::{Backend, KernelError};

/// Taps of the convolutions within layers.
const TAPS: usize = 3;

/// The tower: all stages with their weights.
pub(super) struct DavitTower<B: Backend> {
    stages: Vec<DavitStage<B>>,
    window: usize,
}

struct DavitStage<B: Backend> {
    // Before the convolution or after it, as the spec says.
    norm: B::Norm,
    convolution: B::Linear,
    spec: DavitStageSpec,
    blocks: Vec<[DavitHalfBlock<B>; 2]>,
}

/// DavitHalfBlock of a layer: attention of one kind, then a feed-forward, each after a depthwise convolution.
struct DavitHalfBlock<B: Backend> {
    convolutions: [B::Depthwise; 2],
    attention_norm: Residual<B>,
    attention: SelfAttention<B>,
    feed_forward_norm: Residual<B>,
    feed_forward: FeedForward<B>,
}

/// An image in a step.
pub(super) struct DavitImage {
    /// Pixels down and across.
    pixels: [usize; 2],
    /// Of each stage.
    grids: Vec<DavitGrid>,
}

/// The grid of a stage.
#[derive(Clone, Copy)]
struct DavitGrid {
    size: [usize; 2],
    windows: StagedWindows,
    /// Groups of channels.
    groups: Sequences,
}

impl<B: Backend> DavitTower<B> {
    /// Loads all stages.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(loader: &Loader<'_, B>, spec: &DavitSpec) -> Result<Self, ModelError> {
        let stages =
            spec.stages.iter().enumerate().map(|(i, stage)| DavitStage::load(loader, spec, i, stage));
        Ok(Self { stages: stages.collect::<Result<_, _>>()?, window: spec.window })
    }

    /// Adds an image of so many pixels down and across to a step.
    ///
    /// # Errors
    /// [`KernelError`] if the step has no room for it.
    pub fn stage(&self, builder: &mut StageBuilder, pixels: [usize; 2]) -> Result<DavitImage, KernelError> {
        let mut grid = pixels;
        let of_stage = |stage: &DavitStage<B>| {
            grid = grid.map(|n| stage.spec.output_size(n));
            let windows = WindowPartition { grid, side: self.window, shift: 0 };
            let group = stage.spec.stack.attention.shape.widths()[0] / stage.spec.n_groups.max(1);
            let offsets: Vec<u32> = (0..=stage.spec.n_groups).map(|i| (i * group) as u32).collect();
            Ok(DavitGrid {
                size: grid,
                windows: windows.stage(builder)?,
                groups: builder.self_sequences(&offsets)?,
            })
        };
        let grids = self.stages.iter().map(of_stage).collect::<Result<_, KernelError>>()?;
        Ok(DavitImage { pixels, grids })
    }

    /// Pixels of an image, `x: [n_pixels, channels]`, to the rows of the last stage,
    /// `[n_positions, width]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if a back end refuses the shapes.
    pub fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        mut x: B::Tensor,
        image: &DavitImage,
    ) -> Result<B::Tensor, ModelError> {
        let mut size = image.pixels;
        for (stage, grid) in self.stages.iter().zip(&image.grids) {
            x = stage.embed(backend, &x, size)?;
            size = grid.size;
            for [spatial, channel] in &stage.blocks {
                x = spatial.forward(backend, step, &x, (*grid, AttentionAxis::Windows))?;
                x = channel.forward(backend, step, &x, (*grid, AttentionAxis::Channels))?;
            }
        }
        Ok(x)
    }
}

impl<B: Backend> DavitStage<B> {
    fn load(
        loader: &Loader<'_, B>,
        spec: &DavitSpec,
        idx: usize,
        stage: &DavitStageSpec,
    ) -> Result<Self, ModelError> {
        let names = spec.names;
        let hidden = stage.stack.hidden;
        let own = loader.layer(names.convolutions, idx);
        let shape = [hidden, stage.channels, stage.kernel, stage.kernel];
        let part = LinearShape { name: names.convolution, shape: &shape, bias: true };
        let normed = if stage.norm_first { stage.channels } else { hidden };
        let stages = loader.layer(names.blocks, idx);
        let block = |i: usize| {
            let half = |name: &str, attention| {
                DavitHalfBlock::load(&stages.layer_part(i, name), spec, stage, attention)
            };
            Ok::<_, ModelError>([half(names.spatial, &names.window)?, half(names.channel, &names.channels)?])
        };
        Ok(Self {
            norm: own.norm(names.norm, stage.stack.norm, normed)?,
            convolution: own.linear(&[part])?,
            blocks: (0..stage.stack.n_layers).map(block).collect::<Result<_, _>>()?,
            spec: stage.clone(),
        })
    }

    /// The convolution of the stage: rows `[grid[0] · grid[1], channels]` to `[n_positions, hidden]`.
    fn embed(&self, backend: &B, x: &B::Tensor, grid: [usize; 2]) -> Result<B::Tensor, ModelError> {
        let DavitStageSpec { kernel, stride, padding, norm_first, .. } = self.spec;
        let conv = Conv2d {
            n_images: 1,
            size: grid,
            kernel: [kernel; 2],
            stride: [stride; 2],
            padding: [padding; 2],
        };
        let windows = match norm_first {
            true => backend.unfold2d(&backend.norm(x, &self.norm)?, conv)?,
            false => backend.unfold2d(x, conv)?,
        };
        let rows = backend.linear(&windows, &self.convolution, Activation::None, None)?;
        Ok(if norm_first { rows } else { backend.norm(&rows, &self.norm)? })
    }
}

/// The values that an attention mixes.
#[derive(Clone, Copy)]
enum AttentionAxis {
    /// Rows of a window.
    Windows,
    /// Channels of a group.
    Channels,
}

impl<B: Backend> DavitHalfBlock<B> {
    fn load(
        loader: &Loader<'_, B>,
        spec: &DavitSpec,
        stage: &DavitStageSpec,
        attention: &crate::spec::AttentionNames,
    ) -> Result<Self, ModelError> {
        let names = spec.names;
        let stack = &stage.stack;
        let [first, second] = names.depthwise;
        Ok(Self {
            convolutions: [
                loader.depthwise(first, stack.hidden, TAPS)?,
                loader.depthwise(second, stack.hidden, TAPS)?,
            ],
            attention_norm: Residual::of_attention(loader, attention.norm, stack)?,
            attention: SelfAttention::load(loader, attention, stack)?,
            feed_forward_norm: Residual::of_feed_forward(loader, names.stack.feed_forward_norm, stack)?,
            feed_forward: FeedForward::load(loader, &names.stack, stack)?,
        })
    }

    fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        x: &B::Tensor,
        (grid, mixing): (DavitGrid, AttentionAxis),
    ) -> Result<B::Tensor, ModelError> {
        let x = self.convolve(backend, x, grid.size, 0)?;
        let x = self.attention_norm.around(backend, &x, |input, residual| {
            let context = match mixing {
                AttentionAxis::Windows => self.mix_windows(backend, step, input, grid.windows)?,
                AttentionAxis::Channels => self.mix_channels(backend, step, input, grid.groups)?,
            };
            self.attention.output(backend, &context, residual)
        })?;
        let x = self.convolve(backend, &x, grid.size, 1)?;
        self.feed_forward_norm
            .around(backend, &x, |input, residual| self.feed_forward.forward(backend, input, residual))
    }

    fn convolve(
        &self,
        backend: &B,
        x: &B::Tensor,
        grid: [usize; 2],
        which: usize,
    ) -> Result<B::Tensor, ModelError> {
        let conv =
            Conv2d { n_images: 1, size: grid, kernel: [TAPS; 2], stride: [1; 2], padding: [TAPS / 2; 2] };
        let mut sum = backend.depthwise2d(x, &self.convolutions[which], conv)?;
        backend.add(&mut sum, x)?;
        Ok(sum)
    }

    fn mix_windows(
        &self,
        backend: &B,
        step: &B::Step,
        x: &B::Tensor,
        windows: StagedWindows,
    ) -> Result<B::Tensor, ModelError> {
        let cut = windows.cut.apply(backend, step, x)?;
        let [q, k, v] = &self.attention.project(backend, step, &cut, None)?;
        let seqs = Varlen { seqs: windows.seqs, mask: Mask::Full, bias: ScoreBias::None };
        let context = backend.attention(step, Qkv { q, k, v }, self.attention.shape(), seqs)?;
        Ok(backend.gather_rows(step, &context, windows.back)?)
    }

    /// Channels attend to the channels of their group: each group is a sequence of channels, each channel a row over all
    /// positions of `x: [n_positions, hidden]`.
    fn mix_channels(
        &self,
        backend: &B,
        step: &B::Step,
        x: &B::Tensor,
        groups: Sequences,
    ) -> Result<B::Tensor, ModelError> {
        let [q, k, v] = self.attention.project(backend, step, x, None)?;
        let n_positions = backend.dims(&q).0;
        let [q, k, v] = &[backend.transpose(&q, 1)?, backend.transpose(&k, 1)?, backend.transpose(&v, 1)?];
        let seqs = Varlen { seqs: groups, mask: Mask::Full, bias: ScoreBias::None };
        let scale = 1.0 / (n_positions as f32).sqrt();
        let shape = AttentionShape { n_heads: 1, n_kv_heads: 1, head_dim: n_positions, scale, softcap: None };
        let context = backend.attention(step, Qkv { q, k, v }, shape, seqs)?;
        Ok(backend.transpose(&context, 1)?)
    }
}
