//! The number format of weights and caches: a setting, and a part of keys and results. It knows no back end.

/// The number format of weights, and of keys and values in a cache. Activations are f32 in all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Precision {
    /// f32.
    #[default]
    F32,
    /// bf16; the other operand of a product (rows, queries, attention weights) is rounded to bf16 too, and so are embedding
    /// tables.
    Bf16,
    /// Linear layers but routers int8 with a scale for each output, their rows int8 with a scale for each row and call; caches int8
    /// with a scale for each head of a token, and keys and values of whole items too where bytes have a dot product; large
    /// embedding tables int8 with a scale for each row, others bf16; all else f32.
    Int8,
    /// Linear layers in four bits with a bf16 scale for each 32 weights of an output, but logits and all else as int8: for
    /// decoders, whose steps take as long as their weights take to be read. Encoders compute in [`Self::of_encoders`].
    Int4,
}

impl Precision {
    /// The name used in settings, keys and results.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }

    /// `true` if weights are quantized when they are loaded, not only rounded and laid out.
    pub const fn is_quantized(self) -> bool {
        matches!(self, Self::Int8 | Self::Int4)
    }

    /// The same for what reads whole items at once, which gains nothing from weights below a byte.
    #[must_use]
    pub const fn of_encoders(self) -> Self {
        self.at_least_bytes()
    }

    /// The same for routers of experts, whose layers are few and whose rounding changes what is computed.
    #[must_use]
    pub const fn of_routers(self) -> Self {
        match self {
            Self::F32 => Self::F32,
            Self::Bf16 | Self::Int8 | Self::Int4 => Self::Bf16,
        }
    }

    /// The same for caches and logits, of which nothing is kept below a byte.
    pub(crate) const fn at_least_bytes(self) -> Self {
        match self {
            Self::Int4 => Self::Int8,
            Self::F32 | Self::Bf16 | Self::Int8 => self,
        }
    }
}
