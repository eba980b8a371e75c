//! Pixels to normalised patches, in the order in which the merger takes them.

use super::pixels::RgbPixels;
use super::settings::ImageSettings;

/// `[n_patches, 3 · temporal_patch_size · patch_size · patch_size]`: the patches of a merge square one after
/// the other, squares row by row; within a patch by channel, then frame, then row. The last frame is repeated until there are
/// [`ImageSettings::temporal_patch_size`].
///
/// The frames, one or more, have one size, whose sides are multiples of [`ImageSettings::factor`].
pub(in crate::preprocess) fn patches(frames_of_patch: &[&RgbPixels], settings: &ImageSettings) -> Vec<f32> {
    let Some(image) = frames_of_patch.first() else { return Vec::new() };
    let patch = settings.patch_size as usize;
    let merge = settings.merge_size as usize;
    let frames = settings.temporal_patch_size as usize;
    let width = image.size.width as usize;
    let height = image.size.height as usize;
    let grid_h = height / patch;
    let grid_w = width / patch;
    let tables = [0, 1, 2].map(|channel| table(settings, channel));
    let mut values = Vec::with_capacity(grid_h * grid_w * 3 * frames * patch * patch);
    for square in 0..(grid_h / merge) * (grid_w / merge) {
        let square_y = square / (grid_w / merge);
        let square_x = square % (grid_w / merge);
        for inner in 0..merge * merge {
            let top = (square_y * merge + inner / merge) * patch;
            let left = (square_x * merge + inner % merge) * patch;
            for (channel, table) in tables.iter().enumerate() {
                let mut frame_start = values.len();
                for frame in frames_of_patch.iter().take(frames) {
                    frame_start = values.len();
                    for y in top..top + patch {
                        let row = &frame.rgb[(y * width + left) * 3..(y * width + left + patch) * 3];
                        values.extend(row.iter().skip(channel).step_by(3).map(|v| table[usize::from(*v)]));
                    }
                }
                for _ in frames_of_patch.len()..frames {
                    values.extend_from_within(frame_start..frame_start + patch * patch);
                }
            }
        }
    }
    values
}

/// The normalised value of each pixel value of a channel.
fn table(settings: &ImageSettings, channel: usize) -> [f32; 256] {
    let mean = settings.mean[channel];
    let std = settings.std[channel];
    std::array::from_fn(|v| (v as f32 * settings.rescale - mean) / std)
}
