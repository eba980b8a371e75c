//! Patches as rows, after learned rows that every image begins with: class and distillation tokens.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/vit/modeling_vit.py>
//! (`ViTEmbeddings`) and `deit/modeling_deit.py` beside it.

use crate::encoder::units::EncodeUnit;
use crate::error::ModelError;
use crate::layers::{LinearShape, Loader};
use triptych_kernels::Backend;
use triptych_kernels::ops::Activation;

/// The stem of [`StemSpec::PrefixedPatches`](crate::spec::StemSpec::PrefixedPatches).
pub(crate) struct PrefixedPatchStem<B: Backend> {
    projection: B::Linear,
    // One row each, `[1, hidden]`.
    prefix: Vec<B::Table>,
    patch_values: usize,
    hidden: usize,
}

impl<B: Backend> PrefixedPatchStem<B> {
    /// Loads the projection of patches of `patch` to rows of `hidden`, named first, and one learned row under
    /// each name after it.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(
        loader: &Loader<'_, B>,
        names: &[&str],
        patch: [usize; 3],
        hidden: usize,
    ) -> Result<Self, ModelError> {
        let (projection, prefix) = names.split_first().map_or(("", names), |(first, rest)| (*first, rest));
        let shape = [hidden, patch[0], patch[1], patch[2]];
        Ok(Self {
            projection: loader.linear(&[LinearShape { name: projection, shape: &shape, bias: true }])?,
            prefix: prefix.iter().map(|name| loader.bare_table(name, 1, hidden)).collect::<Result<_, _>>()?,
            patch_values: patch.iter().product(),
            hidden,
        })
    }

    /// Rows of all units, concatenated: `[Σ n_rows, hidden]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if a back end refuses the shapes.
    pub fn forward(&self, backend: &B, units: &[EncodeUnit<'_>]) -> Result<B::Tensor, ModelError> {
        let values: Vec<f32> = units.iter().flat_map(|p| p.values.floats()).copied().collect();
        let n_patches = values.len() / self.patch_values;
        let patches = backend.upload(values, n_patches, self.patch_values)?;
        let patches = backend.linear(&patches, &self.projection, Activation::None, None)?;
        let n_rows = n_patches + units.len() * self.prefix.len();
        let mut x = backend.upload(vec![0.0; n_rows * self.hidden], n_rows, self.hidden)?;

        let mut firsts = Vec::new();
        let mut patch_rows = Vec::with_capacity(n_patches);
        let mut row = 0;
        for unit in units {
            firsts.push(row);
            let first_patch = row + self.prefix.len() as u32;
            row = first_patch + (unit.patches[0] * unit.patches[1]) as u32;
            patch_rows.extend(first_patch..row);
        }
        backend.scatter_rows(&mut x, &patch_rows, &patches)?;
        for (i, learned) in self.prefix.iter().enumerate() {
            let rows: Vec<u32> = firsts.iter().map(|first| first + i as u32).collect();
            backend.scatter_rows(&mut x, &rows, &backend.embed(learned, &vec![0; rows.len()])?)?;
        }
        Ok(x)
    }
}
