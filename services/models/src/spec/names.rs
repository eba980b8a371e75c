//! Names of the tensors of a model. Names are data too: a family states them, the layers look them up.

/// Names of the tensors of a tiled encoder beside those of its stack, relative to its prefix.
#[derive(Debug, PartialEq)]
pub struct TilesNames {
    /// The row before the patches of every tile; a full name.
    pub class: &'static str,
    /// Positions of rows in a tile; a full name.
    pub positions: &'static str,
    /// The gate between those and the next; a full name.
    pub position_gate: &'static str,
    /// Positions of rows in an image of each arrangement.
    pub tile_positions: &'static str,
    /// Tables of tiles before the stack and after it; full names.
    pub tiles: [&'static str; 2],
    /// Their gates; full names.
    pub tile_gates: [&'static str; 2],
    /// Norms before the stack and after it.
    pub norms: [&'static str; 2],
    /// The list of layers of the second stack.
    pub global_layers: &'static str,
    /// Gates of its layers' attention and feed-forward; full names.
    pub global_gates: [&'static str; 2],
    /// Full prefixes of the projection, in the order they are tried.
    pub projection: &'static [&'static str],
}

/// Names of an encoder's tensors, relative to a prefix, without `.weight` and `.bias`.
#[derive(Debug, PartialEq)]
pub struct EncoderNames {
    /// Prefixes of one checkpoint generation or another, in the order they are tried.
    pub prefixes: &'static [&'static str],
    /// Layers of the stem, in order.
    pub stem: &'static [&'static str],
    /// Full names of the token table of an encoder of text, in the order they are tried; else empty.
    pub tokens: &'static [&'static str],
    /// Position table, or a layer's table of biases, relative to the layer; empty without one.
    pub positions: &'static str,
    /// The layers.
    pub stack: StackNames,
}

/// Names of a decoder's tensors.
#[derive(Debug, PartialEq)]
pub struct DecoderNames {
    /// Prefixes of one checkpoint generation or another, in the order they are tried.
    pub prefixes: &'static [&'static str],
    /// Full names of the token table, in the order they are tried.
    pub tokens: &'static [&'static str],
    /// Position table, or a layer's table of biases, relative to the layer; empty without one.
    pub positions: &'static str,
    /// The layers.
    pub stack: StackNames,
    /// Full names of the head, in the order they are tried.
    pub head: &'static [&'static str],
    /// Full name of a bias of the logits, `[1, vocab]`, with its ending; added where it is stored.
    pub head_bias: Option<&'static str>,
}

/// Names of the tensors of a stack.
#[derive(Debug, PartialEq)]
pub struct StackNames {
    /// Norm before the first layer; relative to the prefix, empty without one.
    pub input_norm: &'static str,
    /// The list of layers.
    pub layers: &'static str,
    /// Self-attention.
    pub attention: AttentionNames,
    /// Cross-attention.
    pub cross: Option<CrossNames>,
    /// Norm of the feed-forward.
    pub feed_forward_norm: &'static str,
    /// Inner layers: one, or gate and up.
    pub feed_forward_inner: &'static [&'static str],
    /// Outer layer.
    pub feed_forward_outer: &'static str,
    /// Norm after the last layer; relative to the prefix.
    pub final_norm: &'static str,
}

/// Names of the tensors of a cross-attention.
#[derive(Debug, PartialEq)]
pub struct CrossNames {
    /// Norm of the attention.
    pub norm: &'static str,
    /// Query, key and value projections; keys and values of one name are one matrix, the keys on top.
    pub qkv: [&'static str; 3],
    /// Output projection.
    pub out: &'static str,
}

/// Names of the tensors of a self-attention.
#[derive(Debug, PartialEq)]
pub struct AttentionNames {
    /// Norm of the attention.
    pub norm: &'static str,
    /// Projections.
    pub qkv: QkvNames,
    /// Output projection.
    pub out: &'static str,
}

/// Names of the query, key and value projections.
#[derive(Debug, PartialEq)]
pub enum QkvNames {
    /// One matrix, the three on top of each other.
    Fused(&'static str),
    /// As [`Self::Fused`], in a stack whose linear layers are all stored inputs first.
    FusedInputsFirst(&'static str),
    /// Three matrices: query, key, value.
    Split([&'static str; 3]),
    /// Three matrices: query, key, value. That of the query gives each head's query and, below it, a gate: attention is multiplied
    /// with its sigmoid before the output projection.
    SplitGated([&'static str; 3]),
    /// Three matrices without biases: query, key, value; then the biases of query and value, which are bare parameters.
    SplitBiases([&'static str; 3], [&'static str; 2]),
    /// One matrix, in which each key head has its query heads, its key and its value on top of each other.
    Grouped(&'static str),
}

impl QkvNames {
    /// True in a stack whose linear layers are stored `[in, out]`.
    pub fn is_inputs_first(&self) -> bool {
        matches!(self, Self::FusedInputsFirst(_))
    }
}
