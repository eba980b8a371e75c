//! A decoded image: its size and its pixels.

/// Width and height in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageSize {
    /// Pixels across.
    pub width: u32,
    /// Pixels down.
    pub height: u32,
}

/// Pixels `[height, width, 3]`, red, green, blue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::preprocess) struct RgbPixels {
    /// Width and height.
    pub size: ImageSize,
    /// `[height, width, 3]`, row-major.
    pub rgb: Vec<u8>,
}
