//! KV cache groups: layers of one window that share block tables, as many in each group.
//!
//! Layers with a sliding window need no block behind it, others need all. So a sequence has a block table for each group, and a
//! block holds the keys and values of as many layers as a group has: blocks of all groups are of one size, and any group may
//! take any block of one pool. Where layers do not divide evenly, the last group of a kind leaves room in its blocks unused. The
//! design is that of vLLM's hybrid KV cache manager
//! (<https://docs.vllm.ai/en/v0.11.0/design/hybrid_kv_cache_manager.html>).

use super::{DecoderSpec, ItemsSpec};
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use triptych_core::shape::KV_BLOCK_TOKENS;

/// Most groups of a decoder: each has tables of its own to fill in every step.
pub const MAX_KV_GROUPS: usize = 8;
/// Part of the layers that groups may leave unused in their blocks at most, as a divisor.
const MAX_UNUSED: usize = 8;

/// The windows of a decoder's KV cache groups; at least one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvCacheGroups {
    /// Keys that a query sees at most, its own included; `None`: all. Unused places are `None`.
    windows: [Option<NonZeroU32>; MAX_KV_GROUPS],
    n_groups: usize,
}

/// Place of a layer's keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPlace {
    /// Index of the group.
    pub group: usize,
    /// Index of the layer in the group's blocks.
    pub layer: usize,
}

/// The KV cache groups of a decoder's layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvGroupLayers {
    /// The groups.
    pub groups: KvCacheGroups,
    /// Layers of a block.
    pub n_layers: usize,
    /// Place of each layer of the decoder; `None`: it has no keys of self-attention.
    pub places: Vec<Option<KvPlace>>,
}

impl KvCacheGroups {
    /// One group of layers that see every key.
    pub const FULL: Self = Self::one(None);

    /// One group.
    pub const fn one(window: Option<NonZeroU32>) -> Self {
        let mut windows = [None; MAX_KV_GROUPS];
        windows[0] = window;
        Self { windows, n_groups: 1 }
    }

    /// Groups of these windows; `None` unless there are 1 to [`MAX_KV_GROUPS`].
    pub fn of(groups: &[Option<NonZeroU32>]) -> Option<Self> {
        let mut windows = [None; MAX_KV_GROUPS];
        windows.get_mut(..groups.len()).filter(|_| !groups.is_empty())?.copy_from_slice(groups);
        Some(Self { windows, n_groups: groups.len() })
    }

    /// The window of each group.
    pub fn windows(&self) -> &[Option<NonZeroU32>] {
        &self.windows[..self.n_groups]
    }

    /// Number of groups.
    pub fn n_groups(&self) -> usize {
        self.n_groups
    }

    /// True if a group has a window.
    pub fn has_windows(&self) -> bool {
        self.windows.iter().any(Option::is_some)
    }

    /// As many groups that keep every block.
    #[must_use]
    pub fn without_windows(self) -> Self {
        Self { windows: [None; MAX_KV_GROUPS], ..self }
    }

    /// Most blocks that a sequence of `n_tokens` tokens holds, all groups, if a step computes `chunk` of them at most.
    pub fn n_blocks(&self, n_tokens: usize, chunk: usize) -> usize {
        let all = n_tokens.div_ceil(KV_BLOCK_TOKENS);
        let held = |window: &Option<NonZeroU32>| match window {
            // From the block of the first key that the first query of a chunk sees to that of its last one.
            Some(window) => {
                let n_seen = (window.get() as usize).saturating_add(chunk);
                all.min(n_seen.saturating_add(KV_BLOCK_TOKENS - 2).div_ceil(KV_BLOCK_TOKENS))
            }
            None => all,
        };
        self.windows().iter().map(held).fold(0, usize::saturating_add)
    }

    /// Most tokens of a sequence that `n_blocks` blocks hold, a multiple of a block's and at most `most` rounded up to one.
    pub fn max_tokens(&self, n_blocks: usize, chunk: usize, most: usize) -> usize {
        let (mut fits, mut exceeds) = (0, most.div_ceil(KV_BLOCK_TOKENS) + 1);
        while fits + 1 < exceeds {
            let middle = fits + (exceeds - fits) / 2;
            match self.n_blocks(middle.saturating_mul(KV_BLOCK_TOKENS), chunk) <= n_blocks {
                true => fits = middle,
                false => exceeds = middle,
            }
        }
        fits.saturating_mul(KV_BLOCK_TOKENS)
    }
}

impl DecoderSpec {
    /// The KV cache groups of its layers. One group of all where windows are not shorter than the context, or layers divide
    /// badly; its window is the longest one then.
    pub fn kv_groups(&self) -> KvGroupLayers {
        let instead = match &self.items {
            ItemsSpec::CrossAttention(cross) => cross.instead(),
            ItemsSpec::Embedded { .. } => None,
        };
        let has_keys = |idx: &usize| {
            self.stack.layer(*idx).recurrent.is_none()
                && instead.is_none_or(|instead| !instead.layers.contains(idx))
        };
        let is_seen_past = |window: &NonZeroU32| (window.get() as usize) < self.max_context;
        let mut kinds: BTreeMap<Option<NonZeroU32>, Vec<usize>> = BTreeMap::new();
        for idx in (0..self.stack.n_layers).filter(has_keys) {
            let window = self.stack.layer(idx).window.filter(is_seen_past);
            kinds.entry(window).or_default().push(idx);
        }
        let counts: Vec<usize> = kinds.values().map(Vec::len).collect();
        let Some(n_layers) = group_size(&counts) else {
            // A layer that sees all keys keeps all blocks; without one the longest window does.
            let window = match kinds.first_key_value() {
                Some((Some(_), _)) => kinds.last_key_value().and_then(|(longest, _)| *longest),
                _ => None,
            };
            let mut layers: Vec<usize> = kinds.into_values().flatten().collect();
            layers.sort_unstable();
            return self.in_groups(layers.len(), [(window, layers)]);
        };
        self.in_groups(n_layers, kinds)
    }

    /// Layers of each kind in groups of `n_layers`.
    fn in_groups(
        &self,
        n_layers: usize,
        kinds: impl IntoIterator<Item = (Option<NonZeroU32>, Vec<usize>)>,
    ) -> KvGroupLayers {
        let mut windows = Vec::new();
        let mut places = vec![None; self.stack.n_layers];
        for (window, layers) in kinds {
            for layers in layers.chunks(n_layers.max(1)) {
                for (layer, idx) in layers.iter().enumerate() {
                    places[*idx] = Some(KvPlace { group: windows.len(), layer });
                }
                windows.push(window);
            }
        }
        let groups = KvCacheGroups::of(&windows).unwrap_or(KvCacheGroups::FULL);
        KvGroupLayers { groups, n_layers, places }
    }
}

/// Layers of a group for kinds of so many layers each; `None` if all are to be one group.
///
/// The smallest kind is not padded unless the others would leave too much unused, or be too many groups.
fn group_size(counts: &[usize]) -> Option<usize> {
    let (least, most) = (*counts.iter().min()?, *counts.iter().max()?);
    let total: usize = counts.iter().sum();
    (least..=most).find(|size| {
        let n_groups: usize = counts.iter().map(|n| n.div_ceil(*size)).sum();
        n_groups <= MAX_KV_GROUPS && n_groups * size - total <= total / MAX_UNUSED
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(windows: &[u32]) -> KvCacheGroups {
        let windows: Vec<_> = windows.iter().map(|window| NonZeroU32::new(*window)).collect();
        KvCacheGroups::of(&windows).expect("as many as fit")
    }

    #[test]
    fn groups_have_as_many_layers_as_the_smaller_kind_unless_too_much_is_left_unused() {
        // Kinds of Gemma 2 (2B), of Gemma 3 (270M, 1B, 4B, 12B, 27B), and of models with one kind.
        let sizes = [([13, 13], 13), ([3, 15], 3), ([4, 22], 4), ([5, 29], 5), ([8, 40], 8), ([10, 52], 11)];
        for (counts, size) in sizes {
            assert_eq!(group_size(&counts), Some(size), "{counts:?}");
        }
        assert_eq!(group_size(&[32]), Some(32));
        assert_eq!(group_size(&[1, 30]), None, "31 groups, or a block of which half is unused");
        assert_eq!(group_size(&[]), None);
    }

    #[test]
    fn a_window_bounds_the_blocks_of_its_group_and_with_them_the_tokens_that_a_pool_holds() {
        let mixed = groups(&[0, 32, 32]);
        assert_eq!(mixed.n_blocks(16, 16), 3);
        // 32 + 16 keys that begin within a block of 32.
        assert_eq!(mixed.n_blocks(1600, 16), 50 + 2 * 3);
        assert_eq!(mixed.max_tokens(56, 16, 5000), 1600);
        assert_eq!(mixed.max_tokens(55, 16, 5000), 1568);
        assert_eq!(mixed.max_tokens(1000, 16, 70), 96, "the context, rounded up to a block");
        assert_eq!(groups(&[32]).max_tokens(3, 16, 5000), 5024);
        assert_eq!(groups(&[32]).max_tokens(2, 16, 5000), 64);
        assert_eq!(mixed.max_tokens(2, 16, 5000), 0);
        assert_eq!(KvCacheGroups::FULL.max_tokens(7, 16, 5000), 224);
        assert_eq!(mixed.without_windows().n_blocks(1600, 16), 150);
        // Gemma 3 (4B) that decodes at 32768 tokens: a sixth of the blocks.
        let gemma = groups(&[0, 1024, 1024, 1024, 1024, 1024, 1024]);
        assert_eq!((gemma.n_blocks(32768, 1), gemma.without_windows().n_blocks(32768, 1)), (1222, 7168));
        assert!(mixed.has_windows() && !mixed.without_windows().has_windows());
        assert_eq!((KvCacheGroups::of(&[]), KvCacheGroups::of(&[None; MAX_KV_GROUPS + 1])), (None, None));
    }
}
