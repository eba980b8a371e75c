//! A back end that counts the weights it is handed and computes nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use triptych_kernels::ops::*;

/// Counts elements; clones count together.
#[derive(Clone, Default)]
pub struct Counting(Arc<AtomicUsize>);

impl Counting {
    /// Elements so far.
    pub fn n_elements(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    fn count(&self, weight: WeightView<'_>) {
        self.0.fetch_add(weight.shape.iter().product(), Ordering::Relaxed);
    }
}

fn refuse<T>(op: &'static str) -> Result<T> {
    Err(KernelError::Library { op, message: "this back end only counts".into() })
}

impl Backend for Counting {
    type Tensor = ();
    type Linear = ();
    type Table = ();
    type Norm = ();
    type Depthwise = ();
    type KvCache = ();
    type HostKvCache = ();

    fn name(&self) -> &'static str {
        "counting"
    }
    fn load_linear(&self, parts: &[LinearPart<'_>]) -> Result<()> {
        for part in parts {
            self.count(part.weight);
            part.bias.into_iter().for_each(|b| self.count(b));
        }
        Ok(())
    }
    fn load_table(&self, table: WeightView<'_>, _: f32) -> Result<()> {
        self.count(table);
        Ok(())
    }
    fn load_norm(
        &self,
        _: NormKind,
        scale: WeightView<'_>,
        bias: Option<WeightView<'_>>,
        _: f32,
    ) -> Result<()> {
        self.count(scale);
        bias.into_iter().for_each(|b| self.count(b));
        Ok(())
    }
    fn load_depthwise(&self, weight: WeightView<'_>, bias: Option<WeightView<'_>>) -> Result<()> {
        self.count(weight);
        bias.into_iter().for_each(|b| self.count(b));
        Ok(())
    }
    fn kv_cache(&self, _: KvLayout) -> Result<()> {
        Ok(())
    }
    fn kv_block_bytes(&self, _: KvLayout) -> usize {
        0
    }
    fn dims(&self, _: &()) -> (usize, usize) {
        (0, 0)
    }
    fn upload(&self, _: Vec<f32>, _: usize, _: usize) -> Result<()> {
        refuse("upload")
    }
    fn download(&self, _: &()) -> Result<Vec<f32>> {
        refuse("download")
    }
    fn embed(&self, _: &(), _: &[u32]) -> Result<()> {
        refuse("embed")
    }
    fn gather_rows(&self, _: &(), _: &[u32]) -> Result<()> {
        refuse("gather_rows")
    }
    fn scatter_rows(&self, _: &mut (), _: &[u32], _: &()) -> Result<()> {
        refuse("scatter_rows")
    }
    fn columns(&self, _: &(), _: usize, _: usize) -> Result<()> {
        refuse("columns")
    }
    fn merge_rows(&self, _: (), _: usize) -> Result<()> {
        refuse("merge_rows")
    }
    fn split_rows(&self, _: (), _: usize) -> Result<()> {
        refuse("split_rows")
    }
    fn linear(&self, _: &(), _: &(), _: Activation, _: Option<&()>) -> Result<()> {
        refuse("linear")
    }
    fn norm(&self, _: &(), _: &()) -> Result<()> {
        refuse("norm")
    }
    fn add(&self, _: &mut (), _: &()) -> Result<()> {
        refuse("add")
    }
    fn gate(&self, _: &(), _: Activation) -> Result<()> {
        refuse("gate")
    }
    fn group_norm(&self, _: &(), _: &(), _: &[u32]) -> Result<()> {
        refuse("group_norm")
    }
    fn rope(&self, _: &mut (), _: RopeShape, _: &[f32], _: &[f32]) -> Result<()> {
        refuse("rope")
    }
    fn unfold(&self, _: &(), _: Unfold) -> Result<()> {
        refuse("unfold")
    }
    fn unfold2d(&self, _: &(), _: Conv2d) -> Result<()> {
        refuse("unfold2d")
    }
    fn depthwise2d(&self, _: &(), _: &(), _: Conv2d) -> Result<()> {
        refuse("depthwise2d")
    }
    fn attention(&self, _: Qkv<'_, ()>, _: AttentionShape, _: Varlen<'_>) -> Result<()> {
        refuse("attention")
    }
    fn write_kv(&self, _: &mut (), _: usize, _: [&(); 2], _: &[u32]) -> Result<()> {
        refuse("write_kv")
    }
    fn copy_blocks(&self, _: &mut (), _: &[(u32, u32)]) -> Result<()> {
        refuse("copy_blocks")
    }
    fn host_kv_cache(&self, _: KvLayout) -> Result<()> {
        Ok(())
    }
    fn swap_out(&self, _: &(), _: &mut (), _: &[(u32, u32)]) -> Result<()> {
        refuse("swap_out")
    }
    fn swap_in(&self, _: &(), _: &mut (), _: &[(u32, u32)]) -> Result<()> {
        refuse("swap_in")
    }
    fn paged_attention(
        &self,
        _: &(),
        _: KvLayer<'_, ()>,
        _: AttentionShape,
        _: PagedBatch<'_>,
    ) -> Result<()> {
        refuse("paged_attention")
    }
}
