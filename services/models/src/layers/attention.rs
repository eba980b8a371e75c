//! Attention layers: the projections around the attention ops, which the caller chooses.

use super::{Adapted, AdaptedLinear, LinearShape, Loader};
use crate::error::ModelError;
use crate::spec::{
    AttentionNames, AttentionSpec, CrossNames, CrossSpec, HeadNormsSpec, LowRankQuerySpec, NormedPart,
    QkvNames, StackSpec,
};
use std::ops::Range;
use triptych_kernels::Backend;
use triptych_kernels::ops::{Activation, AttentionShape, FusedQkv, Indices, KvSlots, Qkv, Rotation, Varlen};

/// Self-attention of a layer. The query, key and value projections are packed as one matrix.
pub struct SelfAttention<B: Backend> {
    qkv: AdaptedLinear<B>,
    // `None`: the queries of `qkv` are those of the heads.
    low_rank_query: Option<LowRankQuery<B>>,
    // On what attention gives, before the output projection.
    gate: Option<AdaptedLinear<B>>,
    out: AdaptedLinear<B>,
    head_norms: Option<HeadNorms<B>>,
    shape: AttentionShape,
}

/// The second matrix of queries, which makes those of all heads of the fewer values that are packed in their place.
struct LowRankQuery<B: Backend> {
    rank: usize,
    norm: B::Norm,
    up: AdaptedLinear<B>,
}

/// Norms of queries and keys.
struct HeadNorms<B: Backend> {
    q: B::Norm,
    k: B::Norm,
    // Rows of queries, and of keys, that a token's are normalised as.
    n_parts: [usize; 2],
}

/// Rows that attend to each other.
pub struct AttentionRows<'a, B: Backend> {
    /// Their sequences.
    pub seqs: Varlen<'a, B::Bias, B::Tensor>,
    /// Rotation of queries and keys.
    pub rotation: Option<Rotation>,
    /// Rows whose keys and values are attended to, which may occur twice; `None`: all, in their order.
    pub key_rows: Option<Indices>,
}

/// Rows whose keys and values go to a cache.
pub struct CachedRows<'a, B: Backend> {
    /// Slot of each row.
    pub to: KvSlots<'a, B::KvCache>,
    /// Rotation of queries and keys.
    pub rotation: Option<Rotation>,
}

/// Cross-attention of a layer: queries from the decoder, keys and values from encoder rows.
pub struct CrossAttention<B: Backend> {
    q: AdaptedLinear<B>,
    kv: AdaptedLinear<B>,
    out: AdaptedLinear<B>,
    head_norms: Option<HeadNorms<B>>,
    shape: AttentionShape,
}

impl<B: Backend> SelfAttention<B> {
    /// Loads the attention of a layer.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(
        loader: &Loader<'_, B>,
        names: &AttentionNames,
        stack: &StackSpec,
    ) -> Result<Self, ModelError> {
        Self::load_gated(loader, names, stack, 1.0)
    }

    /// Loads the attention of a layer whose queries have a low rank, where `query` is one.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_low_rank(
        loader: &Loader<'_, B>,
        names: &AttentionNames,
        stack: &StackSpec,
        query: Option<LowRankQuerySpec>,
    ) -> Result<Self, ModelError> {
        let (Some(query), QkvNames::Split([q_name, k_name, v_name])) = (query, &names.qkv) else {
            return Self::load(loader, names, stack);
        };
        let shape = stack.attention.shape;
        let LowRankQuerySpec { rank, names: [norm, up] } = query;
        let [q, kv] = [[rank, stack.hidden], [kv_width(shape), stack.hidden]];
        let part = |name, shape| LinearShape { name, shape, bias: false };
        let up_shape = [q_width(shape), rank];
        let out = OutputProjection { name: names.out, hidden: stack.hidden, factor: 1.0 };
        Ok(Self {
            qkv: loader.adapted(&[part(q_name, &q), part(k_name, &kv), part(v_name, &kv)])?,
            low_rank_query: Some(LowRankQuery {
                rank,
                norm: loader.norm(norm, stack.norm, rank)?,
                up: loader.adapted(&[part(up, &up_shape)])?,
            }),
            gate: None,
            out: out.load(loader, stack.attention)?,
            head_norms: HeadNorms::load(loader, stack.attention)?,
            shape,
        })
    }

    /// Loads the attention of a layer whose output a gate multiplies with `factor`.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_gated(
        loader: &Loader<'_, B>,
        names: &AttentionNames,
        stack: &StackSpec,
        factor: f32,
    ) -> Result<Self, ModelError> {
        let AttentionSpec { shape, bias, .. } = stack.attention;
        let [q, kv] = [[q_width(shape), stack.hidden], [kv_width(shape), stack.hidden]];
        let mut gate = None;
        let qkv = match names.qkv {
            QkvNames::Fused(name) | QkvNames::FusedInputsFirst(name) => {
                let all = [q[0] + 2 * kv[0], stack.hidden];
                loader.adapted(&[LinearShape { name, shape: &all, bias: bias.q }])?
            }
            QkvNames::Split([q_name, k_name, v_name]) => loader.adapted(&[
                LinearShape { name: q_name, shape: &q, bias: bias.q },
                LinearShape { name: k_name, shape: &kv, bias: bias.k },
                LinearShape { name: v_name, shape: &kv, bias: bias.v },
            ])?,
            QkvNames::SplitGated([q_name, k_name, v_name]) => {
                let both = [2 * q[0], stack.hidden];
                let both = loader.stored(&LinearShape { name: q_name, shape: &both, bias: bias.q })?;
                let k = loader.stored(&LinearShape { name: k_name, shape: &kv, bias: bias.k })?;
                let v = loader.stored(&LinearShape { name: v_name, shape: &kv, bias: bias.v })?;
                let heads = |second| gated_rows(shape, second).map(|rows| both.outputs(rows));
                gate = Some(loader.pack_adapted(&heads(1).collect::<Vec<_>>())?);
                loader.pack_adapted(&heads(0).chain([k, v]).collect::<Vec<_>>())?
            }
            QkvNames::SplitBiases([q_name, k_name, v_name], [q_bias, v_bias]) => {
                let part = |name, shape| LinearShape { name, shape, bias: false };
                let [q, v] = [(part(q_name, &q), q_bias), (part(v_name, &kv), v_bias)];
                loader.pack_adapted(&[
                    loader.stored_with_bias(&q.0, q.1)?,
                    loader.stored(&part(k_name, &kv))?,
                    loader.stored_with_bias(&v.0, v.1)?,
                ])?
            }
            QkvNames::Grouped(name) => {
                let all = [q[0] + 2 * kv[0], stack.hidden];
                let stored = loader.stored(&LinearShape { name, shape: &all, bias: bias.q })?;
                let parts: Vec<_> = grouped_rows(shape).map(|rows| stored.outputs(rows)).collect();
                loader.pack_adapted(&parts)?
            }
        };
        let out = OutputProjection { name: names.out, hidden: stack.hidden, factor };
        let head_norms = HeadNorms::load(loader, stack.attention)?;
        let out = out.load(loader, stack.attention)?;
        Ok(Self { qkv, low_rank_query: None, gate, out, head_norms, shape })
    }

    /// Number of heads, their width, and the scale of scores.
    pub fn shape(&self) -> AttentionShape {
        self.shape
    }

    /// Query, key and value of `x: [n_tokens, hidden]`, rotated:
    /// `[n_tokens, n_heads·head_dim]` and twice `[n_tokens, n_kv_heads·head_dim]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a wrong width.
    pub fn project<'a>(
        &self,
        on: impl Into<Adapted<'a, B>>,
        step: &B::Step,
        x: &B::Tensor,
        rotation: Option<Rotation>,
    ) -> Result<[B::Tensor; 3], ModelError> {
        let on @ Adapted { backend, .. } = on.into();
        let q_width = self.low_rank_query.as_ref().map_or(q_width(self.shape), |query| query.rank);
        let kv_width = kv_width(self.shape);
        let qkv = on.linear(x, &self.qkv, Activation::None, None)?;
        let mut q = backend.columns(&qkv, 0, q_width)?;
        if let Some(LowRankQuery { norm, up, .. }) = &self.low_rank_query {
            q = on.linear(&backend.norm(&q, norm)?, up, Activation::None, None)?;
        }
        let mut k = backend.columns(&qkv, q_width, kv_width)?;
        let v = backend.columns(&qkv, q_width + kv_width, kv_width)?;
        if let Some(norms) = &self.head_norms {
            q = norms.queries(backend, q)?;
            k = norms.keys(backend, k)?;
        }
        if let Some(Rotation { shape, angles }) = rotation {
            backend.rope(step, &mut q, shape, angles)?;
            backend.rope(step, &mut k, shape, angles)?;
        }
        Ok([q, k, v])
    }

    /// Projects `x: [n_tokens, hidden]` and writes keys, rotated, and values to a cache. Returns the queries, rotated:
    /// `[n_tokens, n_heads·head_dim]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a wrong width, or slots that do not fit.
    pub fn write_keys_values<'a>(
        &self,
        on: impl Into<Adapted<'a, B>>,
        step: &B::Step,
        x: &B::Tensor,
        rows: CachedRows<'_, B>,
    ) -> Result<B::Tensor, ModelError> {
        let on @ Adapted { backend, .. } = on.into();
        let CachedRows { to, rotation } = rows;
        if self.head_norms.is_some() || self.low_rank_query.is_some() {
            let [q, k, v] = self.project(on, step, x, rotation)?;
            backend.write_kv(step, to, [&k, &v])?;
            return Ok(q);
        }
        self.write_fused(backend, step, &self.fused(on, x)?, CachedRows { to, rotation })
    }

    /// Query, key and value of `x: [n_tokens, hidden]` as they are packed, neither normalised nor rotated.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a wrong width.
    pub fn fused<'a>(&self, on: impl Into<Adapted<'a, B>>, x: &B::Tensor) -> Result<B::Tensor, ModelError> {
        on.into().linear(x, &self.qkv, Activation::None, None)
    }

    /// Writes keys, rotated, and values of packed rows to a cache, for a layer without norms of heads. Returns the queries,
    /// rotated.
    ///
    /// # Errors
    /// As [`Self::write_keys_values`].
    pub fn write_fused(
        &self,
        backend: &B,
        step: &B::Step,
        rows: &B::Tensor,
        CachedRows { to, rotation }: CachedRows<'_, B>,
    ) -> Result<B::Tensor, ModelError> {
        Ok(backend.write_fused_qkv(step, to, FusedQkv { rows, shape: self.shape, rotation })?)
    }

    /// Attention inside each sequence of `x: [n_tokens, hidden]`, before the output projection:
    /// `[n_tokens, n_heads·head_dim]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a wrong width or offsets that do not fit.
    pub fn inside<'a>(
        &self,
        on: impl Into<Adapted<'a, B>>,
        step: &B::Step,
        x: &B::Tensor,
        rows: AttentionRows<'_, B>,
    ) -> Result<B::Tensor, ModelError> {
        let on @ Adapted { backend, .. } = on.into();
        let AttentionRows { seqs, rotation, key_rows } = rows;
        let is_packed = self.head_norms.is_none() && self.low_rank_query.is_none();
        if rotation.is_none() && is_packed && key_rows.is_none() {
            let qkv = on.linear(x, &self.qkv, Activation::None, None)?;
            return Ok(backend.fused_attention(step, &qkv, self.shape, seqs)?);
        }
        let [q, mut k, mut v] = self.project(on, step, x, rotation)?;
        if let Some(rows) = key_rows {
            [k, v] = [backend.gather_rows(step, &k, rows)?, backend.gather_rows(step, &v, rows)?];
        }
        let [q, k, v] = [&q, &k, &v];
        Ok(backend.attention(step, Qkv { q, k, v }, self.shape, seqs)?)
    }

    /// Multiplies `context: [n_tokens, n_heads·head_dim]` with the gate by `x: [n_tokens, hidden]`, where there is one.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a wrong width.
    pub fn apply_gate(
        &self,
        on: Adapted<'_, B>,
        x: &B::Tensor,
        context: &mut B::Tensor,
    ) -> Result<(), ModelError> {
        let Some(gate) = &self.gate else { return Ok(()) };
        let gate = on.linear(x, gate, Activation::None, None)?;
        Ok(on.backend.multiply_gated(context, &gate, Activation::Sigmoid)?)
    }

    /// The output projection of `context: [n_tokens, n_heads·head_dim]`, plus `residual` if there is one:
    /// `[n_tokens, hidden]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a wrong width.
    pub fn output<'a>(
        &self,
        on: impl Into<Adapted<'a, B>>,
        context: &B::Tensor,
        residual: Option<&B::Tensor>,
    ) -> Result<B::Tensor, ModelError> {
        on.into().linear(context, &self.out, Activation::None, residual)
    }
}

impl<B: Backend> CrossAttention<B> {
    /// Loads the cross-attention of a layer.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(
        loader: &Loader<'_, B>,
        names: &CrossNames,
        stack: &StackSpec,
        cross: &CrossSpec,
    ) -> Result<Self, ModelError> {
        let AttentionSpec { shape, bias, .. } = cross.attention;
        let [q, kv] = [[q_width(shape), stack.hidden], [kv_width(shape), cross.encoder_hidden]];
        let [q_name, k_name, v_name] = names.qkv;
        let factor = match cross.instead() {
            None => 1.0,
            Some(instead) => loader.gate(instead.names.gates[0])?,
        };
        let out = OutputProjection { name: names.out, hidden: stack.hidden, factor };
        Ok(Self {
            q: loader.adapted(&[LinearShape { name: q_name, shape: &q, bias: bias.q }])?,
            kv: match k_name == v_name {
                true => {
                    let both = [2 * kv[0], kv[1]];
                    loader.adapted(&[LinearShape { name: k_name, shape: &both, bias: bias.k }])?
                }
                false => loader.adapted(&[
                    LinearShape { name: k_name, shape: &kv, bias: bias.k },
                    LinearShape { name: v_name, shape: &kv, bias: bias.v },
                ])?,
            },
            out: out.load(loader, cross.attention)?,
            head_norms: HeadNorms::load(loader, cross.attention)?,
            shape,
        })
    }

    /// Number of heads, their width, and the scale of scores.
    pub fn shape(&self) -> AttentionShape {
        self.shape
    }

    /// Queries of `x: [n_tokens, hidden]`: `[n_tokens, n_heads·head_dim]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a wrong width.
    pub fn query<'a>(&self, on: impl Into<Adapted<'a, B>>, x: &B::Tensor) -> Result<B::Tensor, ModelError> {
        let on @ Adapted { backend, .. } = on.into();
        let q = on.linear(x, &self.q, Activation::None, None)?;
        match &self.head_norms {
            Some(norms) => norms.queries(backend, q),
            None => Ok(q),
        }
    }

    /// Keys and values of encoder rows `[n_rows, encoder_hidden]`: twice `[n_rows, n_kv_heads·head_dim]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a wrong width.
    pub fn keys_values<'a>(
        &self,
        on: impl Into<Adapted<'a, B>>,
        rows: &B::Tensor,
    ) -> Result<[B::Tensor; 2], ModelError> {
        let on @ Adapted { backend, .. } = on.into();
        let width = kv_width(self.shape);
        let kv = on.linear(rows, &self.kv, Activation::None, None)?;
        let [mut k, v] = [backend.columns(&kv, 0, width)?, backend.columns(&kv, width, width)?];
        if let Some(norms) = &self.head_norms {
            k = norms.keys(backend, k)?;
        }
        Ok([k, v])
    }

    /// Projects encoder rows `[n_rows, encoder_hidden]` and writes their keys and values to slots of a cache's layer.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a wrong width, or slots that do not fit.
    pub fn write_keys_values<'a>(
        &self,
        on: impl Into<Adapted<'a, B>>,
        step: &B::Step,
        rows: &B::Tensor,
        to: KvSlots<'_, B::KvCache>,
    ) -> Result<(), ModelError> {
        let on @ Adapted { backend, .. } = on.into();
        if self.head_norms.is_some() {
            let [k, v] = &self.keys_values(on, rows)?;
            return Ok(backend.write_kv(step, to, [k, v])?);
        }
        let kv = on.linear(rows, &self.kv, Activation::None, None)?;
        Ok(backend.write_fused_kv(step, to, &kv)?)
    }

    /// The output projection of `context: [n_tokens, n_heads·head_dim]`, plus `residual` if there is one:
    /// `[n_tokens, hidden]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a wrong width.
    pub fn output<'a>(
        &self,
        on: impl Into<Adapted<'a, B>>,
        context: &B::Tensor,
        residual: Option<&B::Tensor>,
    ) -> Result<B::Tensor, ModelError> {
        on.into().linear(context, &self.out, Activation::None, residual)
    }
}

impl<B: Backend> HeadNorms<B> {
    fn load(loader: &Loader<'_, B>, attention: AttentionSpec) -> Result<Option<Self>, ModelError> {
        let Some(HeadNormsSpec { norm, part, names }) = attention.head_norms else { return Ok(None) };
        let shape = attention.shape;
        let (n_parts, widths) = match part {
            NormedPart::Head => ([shape.n_heads, shape.n_kv_heads], [shape.head_dim; 2]),
            NormedPart::Row => ([1; 2], [q_width(shape), kv_width(shape)]),
        };
        let q = loader.norm(names[0], norm, widths[0])?;
        Ok(Some(Self { q, k: loader.norm(names[1], norm, widths[1])?, n_parts }))
    }

    fn queries(&self, backend: &B, q: B::Tensor) -> Result<B::Tensor, ModelError> {
        norm_parts(backend, q, &self.q, self.n_parts[0])
    }

    fn keys(&self, backend: &B, k: B::Tensor) -> Result<B::Tensor, ModelError> {
        norm_parts(backend, k, &self.k, self.n_parts[1])
    }
}

/// An output projection as it is stored, `[hidden, n_heads·head_dim]`.
struct OutputProjection<'a> {
    name: &'a str,
    hidden: usize,
    // Factor of a gate on its result.
    factor: f32,
}

impl OutputProjection<'_> {
    fn load<B: Backend>(
        &self,
        loader: &Loader<'_, B>,
        attention: AttentionSpec,
    ) -> Result<AdaptedLinear<B>, ModelError> {
        let shape = [self.hidden, q_width(attention.shape)];
        let out = loader.stored(&LinearShape { name: self.name, shape: &shape, bias: attention.bias.out })?;
        loader.pack_adapted(&[out.scaled(self.factor)])
    }
}

/// Normalises each of the `n_parts` parts of a row of `x: [n_tokens, width]` by itself.
///
/// # Errors
/// [`ModelError::Kernel`] for a wrong width.
pub(crate) fn norm_parts<B: Backend>(
    backend: &B,
    x: B::Tensor,
    norm: &B::Norm,
    n_parts: usize,
) -> Result<B::Tensor, ModelError> {
    if n_parts == 1 {
        return Ok(backend.norm(&x, norm)?);
    }
    let parts = backend.norm(&backend.split_rows(x, n_parts)?, norm)?;
    Ok(backend.merge_rows(parts, n_parts)?)
}

/// Rows of the first or second part of each head, of a matrix that has both of a head on top of each other.
fn gated_rows(shape: AttentionShape, part: usize) -> impl Iterator<Item = Range<usize>> {
    let AttentionShape { n_heads, head_dim, .. } = shape;
    (0..n_heads).map(move |head| (2 * head + part) * head_dim..(2 * head + part + 1) * head_dim)
}

/// Rows of a grouped matrix in the order of queries, keys and values.
fn grouped_rows(shape: AttentionShape) -> impl Iterator<Item = Range<usize>> {
    let AttentionShape { n_heads, n_kv_heads, head_dim, .. } = shape;
    let n_queries = n_heads / n_kv_heads.max(1);
    let of_group = [0..n_queries, n_queries..n_queries + 1, n_queries + 1..n_queries + 2];
    of_group.into_iter().flat_map(move |part| {
        (0..n_kv_heads).map(move |group| {
            let first = group * (n_queries + 2);
            (first + part.start) * head_dim..(first + part.end) * head_dim
        })
    })
}

fn q_width(shape: AttentionShape) -> usize {
    shape.widths()[0]
}

fn kv_width(shape: AttentionShape) -> usize {
    shape.widths()[1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_grouped_matrix_are_queries_then_keys_then_values() {
        let shape = AttentionShape { n_heads: 4, n_kv_heads: 2, head_dim: 3, scale: 1.0, softcap: None };
        let rows: Vec<Range<usize>> = grouped_rows(shape).collect();
        assert_eq!(rows, [0..6, 12..18, 6..9, 18..21, 9..12, 21..24]);
    }
}
