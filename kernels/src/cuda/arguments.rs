//! The structures that kernels take by value, as their `.cuh` and `.cu` files declare them.

use super::queue::Plain;

/// Declares structures of a kernel's parameters.
macro_rules! plain {
    ($($(#[$doc:meta])* struct $name:ident { $($field:ident: $type:ty),+ $(,)? })+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        pub(super) struct $name { $(pub(super) $field: $type),+ }

        // SAFETY: `repr(C)`, and the same fields as the kernel's.
        unsafe impl Plain for $name {}
    )+};
}

plain! {
    /// `Pages` of `pages.cuh`.
    struct Pages { k: u64, v: u64, page_stride: u64, head_stride: u32, n_kv_heads: u32 }

    /// `PagedSequences` of `pages.cuh`.
    struct PagedSequences {
        query_start: u64,
        seq_lens: u64,
        table_start: u64,
        block_tables: u64,
        min_queries: u32,
        max_queries: u32,
    }

    /// `PagedKeys` of `keys.cuh`.
    struct PagedKeys { pages: Pages, sequences: PagedSequences, query_start: u64 }

    /// `RaggedKeys` of `keys.cuh`.
    struct RaggedKeys {
        k: u64,
        v: u64,
        query_start: u64,
        key_start: u64,
        k_stride: u32,
        v_stride: u32,
        head_dim: u32,
        gap: u32,
    }

    /// `Bias` of `scores.cuh`.
    struct Bias { values: u64, offsets: u64, kind: u32, max_distance: u32 }

    /// `Heads` of `scores.cuh`.
    struct Heads {
        n_heads: u32,
        n_kv_heads: u32,
        head_dim: u32,
        scale: f32,
        ahead: u64,
        is_causal: u32,
        window: u32,
        softcap: f32,
        quotient: f32,
    }

    /// `Parts` of `decode.cu`.
    struct Parts { largest: u64, sum: u64, out: u64, n_splits: u32, gap: u32 }

    /// `SharedSplits` of `decode.cu`.
    struct SharedSplits { splits: u64, queries: u64 }

    /// `Rotation` of `rope.cu`.
    struct Rotation { cos: u64, sin: u64, rotary_dim: u32, is_interleaved: u32 }

    /// `States` of `recurrent.cu`.
    struct States {
        values: u64,
        query_start: u64,
        slots: u64,
        slot_stride: u64,
        n_conv: u32,
        gap: u32,
    }

    /// `DeltaHeads` of `recurrent.cu`.
    struct DeltaHeads { decay: u64, n_heads: u32, n_key_heads: u32, key_dim: u32, value_dim: u32 }

    /// `Windows` of `conv.cu`.
    struct Windows {
        n_images: u32,
        size: [u32; 2],
        kernel: [u32; 2],
        stride: [u32; 2],
        padding: [u32; 2],
        out: [u32; 2],
    }

    /// `Epilogue` of `linear.cu`.
    struct Epilogue { y: u64, bias: u64, residual: u64, activation: u32, gap: u32 }

    /// `Product` of `linear.cu`.
    struct Product { x: u64, n_tokens: u32, n_in: u32, n_out: u32, gap: u32 }

    /// `Routing` of `experts.cu`.
    struct Router {
        n_tokens: u32,
        n_experts: u32,
        top_k: u32,
        is_sigmoid: u32,
        renormalize: u32,
        scale: f32,
    }

    /// `Routes` of `experts.cu`.
    struct RouteArrays { experts: u64, weights: u64, places: u64, order: u64, counts: u64, tiles: u64 }

    /// `Grouped` of `experts.cu`.
    struct Grouped {
        x: u64,
        rows: u64,
        sums: u64,
        weights: u64,
        scales: u64,
        order: u64,
        tiles: u64,
        top_k: u32,
        is_by_token: u32,
        n_in: u32,
        n_out: u32,
    }
}

impl Rotation {
    /// Nothing is rotated.
    pub(super) const NONE: Self = Self { cos: 0, sin: 0, rotary_dim: 0, is_interleaved: 0 };
}

/// Kinds of bias, by their numbers in `scores.cuh`.
pub(super) mod bias_kind {
    pub(in crate::cuda) const NONE: u32 = 0;
    pub(in crate::cuda) const BY_DISTANCE: u32 = 1;
    pub(in crate::cuda) const ALIBI: u32 = 2;
    pub(in crate::cuda) const MATRIX: u32 = 3;
}
