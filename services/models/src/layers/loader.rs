//! Names and shapes of a spec to layers on a back end.

use super::AdaptedLinear;
use super::site::{LinearSite, Site, SitePart};
use crate::error::ModelError;
use crate::spec::NormSpec;
use crate::weights::{Tensor, TensorRole, Weights};
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;
use triptych_kernels::Backend;
use triptych_kernels::ops::{LinearPart, WeightView};

/// Loads tensors whose names have the same prefix.
#[derive(Debug)]
pub struct Loader<'a, B> {
    backend: &'a B,
    weights: &'a Weights,
    // Full prefixes of the checkpoint generations, in the order they are tried.
    prefixes: Vec<String>,
    // Names of linear layers, each with the name of the factors on its outputs.
    scales: Vec<[&'static str; 2]>,
    // True if linear layers are stored `[in, out]`.
    is_inputs_first: bool,
    // Layers that adapters can be added to, of all loaders that came from one.
    sites: Arc<Mutex<Vec<LinearSite>>>,
}

/// One linear layer as stored.
#[derive(Clone, Copy, Debug)]
pub struct LinearShape<'a> {
    /// Name without `.weight` and `.bias`.
    pub name: &'a str,
    /// Dimensions of the weight, outputs first.
    pub shape: &'a [usize],
    /// True if it has a bias.
    pub bias: bool,
}

/// A linear layer as it is stored, to be split or scaled before it is packed.
#[derive(Clone, Debug)]
pub struct StoredLinear<'a> {
    weight: Tensor<'a>,
    bias: Option<Tensor<'a>>,
    scale: f32,
    // Names as in `SitePart`.
    modules: Vec<String>,
    n_stored: usize,
    first_row: usize,
}

/// Linear layers without biases that are stored as one tensor.
#[derive(Clone, Debug)]
pub struct StackedLinear<'a> {
    // [n, in, out] or [n, out, in].
    weight: Tensor<'a>,
    is_inputs_first: bool,
}

impl StackedLinear<'_> {
    /// Layer `idx`, which must exist.
    #[must_use]
    pub fn element(&self, idx: usize) -> StoredLinear<'_> {
        let weight = self.weight.element(idx);
        let weight = if self.is_inputs_first { weight.transposed() } else { weight };
        StoredLinear::unnamed(weight, None)
    }
}

impl<'a> StoredLinear<'a> {
    /// A layer that adapters are not added to.
    fn unnamed(weight: Tensor<'a>, bias: Option<Tensor<'a>>) -> Self {
        let n_stored = weight.n_rows();
        Self { weight, bias, scale: 1.0, modules: Vec::new(), n_stored, first_row: 0 }
    }
}

impl StoredLinear<'_> {
    /// Its place in a loaded layer.
    fn site_part(&self) -> SitePart {
        let rows = self.first_row..self.first_row + self.weight.n_rows();
        SitePart { modules: self.modules.clone(), n_stored: self.n_stored, rows, scale: self.scale }
    }

    /// The layer as a back end takes it.
    fn part(&self) -> LinearPart<'_> {
        LinearPart {
            weight: self.weight.view(),
            bias: self.bias.as_ref().map(Tensor::view),
            scale: self.scale,
        }
    }

    /// The layer with outputs `rows` only.
    #[must_use]
    pub fn outputs(&self, rows: Range<usize>) -> StoredLinear<'_> {
        let bias = self.bias.as_ref().map(|b| b.rows(rows.clone()));
        let first_row = self.first_row + rows.start;
        let (modules, n_stored) = (self.modules.clone(), self.n_stored);
        StoredLinear { weight: self.weight.rows(rows), bias, scale: self.scale, modules, n_stored, first_row }
    }

    /// The layer with inputs `columns` only, in that order; its bias stays.
    #[must_use]
    pub fn inputs(&self, columns: impl Iterator<Item = usize>) -> StoredLinear<'static> {
        let bias = self.bias.as_ref().map(Tensor::owned);
        StoredLinear { scale: self.scale, ..StoredLinear::unnamed(self.weight.columns(columns), bias) }
    }

    /// The layer without its bias.
    #[must_use]
    pub fn without_bias(self) -> Self {
        Self { bias: None, ..self }
    }

    /// The layer with every output times `factor`.
    #[must_use]
    pub fn scaled(self, factor: f32) -> Self {
        Self { scale: self.scale * factor, ..self }
    }
}

impl<'a, B: Backend> Loader<'a, B> {
    /// A loader of names under any of `prefixes`.
    pub fn new(backend: &'a B, weights: &'a Weights, prefixes: &[&str]) -> Self {
        Self {
            backend,
            weights,
            prefixes: prefixes.iter().map(|p| (*p).to_owned()).collect(),
            scales: Vec::new(),
            is_inputs_first: false,
            sites: Arc::default(),
        }
    }

    /// This loader, multiplying the outputs of each linear layer named by the bare parameter named beside it:
    /// `[linear, factors]`, the factors `[out]`.
    #[must_use]
    pub fn scaling(self, scales: Vec<[&'static str; 2]>) -> Self {
        Self { scales, ..self }
    }

    /// The same loader for linear layers that are stored `[in, out]` where `is_inputs_first`.
    #[must_use]
    pub fn inputs_first(self, is_inputs_first: bool) -> Self {
        Self { is_inputs_first, ..self }
    }

    /// A loader one level down: element `idx` of the list `layers`.
    pub fn layer(&self, layers: &str, idx: usize) -> Self {
        self.under(|p| format!("{p}{layers}.{idx}."))
    }

    /// A loader two levels down: `part` of element `idx`.
    #[must_use]
    pub fn layer_part(&self, idx: usize, part: &str) -> Self {
        self.under(|p| format!("{p}{idx}.{part}."))
    }

    /// A loader of names under any of `prefixes`, whose layers are among the sites of this one.
    #[must_use]
    pub fn beside(&self, prefixes: &[&str]) -> Self {
        Self { sites: self.sites.clone(), ..Self::new(self.backend, self.weights, prefixes) }
    }

    fn under(&self, prefix: impl Fn(&String) -> String) -> Self {
        Self {
            backend: self.backend,
            weights: self.weights,
            prefixes: self.prefixes.iter().map(prefix).collect(),
            scales: Vec::new(),
            is_inputs_first: self.is_inputs_first,
            sites: self.sites.clone(),
        }
    }

    /// The layers that adapters can be added to, by their numbers: those that this loader has loaded, and all that came from it.
    pub fn sites(&self) -> Vec<LinearSite> {
        self.sites.lock().clone()
    }

    /// Loads layers that read the same input as one that adapters can be added to, outputs side by side.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn adapted(&self, parts: &[LinearShape<'_>]) -> Result<AdaptedLinear<B>, ModelError> {
        let stored: Vec<StoredLinear<'a>> = parts.iter().map(|p| self.stored(p)).collect::<Result<_, _>>()?;
        self.pack_adapted(&stored)
    }

    /// Packs layers that read the same input as one that adapters can be added to, outputs side by side.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if their inputs differ.
    pub fn pack_adapted(&self, parts: &[StoredLinear<'_>]) -> Result<AdaptedLinear<B>, ModelError> {
        let base = self.pack(parts)?;
        let n_in = parts.first().map_or(0, |part| part.weight.width());
        let mut sites = self.sites.lock();
        sites.push(LinearSite { n_in, parts: parts.iter().map(StoredLinear::site_part).collect() });
        Ok(AdaptedLinear::new(base, Site(sites.len() - 1)))
    }

    /// The back end that layers are loaded on.
    pub fn backend(&self) -> &'a B {
        self.backend
    }

    /// Loads layers that read the same input as one, outputs side by side.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn linear(&self, parts: &[LinearShape<'_>]) -> Result<B::Linear, ModelError> {
        let stored: Vec<StoredLinear<'a>> = parts.iter().map(|p| self.stored(p)).collect::<Result<_, _>>()?;
        self.pack(&stored)
    }

    /// Packs layers that read the same input as one, outputs side by side.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if their inputs differ.
    pub fn pack(&self, parts: &[StoredLinear<'_>]) -> Result<B::Linear, ModelError> {
        let parts: Vec<LinearPart<'_>> = parts.iter().map(StoredLinear::part).collect();
        Ok(self.backend.load_linear(&parts)?)
    }

    /// Packs layers of one expert that read the same input as one, outputs side by side.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if their inputs differ.
    pub fn expert(&self, parts: &[StoredLinear<'_>]) -> Result<B::Linear, ModelError> {
        let parts: Vec<LinearPart<'_>> = parts.iter().map(StoredLinear::part).collect();
        Ok(self.backend.load_expert(&parts)?)
    }

    /// Loads a layer that gives the logits of a router, without bias; `shape: [n_experts, hidden]`.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn router(&self, name: &str, shape: [usize; 2]) -> Result<B::Linear, ModelError> {
        let router = self.stored(&LinearShape { name, shape: &shape, bias: false })?;
        Ok(self.backend.load_router(router.part())?)
    }

    /// Finds a stack of linear layers without biases that is a bare parameter: inputs first, or as it has become by a load and a
    /// save of transformers 5, outputs first. A shape that is both counts as outputs first, as it does there.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn stacked(&self, name: &str, [n, n_in, n_out]: [usize; 3]) -> Result<StackedLinear<'a>, ModelError> {
        let (weight, is_inputs_first) = match self.bare(name, &[n, n_out, n_in], TensorRole::Matrix) {
            Err(ModelError::TensorShape { .. }) => {
                (self.bare(name, &[n, n_in, n_out], TensorRole::Matrix)?, true)
            }
            outputs_first => (outputs_first?, false),
        };
        Ok(StackedLinear { weight, is_inputs_first })
    }

    /// Finds the weight of a stack of linear layers without biases, `[n, n_out, n_in]`.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn stacked_weight(
        &self,
        name: &str,
        [n, n_in, n_out]: [usize; 3],
    ) -> Result<StackedLinear<'a>, ModelError> {
        let weight = self.tensor(name, "weight", &[n, n_out, n_in], TensorRole::Matrix)?;
        Ok(StackedLinear { weight, is_inputs_first: false })
    }

    /// Finds a layer without packing it.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn stored(&self, part: &LinearShape<'_>) -> Result<StoredLinear<'a>, ModelError> {
        let weight = match self.is_inputs_first {
            false => self.tensor(part.name, "weight", part.shape, TensorRole::Matrix)?,
            true => {
                let shape: Vec<usize> = part.shape.iter().rev().copied().collect();
                self.tensor(part.name, "weight", &shape, TensorRole::Matrix)?.transposed()
            }
        };
        let out = part.shape.first().copied().unwrap_or_default();
        let bias =
            if part.bias { Some(self.tensor(part.name, "bias", &[out], TensorRole::Bias)?) } else { None };
        let Some([_, factors]) = self.scales.iter().find(|[linear, _]| *linear == part.name) else {
            let modules = self.prefixes.iter().map(|p| format!("{p}{}", part.name)).collect();
            return Ok(StoredLinear { modules, ..StoredLinear::unnamed(weight, bias) });
        };
        let factors = self.bare_values(factors, &[out])?;
        let bias = bias.map(|b| b.times(&factors));
        Ok(StoredLinear::unnamed(weight.times(&factors), bias))
    }

    /// Loads a norm over rows of `width`: a scale `[width]`, to which a spec may add 1, and a bias `[width]` where the spec has one.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn norm(&self, name: &str, spec: NormSpec, width: usize) -> Result<B::Norm, ModelError> {
        let scale = match spec.unit_offset {
            false => self.tensor(name, "weight", &[width], TensorRole::Scale)?,
            true => self.tensor(name, "weight", &[width], TensorRole::Bias)?.plus_one(),
        };
        let bias = match spec.bias {
            true => Some(self.tensor(name, "bias", &[width], TensorRole::Bias)?),
            false => None,
        };
        Ok(self.backend.load_norm(spec.kind, scale.view(), bias.as_ref().map(Tensor::view), spec.eps)?)
    }

    /// Loads a table `[n_rows, width]`.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn table(&self, name: &str, n_rows: usize, width: usize) -> Result<B::Table, ModelError> {
        self.scaled_table(name, [n_rows, width], 1.0)
    }

    /// Loads a table `[n_rows, width]`, every value times `factor`.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn scaled_table(&self, name: &str, dims: [usize; 2], factor: f32) -> Result<B::Table, ModelError> {
        let table = self.tensor(name, "weight", &dims, TensorRole::Matrix)?;
        Ok(self.backend.load_table(table.view(), factor)?)
    }

    /// Loads a weight of `dims` as a table of rows of `width`, every value times `factor`.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn rows_table(
        &self,
        name: &str,
        dims: [usize; 2],
        width: usize,
        factor: f32,
    ) -> Result<B::Table, ModelError> {
        let table = self.tensor(name, "weight", &dims, TensorRole::Matrix)?.in_rows(width);
        Ok(self.backend.load_table(table.view(), factor)?)
    }

    /// True if the weight `name` is stored.
    pub fn has(&self, name: &str) -> bool {
        self.weights.has(&self.full(name, "weight"))
    }

    /// True if the bare parameter `name` is stored.
    pub fn has_bare(&self, name: &str) -> bool {
        self.weights.has(&self.bare_names(name))
    }

    /// The weight `name`, of `shape`, as it is stored.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn matrix(&self, name: &str, shape: &[usize]) -> Result<Tensor<'a>, ModelError> {
        self.tensor(name, "weight", shape, TensorRole::Matrix)
    }

    /// Loads the linear layer with bias, `[out, in]`, whose name is the prefix itself.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn bare_linear(&self, shape: [usize; 2]) -> Result<B::Linear, ModelError> {
        let weight = self.bare("weight", &shape, TensorRole::Matrix)?;
        let bias = self.bare("bias", &shape[..1], TensorRole::Bias)?;
        self.pack(&[StoredLinear::unnamed(weight, Some(bias))])
    }

    /// Loads a linear layer without bias that is a bare parameter, inputs first; `shape: [out, in]`.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn transposed_linear(&self, name: &str, shape: [usize; 2]) -> Result<B::Linear, ModelError> {
        let [out, width] = shape;
        let weight = self.bare(name, &[width, out], TensorRole::Matrix)?.transposed();
        self.pack(&[StoredLinear::unnamed(weight, None)])
    }

    /// Loads a depthwise convolution of `taps` on a side, with bias.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn depthwise(&self, name: &str, channels: usize, taps: usize) -> Result<B::Depthwise, ModelError> {
        let weight = self.tensor(name, "weight", &[channels, 1, taps, taps], TensorRole::Matrix)?;
        let bias = self.tensor(name, "bias", &[channels], TensorRole::Bias)?;
        Ok(self.backend.load_depthwise(weight.view(), Some(bias.view()))?)
    }

    /// Loads a causal convolution of each of `channels` by itself, `[channels, 1, n_taps]`, without bias.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn causal_conv(
        &self,
        name: &str,
        channels: usize,
        n_taps: usize,
    ) -> Result<B::CausalConv, ModelError> {
        let weight = self.tensor(name, "weight", &[channels, 1, n_taps], TensorRole::Matrix)?;
        Ok(self.backend.load_causal_conv(weight.view(), None)?)
    }

    /// Loads the decays of `n_heads`: the logarithms of their rates and the biases of their inputs, both `[n_heads]` and bare
    /// parameters.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn decay(&self, [a_log, dt_bias]: [&str; 2], n_heads: usize) -> Result<B::Decay, ModelError> {
        let a_log = self.bare(a_log, &[n_heads], TensorRole::Bias)?;
        let dt_bias = self.bare(dt_bias, &[n_heads], TensorRole::Bias)?;
        Ok(self.backend.load_decay(a_log.view(), dt_bias.view())?)
    }

    /// Loads a table of `n_rows` that is stored as a bare parameter, `[1, n_rows, width]`.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn bare_table(&self, name: &str, n_rows: usize, width: usize) -> Result<B::Table, ModelError> {
        let stored = self.bare(name, &[1, n_rows, width], TensorRole::Matrix)?;
        Ok(self.backend.load_table(WeightView { shape: &[n_rows, width], ..stored.view() }, 1.0)?)
    }

    /// Loads a table of `n_rows` that is stored as a bare parameter, `[n_rows, width]`.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn bare_rows(&self, name: &str, n_rows: usize, width: usize) -> Result<B::Table, ModelError> {
        let stored = self.bare(name, &[n_rows, width], TensorRole::Matrix)?;
        Ok(self.backend.load_table(stored.view(), 1.0)?)
    }

    /// Loads a table of one row that is stored as a bare parameter, `[width]` or `[1, width]`.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn bare_row(&self, name: &str, width: usize) -> Result<B::Table, ModelError> {
        let stored = match self.bare(name, &[width], TensorRole::Matrix) {
            Err(ModelError::TensorShape { .. }) => return self.bare_rows(name, 1, width),
            flat => flat?,
        };
        Ok(self.backend.load_table(WeightView { shape: &[1, width], ..stored.view() }, 1.0)?)
    }

    /// Elements, as f32, of the tensor whose full name is a prefix and `name`; of `shape`, row-major.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn bare_values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        Ok(self.bare(name, shape, TensorRole::Matrix)?.values())
    }

    /// Elements, as f32, of one row that is a bare parameter, `[width]` or `[1, 1, width]`.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn row_values(&self, name: &str, width: usize) -> Result<Vec<f32>, ModelError> {
        match self.bare_values(name, &[width]) {
            Err(ModelError::TensorShape { .. }) => self.bare_values(name, &[1, 1, width]),
            flat => flat,
        }
    }

    /// Finds a layer whose weight has no bias beside it, with the bias of the bare parameter `bias`, without packing it.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn stored_with_bias(
        &self,
        part: &LinearShape<'_>,
        bias: &str,
    ) -> Result<StoredLinear<'a>, ModelError> {
        let out = part.shape.first().copied().unwrap_or_default();
        let bias = Some(self.bare(bias, &[out], TensorRole::Bias)?);
        Ok(StoredLinear { bias, ..self.stored(&LinearShape { bias: false, ..*part })? })
    }

    /// The factor of a stored gate: the `tanh` of its one value.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn gate(&self, name: &str) -> Result<f32, ModelError> {
        Ok(self.bare_values(name, &[1])?.first().map_or(0.0, |g| g.tanh()))
    }

    fn tensor(
        &self,
        name: &str,
        ending: &str,
        shape: &[usize],
        role: TensorRole,
    ) -> Result<Tensor<'a>, ModelError> {
        self.weights.tensor(&self.full(name, ending), shape, role)
    }

    fn bare(&self, name: &str, shape: &[usize], role: TensorRole) -> Result<Tensor<'a>, ModelError> {
        self.weights.tensor(&self.bare_names(name), shape, role)
    }

    fn bare_names(&self, name: &str) -> Vec<String> {
        self.prefixes.iter().map(|p| format!("{p}{name}")).collect()
    }

    fn full(&self, name: &str, ending: &str) -> Vec<String> {
        let join = |prefix: &String| match name.is_empty() && prefix.ends_with('.') {
            true => format!("{prefix}{ending}"),
            false => format!("{prefix}{name}.{ending}"),
        };
        self.prefixes.iter().map(join).collect()
    }
}
