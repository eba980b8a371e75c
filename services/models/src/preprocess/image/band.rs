//! Rows of an image, normalised and by channel: what patches are copied from.

use super::pixels::RgbPixels;
use triptych_kernels::cpu::pixels::{PixelNorm, normalise_planes};

/// Neighbouring rows of an image, `[3, n_rows, width]`.
#[derive(Debug)]
pub(super) struct Band {
    norm: PixelNorm,
    n_rows: usize,
    width: usize,
    values: Vec<f32>,
}

impl Band {
    /// `n_rows` rows, not filled.
    pub fn new(norm: PixelNorm, [n_rows, width]: [usize; 2]) -> Self {
        Self { norm, n_rows, width, values: vec![0.0; 3 * n_rows * width] }
    }

    /// Fills it with the rows of the image from `top` on, as many as there are. The image has the width of the band.
    pub fn fill(&mut self, image: &RgbPixels, top: usize) {
        let of_channel = self.n_rows * self.width;
        let (red, rest) = self.values.split_at_mut(of_channel);
        let (green, blue) = rest.split_at_mut(of_channel);
        let rows = image.rgb.as_chunks::<3>().0.get(top * self.width..).unwrap_or_default();
        let pixels = &rows[..rows.len().min(of_channel)];
        normalise_planes(pixels, self.norm, [red, green, blue]);
    }

    /// Row `y` of a channel.
    pub fn row(&self, channel: usize, y: usize) -> &[f32] {
        &self.values[(channel * self.n_rows + y) * self.width..][..self.width]
    }
}
