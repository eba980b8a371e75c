//! Tensor names of fairseq's layers, which all families that come from there share.

use crate::spec::{AttentionNames, CrossNames, QkvNames, StackNames};

const ATTENTION: AttentionNames = AttentionNames {
    norm: "self_attn_layer_norm",
    qkv: QkvNames::Split(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    out: "self_attn.out_proj",
};

const CROSS: CrossNames = CrossNames {
    norm: "encoder_attn_layer_norm",
    qkv: ["encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj"],
    out: "encoder_attn.out_proj",
};

/// The layers of an encoder.
pub(super) const ENCODER_STACK: StackNames = stack(None);

/// The layers of a decoder that cross-attends.
pub(super) const DECODER_STACK: StackNames = stack(Some(CROSS));

const fn stack(cross: Option<CrossNames>) -> StackNames {
    StackNames {
        input_norm: "layernorm_embedding",
        layers: "layers",
        attention: ATTENTION,
        cross,
        feed_forward_norm: "final_layer_norm",
        feed_forward_inner: &["fc1"],
        feed_forward_outer: "fc2",
        final_norm: "layer_norm",
    }
}
