//! Linear layers that low-rank adapters can be added to, for some rows of a step or all.
//!
//! An adapter of a layer is a pair of matrices: `y + B(A x)` in the place of `y`
//! (LoRA, <https://arxiv.org/abs/2106.09685>). Rows of one adapter are gathered, computed and put back, so that a step may have
//! rows of several (Punica, <https://arxiv.org/abs/2310.18547>; S-LoRA, <https://arxiv.org/abs/2311.03285>). A row without an
//! adapter is computed as if there were none. It knows no file and no name: a layer has a number among those of its loader.

use super::site::Site;
use crate::error::ModelError;
use triptych_kernels::Backend;
use triptych_kernels::ops::{Activation, Indices, LinearPart};

/// A linear layer, and its number among those of its loader.
pub struct AdaptedLinear<B: Backend> {
    base: B::Linear,
    // `None`: no adapter is added to it.
    site: Option<Site>,
}

/// The matrices of an adapter for one layer: `a: [rank, in]`, `b: [out, rank]`, scaled.
pub struct LowRank<B: Backend> {
    a: B::Linear,
    b: B::Linear,
}

/// The layers of an adapter on a back end.
pub struct LoadedAdapter<B: Backend> {
    // By the number of their layer; `None` where it is not adapted.
    layers: Vec<Option<LowRank<B>>>,
}

/// Rows of one adapter.
pub struct AdapterGroup<'a, B: Backend> {
    /// The rows; `None`: all.
    pub rows: Option<Indices>,
    /// Their adapter.
    pub adapter: &'a LoadedAdapter<B>,
}

/// A back end, and the adapters of the rows that layers are given.
pub struct Adapted<'a, B: Backend> {
    /// The back end.
    pub backend: &'a B,
    // The step that rows are staged in; `None` without adapters.
    step: Option<&'a B::Step>,
    groups: &'a [AdapterGroup<'a, B>],
}

impl<B: Backend> Clone for Adapted<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Adapted<'_, B> {}

impl<'a, B: Backend> From<&'a B> for Adapted<'a, B> {
    fn from(backend: &'a B) -> Self {
        Self { backend, step: None, groups: &[] }
    }
}

impl<B: Backend> AdaptedLinear<B> {
    /// A layer that adapters find under `site`.
    pub(super) fn new(base: B::Linear, site: Site) -> Self {
        Self { base, site: Some(site) }
    }

    /// A layer that adapters do not find.
    pub fn fixed(base: B::Linear) -> Self {
        Self { base, site: None }
    }
}

impl<B: Backend> LowRank<B> {
    /// Takes `a: [rank, in]` and `b: [out, rank]` to a back end, in as many bits as it keeps activations in.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for shapes that do not fit the values, or without memory.
    pub fn load(backend: &B, a: LinearPart<'_>, b: LinearPart<'_>) -> Result<Self, ModelError> {
        Ok(Self { a: backend.load_router(a)?, b: backend.load_router(b)? })
    }
}

impl<B: Backend> LoadedAdapter<B> {
    /// An adapter by the numbers of the layers.
    pub fn new(layers: Vec<Option<LowRank<B>>>) -> Self {
        Self { layers }
    }

    fn layer(&self, site: Option<Site>) -> Option<&LowRank<B>> {
        self.layers.get(site?.0)?.as_ref()
    }
}

impl<'a, B: Backend> Adapted<'a, B> {
    /// A back end for layers whose rows have these adapters; no row is in two groups.
    pub fn new(backend: &'a B, step: &'a B::Step, groups: &'a [AdapterGroup<'a, B>]) -> Self {
        Self { backend, step: Some(step), groups }
    }

    /// `act(x Wᵀ + b + B(A x))`, plus `residual` if there is one: `[n_tokens, out]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a wrong width.
    pub fn linear(
        self,
        x: &B::Tensor,
        w: &AdaptedLinear<B>,
        act: Activation,
        residual: Option<&B::Tensor>,
    ) -> Result<B::Tensor, ModelError> {
        let backend = self.backend;
        let mut y = backend.linear(x, &w.base, act, residual)?;
        for AdapterGroup { rows, adapter } in self.groups {
            let Some(pair) = adapter.layer(w.site) else { continue };
            let (Some(rows), Some(step)) = (*rows, self.step) else {
                y = adapted(backend, (x, y), w, (pair, act, residual))?;
                continue;
            };
            if rows.len() == 0 {
                continue;
            }
            let own = |from: &B::Tensor| backend.gather_rows(step, from, rows);
            let residual = residual.map(own).transpose()?;
            let sum = adapted(backend, (&own(x)?, own(&y)?), w, (pair, act, residual.as_ref()))?;
            backend.scatter_rows(step, &mut y, rows, &sum)?;
        }
        Ok(y)
    }
}

/// The rows `x: [n, in]` of one adapter; `y: [n, out]` are those without it.
fn adapted<B: Backend>(
    backend: &B,
    (x, y): (&B::Tensor, B::Tensor),
    w: &AdaptedLinear<B>,
    (pair, act, residual): (&LowRank<B>, Activation, Option<&B::Tensor>),
) -> Result<B::Tensor, ModelError> {
    let low = backend.linear(x, &pair.a, Activation::None, None)?;
    if act == Activation::None {
        return Ok(backend.linear(&low, &pair.b, Activation::None, Some(&y))?);
    }
    // The sum comes before the activation, which the layer without its adapter has applied already.
    let y = backend.linear(x, &w.base, Activation::None, None)?;
    let sum = backend.linear(&low, &pair.b, Activation::None, Some(&y))?;
    let mut y = activated(backend, &sum, act)?;
    if let Some(residual) = residual {
        backend.add(&mut y, residual)?;
    }
    Ok(y)
}

/// An activation by itself: ones, multiplied with it. Only feed-forwards without a gate ask for it, and of those only ones whose
/// first layer is adapted.
fn activated<B: Backend>(backend: &B, x: &B::Tensor, act: Activation) -> Result<B::Tensor, ModelError> {
    let (n_tokens, width) = backend.dims(x);
    let mut ones = backend.upload(vec![1.0; n_tokens * width], n_tokens, width)?;
    backend.multiply_gated(&mut ones, x, act)?;
    Ok(ones)
}
