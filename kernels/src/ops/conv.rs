//! Arguments of the pieces that convolutions are made of.

use super::error::Result;
use crate::check;

/// Windows of a 1-D convolution: parameters of [`Backend::unfold`](super::Backend::unfold).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfold {
    /// Sequences in the rows.
    pub n_seqs: usize,
    /// Taps.
    pub kernel: usize,
    /// Rows between outputs.
    pub stride: usize,
    /// Zero rows on either side.
    pub padding: usize,
}

/// Windows of a 2-D convolution over images of one size. Pairs are (vertical, horizontal); an axis of `n` pixels
/// has `(n + 2·padding − kernel) / stride + 1` windows, rounded down, none if it is shorter than one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv2d {
    /// Images in the rows.
    pub n_images: usize,
    /// Pixels of an image, `[height, width]`.
    pub size: [usize; 2],
    /// Taps.
    pub kernel: [usize; 2],
    /// Pixels between outputs.
    pub stride: [usize; 2],
    /// Zero pixels on either side.
    pub padding: [usize; 2],
}

impl Unfold {
    /// `(rows, columns)` of the windows of rows of these dimensions.
    ///
    /// # Errors
    /// As [`Backend::unfold`](super::Backend::unfold).
    pub fn dims(self, x: (usize, usize)) -> Result<(usize, usize)> {
        let windows = check::unfold(x, self)?;
        Ok((self.n_seqs * windows.t_out, windows.width))
    }
}

impl Conv2d {
    /// `(rows, columns)` of the windows of rows of these dimensions.
    ///
    /// # Errors
    /// As [`Backend::unfold2d`](super::Backend::unfold2d).
    pub fn dims(self, x: (usize, usize)) -> Result<(usize, usize)> {
        let planes = check::unfold2d(x, self)?;
        Ok((planes.n_rows, planes.width))
    }
}
