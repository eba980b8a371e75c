//! Images.

use super::golden::{self, Tensors};
use super::{furthest, image_settings};
use image::{DynamicImage, ImageFormat, Rgb, RgbImage};
use std::io::Cursor;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemOptions, Modality};
use triptych_models::ItemError;
use triptych_models::preprocess::image::{ImageSize, PixelCount, smart_resize};
use triptych_models::preprocess::{EncoderInput, Features, ImageProcessor, ImageSettings, Preprocess};

fn see(bytes: &[u8]) -> Result<EncoderInput, ItemError> {
    let processor = ImageProcessor::new(image_settings(3136, 12_845_056));
    processor.preprocess(Modality::Image, bytes, &ItemOptions::default(), &Limits::default())
}

/// `[n_patches, 3, 2, 14, 14]` to `[h, w, 3]` of 0 to 255, from the second frame.
fn pixels_of(input: &EncoderInput, settings: &ImageSettings) -> (usize, usize, Vec<f32>) {
    let (&Extent::Grid { t: 1, h, w }, Features::Patches(values)) = (&input.extent, &input.features) else {
        panic!("{:?}", input.extent)
    };
    let h = h as usize;
    let w = w as usize;
    assert_eq!(values.len(), h * w * 1176);
    let mut pixels = vec![0.0; h * w * 196 * 3];
    for (i, patch) in values.as_chunks::<1176>().0.iter().enumerate() {
        let square = i / 4;
        let inner = i % 4;
        let y0 = square / (w / 2) * 2 + inner / 2;
        let x0 = square % (w / 2) * 2 + inner % 2;
        for c in 0..3 {
            for k in 0..196 {
                assert_eq!(patch[c * 392 + k], patch[c * 392 + 196 + k], "both frames are the still image");
                let y = y0 * 14 + k / 14;
                let x = x0 * 14 + k % 14;
                pixels[(y * w * 14 + x) * 3 + c] =
                    (patch[c * 392 + 196 + k] * settings.std[c] + settings.mean[c]) * 255.0;
            }
        }
    }
    (h * 14, w * 14, pixels)
}

pub fn png(image: &DynamicImage) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    image.write_to(&mut bytes, ImageFormat::Png).unwrap();
    bytes.into_inner()
}

#[test]
fn pixels_match_the_reference() {
    let tensors = Tensors::read("preprocess/images.safetensors");
    let list = golden::json("preprocess/images.json");
    let rows = list["images"].as_array().unwrap();
    assert!(rows.len() >= 16);
    for row in rows {
        let name = row["name"].as_str().unwrap();
        let settings =
            image_settings(row["min_pixels"].as_u64().unwrap(), row["max_pixels"].as_u64().unwrap());
        let processor = ImageProcessor::new(settings.clone());
        let bytes = golden::bytes(&format!("preprocess/{}", row["file"].as_str().unwrap()));
        let input = processor
            .preprocess(Modality::Image, &bytes, &ItemOptions::default(), &Limits::default())
            .unwrap();
        let grid = golden::ids(&row["grid_thw"]);
        assert_eq!(input.extent, Extent::Grid { t: grid[0], h: grid[1], w: grid[2] }, "{name}");
        assert_eq!(input.n_tokens, grid[1] * grid[2] / 4, "{name}");
        let (shape, expect) = tensors.u8(&format!("{name}.resized"));
        let (h, w, got) = pixels_of(&input, &settings);
        assert_eq!(shape, [h, w, 3], "{name}");
        // Two JPEG decoders need not agree to the last bit, and a resize can widen that.
        let allowed = if row["file"].as_str().unwrap().ends_with("jpg") { 4.0 } else { 0.0 };
        let off = furthest(&got, expect.iter().map(|v| f32::from(*v)));
        println!("{name}: {off:.3} of 255");
        assert!(off <= allowed + 1e-3, "{name}: {off} of 255");
        if tensors.has(&format!("{name}.pixel_values")) {
            let (_, expect) = tensors.f32(&format!("{name}.pixel_values"));
            let Features::Patches(values) = &input.features else { panic!("{name}") };
            assert!(furthest(values, expect.into_iter()) < 1e-5, "{name}");
        }
    }
}

#[test]
fn sizes_are_the_references() {
    for row in golden::json("preprocess/smart_resize.json").as_array().unwrap() {
        let number = |key: &str| row[key].as_u64().unwrap();
        let mut settings = image_settings(number("min_pixels"), number("max_pixels"));
        settings.patch_size = number("factor") as u32 / settings.merge_size;
        let size = ImageSize { width: number("width") as u32, height: number("height") as u32 };
        let got = smart_resize(size, &settings);
        match row.get("resized") {
            Some(pair) => {
                let pair = golden::ids(pair);
                assert_eq!(got.unwrap(), ImageSize { height: pair[0], width: pair[1] }, "{row}");
            }
            None => assert!(matches!(got, Err(ItemError::TooLarge { .. })), "{row}"),
        }
    }
}

/// Sizes are those of transformers' `Glm46VImageProcessorPil`, with its defaults.
#[test]
fn glms_sizes_count_the_frames_of_a_patch() {
    let settings =
        ImageSettings { count: PixelCount::OfFrames, ..image_settings(112 * 112, 14 * 14 * 8 * 6144) };
    let check = |[height, width]: [u32; 2], expect: Option<[u32; 2]>| {
        let got = smart_resize(ImageSize { width, height }, &settings);
        assert_eq!(got.ok().map(|size| [size.height, size.width]), expect, "{height}x{width}");
    };
    check([28, 28], Some([84, 84]));
    // A short side is enlarged, and the other with it.
    check([10, 300], Some([28, 840]));
    check([3, 4], Some([84, 112]));
    check([1000, 999], Some([1008, 1008]));
    check([97, 4000], Some([84, 4004]));
    check([5000, 7000], Some([1848, 2576]));
    check([112, 56], Some([112, 56]));
    check([1000, 1], None);
    check([14, 3000], None);
}

#[test]
fn a_header_that_declares_too_much_is_refused_with_value_and_limit() {
    let mut bytes = png(&DynamicImage::new_rgb8(1, 1));
    bytes[16..20].copy_from_slice(&60_000_u32.to_be_bytes());
    bytes[20..24].copy_from_slice(&60_000_u32.to_be_bytes());
    let crc = crc32(&bytes[12..29]);
    bytes[29..33].copy_from_slice(&crc.to_be_bytes());
    let text = see(&bytes).unwrap_err().to_string();
    assert_eq!(text, "the image is 60000x60000 = 3600000000 pixels, the limit is 50000000 pixels");
    let small = Limits { max_item_bytes: 10, ..Limits::default() };
    let processor = ImageProcessor::new(image_settings(3136, 12_845_056));
    assert!(matches!(
        processor.preprocess(Modality::Image, &bytes, &ItemOptions::default(), &small),
        Err(ItemError::TooLarge { what: "the item", .. })
    ));
}

pub fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |c, _| if c & 1 == 1 { c >> 1 ^ 0xEDB8_8320 } else { c >> 1 })
    })
}

#[test]
fn input_that_is_no_image_is_named() {
    let check = |bytes: &[u8], expect: &str| {
        let text = see(bytes).unwrap_err().to_string();
        assert!(text.contains(expect), "{text}");
    };
    check(b"", "no bytes");
    check(b"just words", "a text; read are PNG, JPEG, WebP, GIF and BMP");
    check(b"<!doctype html><p>404", "an HTML text; read are");
    check(b"{\"error\": 1}", "a JSON text; read are");
    check(b"%PDF-1.7", "a PDF document; read are");
    check(&[0; 40], "40 bytes of an unknown format; read are");
    check(&golden::media("speech.mp3"), "read are PNG");
    check(b"\x89PNG\r\n\x1a\n", "a PNG image does not decode");
    let whole = png(&DynamicImage::ImageRgb8(RgbImage::from_fn(40, 40, |x, y| Rgb([x as u8, y as u8, 7]))));
    check(&whole[..whole.len() / 2], "a PNG image does not decode");
    let jpeg = golden::media("gradient_cmyk.jpg");
    check(&jpeg[..20], "a JPEG image does not decode");
}

#[test]
fn first_frames_and_odd_colours_are_read() {
    let settings = image_settings(3136, 12_845_056);
    for name in ["two_frames.webp", "two_frames.gif"] {
        let (_, _, got) = pixels_of(&see(&golden::media(name)).unwrap(), &settings);
        let expect = [200.0, 30.0, 40.0].into_iter().cycle().take(got.len());
        assert!(furthest(&got, expect) <= 1.0, "{name}");
    }
    // CMYK, as Pillow reads it: corners of a gradient.
    let (h, w, got) = pixels_of(&see(&golden::media("gradient_cmyk.jpg")).unwrap(), &settings);
    let corner = |y: usize, x: usize| &got[(y * w + x) * 3..(y * w + x) * 3 + 3];
    for (at, expect) in [
        (corner(0, 0), [0.0, 0.0, 0.0]),
        (corner(0, w - 1), [255.0, 0.0, 153.0]),
        (corner(h - 1, 0), [0.0, 254.0, 102.0]),
        (corner(h - 1, w - 1), [255.0, 254.0, 254.0]),
    ] {
        assert!(furthest(at, expect.into_iter()) <= 4.0, "{at:?} {expect:?}");
    }
    // The high byte of 16 bits.
    let grey = image::ImageBuffer::from_pixel(28, 112, image::Luma([0x80FF_u16]));
    let (_, _, got) = pixels_of(&see(&png(&DynamicImage::ImageLuma16(grey))).unwrap(), &settings);
    assert!(furthest(&got, std::iter::repeat_n(128.0, got.len())) < 1e-3);
}

#[test]
fn a_sliver_is_refused_and_a_wrong_modality_too() {
    let text = see(&png(&DynamicImage::new_rgb8(1, 201))).unwrap_err().to_string();
    assert_eq!(text, "the image's longer side over its shorter is 201.0 (1x201), the limit is 200");
    let processor = ImageProcessor::new(image_settings(3136, 12_845_056));
    assert!(
        processor.preprocess(Modality::Audio, &[1], &ItemOptions::default(), &Limits::default()).is_err()
    );
}
