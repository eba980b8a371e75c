//! Numbers that follow from a spec: arithmetic of a decoder's parts beside each other, in products with weights.

use super::{DecoderSpec, FeedForwardKind, FeedForwardSpec, GatedDeltaSpec, ItemsSpec, StackSpec};

impl DecoderSpec {
    /// Encoder rows whose projection to keys and values multiplies as many weights as the layers do for one token:
    /// 7 for BART, about a hundred where few layers cross-attend. At least 1, and 1 without cross-attention.
    pub fn cross_rows_per_token(&self) -> usize {
        let ItemsSpec::CrossAttention(cross) = &self.items else { return 1 };
        let stack = &self.stack;
        let own = stack.attention.shape;
        let other = cross.attention.shape;
        let n_cross = cross.instead().map_or(stack.n_layers, |instead| instead.layers.len());
        let n_own = stack.n_layers - cross.instead().map_or(0, |instead| instead.layers.len());
        // Queries and output, and keys and values, of each token.
        let self_attention = 2 * (own.n_heads + own.n_kv_heads) * own.head_dim * stack.hidden;
        let cross_attention = 2 * other.n_heads * other.head_dim * stack.hidden;
        let token = n_own * self_attention
            + n_cross * cross_attention
            + stack.n_layers * stack.feed_forward.n_weights(stack.hidden);
        let row = n_cross * 2 * other.n_kv_heads * other.head_dim * cross.encoder_hidden;
        token.checked_div(row).unwrap_or(1).max(1)
    }

    /// Width of encoder rows in the place of token embeddings.
    pub fn embedded_hidden(&self) -> usize {
        match &self.items {
            ItemsSpec::CrossAttention(cross) => cross.embedded_hidden.unwrap_or(cross.encoder_hidden),
            ItemsSpec::Embedded { levels, .. } => self.stack.hidden * (1 + levels),
        }
    }
}

impl StackSpec {
    /// The linear attention of its layers, all of one kind, and their number; `None`: there are none.
    pub fn recurrent(&self) -> Option<(&GatedDeltaSpec, usize)> {
        let mut specs = self.layers.iter().filter_map(|layer| layer.recurrent.as_ref());
        let first = specs.next()?;
        Some((first, 1 + specs.count()))
    }

    /// Layers before number `idx` with linear attention.
    pub fn n_recurrent_before(&self, idx: usize) -> usize {
        self.layers.iter().take(idx).filter(|layer| layer.recurrent.is_some()).count()
    }
}

impl FeedForwardSpec {
    /// Weights of the block between rows of `hidden` values.
    fn n_weights(&self, hidden: usize) -> usize {
        let n_matrices = match self.kind {
            FeedForwardKind::Plain => 2,
            FeedForwardKind::Gated | FeedForwardKind::UpGate | FeedForwardKind::GateUp => 3,
        };
        n_matrices * self.width * hidden
    }
}
