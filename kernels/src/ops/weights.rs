//! Stored weights, as loaders hand them over.

use triptych_core::DType;

/// A stored tensor as it lies in a file: row-major, little-endian, borrowed.
#[derive(Clone, Copy, Debug)]
pub struct WeightView<'a> {
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost first.
    pub shape: &'a [usize],
    /// The bytes; their number is the product of `shape` and the element size.
    pub data: &'a [u8],
}

/// One linear layer as stored: `weight [out, in]`, `bias [out]`.
#[derive(Clone, Copy, Debug)]
pub struct LinearPart<'a> {
    /// `[out, in]`; more than two dimensions (a convolution) are flattened to `[out, rest]`.
    pub weight: WeightView<'a>,
    /// `[out]`.
    pub bias: Option<WeightView<'a>>,
    /// Factor on weight and bias, taken in when they are loaded: a gate or an embedding's scale. Usually 1.
    pub scale: f32,
}

impl<'a> LinearPart<'a> {
    /// A layer as stored, unscaled.
    pub fn new(weight: WeightView<'a>, bias: Option<WeightView<'a>>) -> Self {
        Self { weight, bias, scale: 1.0 }
    }
}
