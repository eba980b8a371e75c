//! Planes of 4:2:0 to red, green, blue: BT.601 of limited range, a chroma sample for four pixels, in 8 bits behind the point, as
//! libswscale converts what declares nothing else.

use crate::preprocess::image::{ImageSize, RgbPixels};

/// A frame as its planes.
pub(super) struct YuvFrame {
    /// Pixels, both even.
    pub size: ImageSize,
    /// `[height, width]`.
    pub luma: Vec<u8>,
    /// Blue and red differences, `[height / 2, width / 2]` each.
    pub chroma: [Vec<u8>; 2],
}

impl YuvFrame {
    /// Its pixels; `None` if a plane is too short.
    pub fn to_rgb(&self) -> Option<RgbPixels> {
        let (width, height) = (self.size.width as usize, self.size.height as usize);
        let of_chroma = width / 2;
        let mut rgb = Vec::with_capacity(width * height * 3);
        for y in 0..height {
            let luma = self.luma.get(y * width..(y + 1) * width)?;
            let at = (y / 2) * of_chroma;
            let [blue, red] = [&self.chroma[0], &self.chroma[1]].map(|plane| plane.get(at..at + of_chroma));
            let chroma = blue?.iter().zip(red?);
            for (pair, (u, v)) in luma.chunks(2).zip(chroma) {
                for luma in pair {
                    rgb.extend(pixel(*luma, *u, *v));
                }
            }
        }
        (rgb.len() == width * height * 3).then_some(RgbPixels { size: self.size, rgb })
    }
}

fn pixel(luma: u8, u: u8, v: u8) -> [u8; 3] {
    let c = 298 * (i32::from(luma) - 16) + 128;
    let [d, e] = [u, v].map(|value| i32::from(value) - 128);
    [c + 409 * e, c - 100 * d - 208 * e, c + 516 * d].map(|value| (value >> 8).clamp(0, 255) as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greys_and_primaries_are_those_of_bt601() {
        for (yuv, expect) in [
            ([16, 128, 128], [0; 3]),
            ([235, 128, 128], [255; 3]),
            ([81, 90, 240], [255, 0, 0]),
            ([145, 54, 34], [0, 255, 0]),
            ([41, 240, 110], [0, 0, 255]),
        ] {
            let got = pixel(yuv[0], yuv[1], yuv[2]);
            assert!(got.iter().zip(expect).all(|(a, b)| a.abs_diff(b) <= 1), "{yuv:?}: {got:?}");
        }
    }

    #[test]
    fn a_short_plane_is_no_frame() {
        let frame = |n_luma, n_chroma| YuvFrame {
            size: ImageSize { width: 4, height: 2 },
            luma: vec![16; n_luma],
            chroma: [vec![128; n_chroma], vec![128; n_chroma]],
        };
        assert_eq!(frame(8, 2).to_rgb().map(|pixels| pixels.rgb), Some(vec![0; 24]));
        assert!(frame(7, 2).to_rgb().is_none() && frame(8, 1).to_rgb().is_none());
    }
}
