//! Planes of pixels as the patches that stems read.

use triptych_models::spec::{EncoderSpec, StemSpec};

/// Values of an image as the stem reads them, `[n_tiles · n_patches, 3 · n_frames · side · side]`, from planes.
pub fn patches(pixels: &(Vec<usize>, Vec<f32>), spec: &EncoderSpec) -> Vec<f32> {
    let side = spec.stem.patch_side().expect("a patch");
    let square = spec.contiguous_side();
    let n_frames = match spec.stem {
        StemSpec::Patches { patch: [_, n_frames, ..], .. } => n_frames,
        _ => 1,
    };
    let (shape, values) = pixels;
    let [n_tiles, height, width] = [shape[0], shape[2], shape[3]];
    let mut out = Vec::with_capacity(values.len());
    for tile in 0..n_tiles {
        for [y, x] in corners([height / side, width / side], square) {
            for channel in 0..3 {
                let plane = &values[(tile * 3 + channel) * height * width..][..height * width];
                let rows = (y * side..(y + 1) * side).map(|row| &plane[row * width + x * side..][..side]);
                // A still image is its own next frame.
                (0..n_frames).for_each(|_| out.extend(rows.clone().flatten()));
            }
        }
    }
    out
}

/// Patches of a grid, line by line in squares of `square` a side, which go line by line too.
fn corners([down, across]: [usize; 2], square: usize) -> impl Iterator<Item = [usize; 2]> {
    let squares = (0..down / square).flat_map(move |y| (0..across / square).map(move |x| [y, x]));
    squares.flat_map(move |[y, x]| {
        (0..square * square).map(move |i| [y * square + i / square, x * square + i % square])
    })
}

/// Tiles `[n_tiles, 3, side, side]` as patches.
pub fn tile_patches(tiles: &[f32], [side, patch]: [usize; 2]) -> Vec<f32> {
    let mut values = Vec::with_capacity(tiles.len());
    for tile in tiles.chunks_exact(3 * side * side) {
        for place in 0..(side / patch) * (side / patch) {
            let [top, left] = [place / (side / patch), place % (side / patch)].map(|n| n * patch);
            for channel in 0..3 {
                for y in top..top + patch {
                    let start = channel * side * side + y * side + left;
                    values.extend_from_slice(&tile[start..start + patch]);
                }
            }
        }
    }
    values
}
