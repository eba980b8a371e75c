//! Pixels to normalised patches, in the order in which the merger takes them.

use super::band::Band;
use super::pixels::RgbPixels;
use super::settings::ImageSettings;
use triptych_kernels::cpu::pixels::large_vec;

/// `[n_patches, 3 · temporal_patch_size · patch_size · patch_size]`: the patches of a merge square one after
/// the other, squares row by row; within a patch by channel, then frame, then row. The last frame is repeated until there are
/// [`ImageSettings::temporal_patch_size`].
///
/// The frames, one or more, have one size, whose sides are multiples of [`ImageSettings::factor`].
pub(in crate::preprocess) fn patches(frames_of_patch: &[&RgbPixels], settings: &ImageSettings) -> Vec<f32> {
    let n_pixels = frames_of_patch.first().map_or(0, |image| image.rgb.len());
    let mut values = large_vec(n_pixels * settings.temporal_patch_size as usize);
    add_patches(&mut values, frames_of_patch, settings);
    values
}

/// As [`patches`], behind other values.
pub(in crate::preprocess) fn add_patches(
    values: &mut Vec<f32>,
    frames_of_patch: &[&RgbPixels],
    settings: &ImageSettings,
) {
    let Some(image) = frames_of_patch.first() else { return };
    let patch = settings.patch_size as usize;
    let merge = settings.merge_size as usize;
    let n_frames = settings.temporal_patch_size as usize;
    let width = image.size.width as usize;
    let height = image.size.height as usize;
    let side = merge * patch;
    let n_bands = frames_of_patch.len().min(n_frames);
    let mut bands: Vec<Band> = (0..n_bands).map(|_| Band::new(settings.norm(), [side, width])).collect();
    for top in (0..height / side).map(|y| y * side) {
        bands.iter_mut().zip(frames_of_patch).for_each(|(band, frame)| band.fill(frame, top));
        let squares = (0..width / side).flat_map(|x| (0..merge * merge).map(move |inner| (x * side, inner)));
        for (square_left, inner) in squares {
            let y = inner / merge * patch;
            let left = square_left + inner % merge * patch;
            for channel in 0..3 {
                let mut frame_start = values.len();
                for band in &bands {
                    frame_start = values.len();
                    (y..y + patch)
                        .for_each(|y| values.extend_from_slice(&band.row(channel, y)[left..left + patch]));
                }
                for _ in n_bands..n_frames {
                    values.extend_from_within(frame_start..frame_start + patch * patch);
                }
            }
        }
    }
}
