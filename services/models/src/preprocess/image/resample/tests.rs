//! Resampled images against Pillow's, byte for byte.

use super::*;
use safetensors::SafeTensors;
use std::path::PathBuf;

fn golden(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/preprocess").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("golden file {}: {e}", path.display()))
}

/// Noise of the generator that `tests/golden/preprocess.py` has: the high byte of each state.
fn noise(size: ImageSize) -> RgbPixels {
    let mut state = size.width * 1000 + size.height;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    let n = size.width as usize * size.height as usize * 3;
    RgbPixels { size, rgb: (0..n).map(|_| next()).collect() }
}

fn size_of(value: &serde_json::Value) -> ImageSize {
    let side = |i: usize| value[i].as_u64().and_then(|n| u32::try_from(n).ok()).expect("a side");
    ImageSize { height: side(0), width: side(1) }
}

fn filter_of(number: u64) -> ResizeFilter {
    ResizeFilter::ALL[usize::try_from(number).expect("a filter")]
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |c, _| if c & 1 == 1 { c >> 1 ^ 0xEDB8_8320 } else { c >> 1 })
    })
}

#[test]
fn every_filter_gives_the_bytes_of_the_reference() {
    let list: serde_json::Value = serde_json::from_slice(&golden("resize.json")).expect("golden JSON");
    let bytes = golden("resize.safetensors");
    let tensors = SafeTensors::deserialize(&bytes).expect("golden tensors");
    let rows = list["cases"].as_array().expect("cases");
    assert!(rows.len() >= 90);
    for row in rows {
        let filter = filter_of(row["resample"].as_u64().expect("a number"));
        let got = resample(noise(size_of(&row["from"])), size_of(&row["to"]), filter);
        assert_eq!(got.size, size_of(&row["to"]), "{row}");
        assert_eq!(u64::from(crc32(&got.rgb)), row["crc32"].as_u64().expect("a checksum"), "{row}");
        if let Some(name) = row["name"].as_str() {
            assert_eq!(got.rgb, tensors.tensor(name).expect(name).data(), "{row}");
        }
    }
}

#[test]
fn a_row_is_the_same_alone_and_in_a_strip() {
    let kernel = Kernel::of(ResizeFilter::Lanczos).expect("a kernel");
    for height in [1, 15, 16, 17, 33] {
        let image = noise(ImageSize { width: 37, height });
        for width in [1, 5, 36, 38, 90] {
            let whole = across(&image, width, kernel);
            for (y, row) in image.rgb.chunks(37 * 3).enumerate() {
                let alone = RgbPixels { size: ImageSize { width: 37, height: 1 }, rgb: row.to_vec() };
                let n = width as usize * 3;
                assert_eq!(across(&alone, width, kernel).rgb, whole.rgb[y * n..(y + 1) * n], "{height} {y}");
            }
        }
    }
}

#[test]
fn weights_of_a_window_sum_up_to_one_and_stay_below_two() {
    for filter in ResizeFilter::ALL {
        let Some(kernel) = Kernel::of(filter) else { continue };
        for (from, to) in [(1, 1), (1, 9), (9, 1), (7, 5), (5, 7), (1000, 3), (3, 1000), (65_536, 2)] {
            for RowWindow { first, weights } in (Side { from, to, kernel }).windows() {
                assert!(first + weights.len() <= from as usize && !weights.is_empty());
                let sum: i64 = weights.iter().map(|w| i64::from(*w)).sum();
                let size: i64 = weights.iter().map(|w| i64::from(w.abs())).sum();
                assert!((sum - (1 << WEIGHT_BITS)).abs() <= weights.len() as i64, "{filter:?} {from} {to}");
                assert!(size < 2 << WEIGHT_BITS, "{filter:?} {from} {to}");
            }
        }
    }
}

#[test]
fn values_are_bytes_before_they_are_rounded() {
    for (size, target) in [((37, 20), (11, 50)), ((5, 5), (5, 9)), ((1, 3), (4, 1)), ((8, 6), (8, 6))] {
        let [size, target] = [size, target].map(|(width, height)| ImageSize { width, height });
        let image = noise(size);
        let values = resample_values(&image, target, ResizeFilter::Bilinear);
        let bytes = resample(image, target, ResizeFilter::Bilinear).rgb;
        assert_eq!(values.len(), bytes.len());
        for (value, byte) in values.iter().zip(&bytes) {
            // Each of two passes rounds by half a step.
            assert!((value - f32::from(*byte)).abs() <= 1.01, "{size:?} {target:?}: {value} {byte}");
        }
        let is_rounded = values.iter().all(|value| value.fract() == 0.0);
        assert_eq!(is_rounded, size == target);
    }
}
