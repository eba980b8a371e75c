//! The pairs of an adapter for one loaded layer, as one pair: factors side by side, and blocks where several stored layers were
//! packed into one.

use crate::error::ModelError;
use crate::layers::{LinearSite, LowRank};
use crate::weights::StoredWeights;
use triptych_core::DType;
use triptych_kernels::Backend;
use triptych_kernels::ops::{LinearPart, WeightView};

/// Ranks are padded with zeros to a multiple of this: products of devices ask for it.
const RANK_STEP: usize = 8;

/// The pair of matrices of a module.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LowRankPair {
    /// Names of the tensors `[rank, in]` and `[out, rank]`.
    pub names: [String; 2],
    /// Rows of the first.
    pub rank: usize,
    /// Columns of the first.
    pub n_in: usize,
    /// Rows of the second.
    pub n_out: usize,
    /// Factor on the product.
    pub scale: f32,
}

/// A module's name and its pair, if it has one.
type Found<'a> = Option<(&'a str, &'a LowRankPair)>;

/// The pair of a loaded layer, of those that were `found` for its parts; `None` if none was.
///
/// Of part `i` the outputs are `scale · B_i[rows] (A_i x)`: `A` has the rows of all modules one under the other, `B` zeros
/// where an output belongs to another module.
pub(super) fn sum_of_pairs<B: Backend>(
    weights: &StoredWeights,
    backend: &B,
    site: &LinearSite,
    found: &[Found<'_>],
) -> Result<Option<LowRank<B>>, ModelError> {
    let mut modules: Vec<(&str, &LowRankPair)> = Vec::new();
    for (module, pair) in found.iter().flatten() {
        if !modules.iter().any(|(known, _)| known == module) {
            modules.push((module, pair));
        }
    }
    if modules.is_empty() {
        return Ok(None);
    }
    let n_out: usize = site.parts.iter().map(|part| part.rows.len()).sum();
    let total: usize = modules.iter().map(|(_, pair)| pair.rank).sum();
    let total = total.next_multiple_of(RANK_STEP);
    let mut a = vec![0.0; total * site.n_in];
    let mut b = vec![0.0; n_out * total];
    let mut first = 0;
    for (module, pair) in modules {
        let [down, up] = values(weights, pair, site, (module, found))?;
        a[first * site.n_in..][..down.len()].copy_from_slice(&down);
        let mut row = 0;
        for (part, found) in site.parts.iter().zip(found) {
            let is_own = found.is_some_and(|(of, _)| of == module);
            for stored in part.rows.clone() {
                if is_own {
                    let factors = &up[stored * pair.rank..][..pair.rank];
                    let scale = pair.scale * part.scale;
                    let to = &mut b[row * total + first..][..pair.rank];
                    to.iter_mut().zip(factors).for_each(|(to, factor)| *to = scale * factor);
                }
                row += 1;
            }
        }
        first += pair.rank;
    }
    let [a, b] = [bytes(&a), bytes(&b)];
    let part = |data, shape| LinearPart {
        weight: WeightView { dtype: DType::F32, shape, data },
        bias: None,
        scale: 1.0,
    };
    LowRank::load(backend, part(&a, &[total, site.n_in]), part(&b, &[n_out, total])).map(Some)
}

/// Values of both matrices of a module, which fit its layer.
fn values(
    weights: &StoredWeights,
    pair: &LowRankPair,
    site: &LinearSite,
    (module, found): (&str, &[Found<'_>]),
) -> Result<[Vec<f32>; 2], ModelError> {
    let parts = site.parts.iter().zip(found);
    let own = parts.filter(|(_, found)| found.is_some_and(|(of, _)| of == module));
    let n_stored = own.map(|(part, _)| part.n_stored).max().unwrap_or(0);
    let [a, b] = &pair.names;
    let read = |name: &String, shape: [usize; 2]| weights.tensor(std::slice::from_ref(name), &shape);
    Ok([read(a, [pair.rank, site.n_in])?.values(), read(b, [n_stored, pair.rank])?.values()])
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
