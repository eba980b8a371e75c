//! Videos: what their containers hold against other decoders, and what is refused.

use super::golden;
use image::RgbImage;
use std::time::{Duration, Instant};
use triptych_core::limits::Limits;
use triptych_core::{Extent, FrameSampling, ItemOptions, Modality};
use triptych_models::ItemError;
use triptych_models::preprocess::{
    EncoderInput, Features, Preprocess, VideoKind, VideoProcessor, VideoSettings,
};

/// A processor that resizes none of the files here, and takes all their frames.
fn processor() -> VideoProcessor {
    let settings = VideoSettings::from_dir(&golden::path("qwen2_vl_two_images/model"), VideoKind::PerFrame);
    VideoProcessor::new(VideoSettings { fps: 1000.0, ..settings.unwrap() })
}

fn see_with(bytes: &[u8], options: &ItemOptions, limits: &Limits) -> Result<EncoderInput, ItemError> {
    let start = Instant::now();
    let seen = processor().preprocess(Modality::Video, bytes, options, limits);
    // Far more than any of these takes in an unoptimised build on a busy machine.
    assert!(start.elapsed() < Duration::from_secs(60), "took {:?}", start.elapsed());
    seen
}

fn see(bytes: &[u8]) -> Result<EncoderInput, ItemError> {
    see_with(bytes, &ItemOptions::default(), &Limits::default())
}

fn file(name: &str) -> Vec<u8> {
    golden::bytes(&format!("video/{name}"))
}

/// Frames `[n, height, width, 3]` of 0 to 255 behind patches `[n_patches, 3, 2, 14, 14]`.
fn frames_of(input: &EncoderInput) -> Vec<f32> {
    let (&Extent::Video { t, h, w, .. }, Features::Patches(values)) = (&input.extent, &input.features) else {
        panic!("{:?}", input.extent)
    };
    let [t, h, w] = [t, h, w].map(|n| n as usize);
    assert_eq!(values.len(), t * h * w * 1176);
    let settings = VideoSettings::from_dir(&golden::path("qwen2_vl_two_images/model"), VideoKind::PerFrame);
    let image = settings.unwrap().image;
    let mut pixels = vec![0.0; 2 * t * h * w * 196 * 3];
    for (i, patch) in values.as_chunks::<1176>().0.iter().enumerate() {
        let (frame, i) = (i / (h * w), i % (h * w));
        let (square, inner) = (i / 4, i % 4);
        let [y0, x0] = [square / (w / 2) * 2 + inner / 2, square % (w / 2) * 2 + inner % 2];
        for (k, value) in patch.iter().enumerate() {
            let (c, of_patch, y, x) = (k / 392, k / 196 % 2, y0 * 14 + k % 196 / 14, x0 * 14 + k % 14);
            let at = (((2 * frame + of_patch) * h * 14 + y) * w * 14 + x) * 3 + c;
            pixels[at] = (value * image.std[c] + image.mean[c]) * 255.0;
        }
    }
    pixels
}

/// Every fifth frame, one under the other, as another decoder has them.
fn strip(name: &str) -> RgbImage {
    image::load_from_memory(&file(&format!("{name}.png"))).expect("a PNG").into_rgb8()
}

#[test]
fn frames_are_those_of_other_decoders() {
    // Largest and mean difference of a value of 255: conversions of chroma round differently, and so do JPEG decoders.
    for (name, n_frames, fps, allowed) in [
        ("high.mp4", 24, 12.0, [4.0, 1.5]),
        ("baseline.mp4", 8, 12.0, [4.0, 1.5]),
        ("motion.mp4", 6, 6.0, [40.0, 3.0]),
        ("moving.gif", 10, 4.0, [0.01, 0.01]),
        // Laid over the frame before by a decoder that rounds down.
        ("moving.webp", 6, 4.0, [1.01, 1.0]),
    ] {
        let input = see(&file(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let Extent::Video { t, interval, times, .. } = &input.extent else { panic!("{name}") };
        assert_eq!(*t, n_frames / 2, "{name}");
        assert!((interval.get() - 2.0 / fps).abs() < 1e-9, "{name}: {}", interval.get());
        assert!((times[1].get() - 2.5 / fps).abs() < 1e-9, "{name}: {}", times[1].get());
        let frames = frames_of(&input);
        let expect = strip(name);
        let of_frame = frames.len() / n_frames as usize;
        let mut checked = 0;
        for (got, expect) in frames.chunks_exact(of_frame).step_by(5).zip(expect.chunks_exact(of_frame)) {
            let off = got.iter().zip(expect).map(|(a, b)| (a - f32::from(*b)).abs());
            let (largest, sum) = off.fold((0.0_f32, 0.0), |(most, sum), off| (most.max(off), sum + off));
            let mean = sum / of_frame as f32;
            println!("{name} frame {}: at most {largest:.2}, {mean:.3} on average", 5 * checked);
            assert!(largest <= allowed[0] && mean <= allowed[1], "{name}: {largest} {mean}");
            checked += 1;
        }
        assert_eq!(checked, n_frames.div_ceil(5), "{name}");
    }
}

#[test]
fn a_sampled_video_has_the_frames_of_the_whole_one() {
    let whole = frames_of(&see(&file("high.mp4")).unwrap());
    let of_frame = whole.len() / 24;
    let options = ItemOptions { frames: FrameSampling::count(6), ..ItemOptions::default() };
    let some = frames_of(&see_with(&file("high.mp4"), &options, &Limits::default()).unwrap());
    for (i, frame) in some.chunks_exact(of_frame).enumerate() {
        assert!(frame == &whole[4 * i * of_frame..][..of_frame], "frame {i} of six is frame {}", 4 * i);
    }
}

/// A JPEG of one colour.
fn jpeg(width: u32, height: u32, value: u8) -> Vec<u8> {
    let image = RgbImage::from_pixel(width, height, image::Rgb([value, 90, 40]));
    let mut bytes = std::io::Cursor::new(Vec::new());
    image.write_to(&mut bytes, image::ImageFormat::Jpeg).unwrap();
    bytes.into_inner()
}

#[test]
fn a_list_of_frames_is_taken_whole() {
    let list: Vec<u8> = [10, 120, 240].into_iter().flat_map(|value| jpeg(56, 56, value)).collect();
    let rate = |fps| ItemOptions { frames: FrameSampling::rate(fps), ..ItemOptions::default() };
    let input = see_with(&list, &rate(0.5), &Limits::default()).unwrap();
    let Extent::Video { t: 2, h, w, interval, times } = &input.extent else { panic!("{:?}", input.extent) };
    assert_eq!((*h, *w, interval.get()), (4, 4, 4.0));
    // The last frame is repeated.
    assert_eq!(times.iter().map(|time| time.get()).collect::<Vec<_>>(), [1.0, 4.0]);
    let frames = frames_of(&input);
    let reds: Vec<f32> = frames.chunks_exact(frames.len() / 4).map(|frame| frame[0].round()).collect();
    assert!(
        reds.iter().zip([10.0, 120.0, 240.0, 240.0]).all(|(red, expect)| (red - expect).abs() < 4.0),
        "{reds:?}"
    );
    let count = ItemOptions { frames: FrameSampling::count(2), ..ItemOptions::default() };
    let refused = see_with(&list, &count, &Limits::default()).unwrap_err().to_string();
    assert!(refused.contains("all of them are read"), "{refused}");
    let other = [jpeg(56, 28, 1), jpeg(28, 56, 2)].concat();
    let refused = see(&other).unwrap_err().to_string();
    assert!(refused.contains("28x56 pixels, the video 56x28"), "{refused}");
}

#[test]
fn what_is_not_read_is_refused_by_name() {
    let cut = |name: &str, n: usize| file(name)[..n].to_vec();
    let other = golden::media("speech.m4a");
    for (bytes, expect) in [
        (file("fields.mp4"), "H.264 with interlace"),
        (file("chroma444.mp4"), "H.264 with non-4:2:0 chroma"),
        (file("part2.mp4"), "MPEG-4 part 2 in MP4; read are MP4 with H.264 or motion JPEG"),
        (file("vp9.webm"), "a Matroska or WebM file; read are MP4"),
        (file("still.webp"), "a still WebP image"),
        (other, "has no video track"),
        (file("high.mp4.png"), "a PNG image; read are MP4"),
        (cut("high.mp4", 3000), "MP4 file"),
        (cut("moving.gif", 2000), "GIF does not decode"),
        (cut("moving.webp", 2000), "WebP"),
        (b"\0\0\0\x08ftyp".to_vec(), "MP4 file"),
        (jpeg(28, 28, 1)[..200].to_vec(), "no whole JPEG"),
        (Vec::new(), "has no bytes"),
    ] {
        let refused = see(&bytes).expect_err(expect).to_string();
        assert!(refused.contains(expect), "{refused:?} should say {expect:?}");
    }
}

#[test]
fn limits_hold_before_a_frame_is_decoded() {
    let plain = Limits::default;
    for (name, limits, expect) in [
        ("high.mp4", Limits { max_video_frames: 23, ..plain() }, "24 frames or more, the limit is 23 frames"),
        ("high.mp4", Limits { max_video_pixels: 112_895, ..plain() }, "24 frames of 84x56 = 112896 pixels"),
        ("high.mp4", Limits { max_video: Duration::from_millis(1900), ..plain() }, "2.0 s long"),
        ("high.mp4", Limits { max_image_pixels: 4_703, ..plain() }, "84x56 = 4704 pixels"),
        ("moving.gif", Limits { max_video_frames: 9, ..plain() }, "10 frames or more"),
        ("moving.gif", Limits { max_image_pixels: 4_703, ..plain() }, "84x56 = 4704 pixels"),
        ("moving.webp", Limits { max_video_frames: 5, ..plain() }, "6 frames or more"),
        ("motion.mp4", Limits { max_image_pixels: 4_703, ..plain() }, "84x56 = 4704 pixels"),
    ] {
        let refused = see_with(&file(name), &ItemOptions::default(), &limits).expect_err(expect).to_string();
        assert!(refused.contains(expect), "{refused:?} should say {expect:?}");
    }
}

#[test]
fn small_files_that_claim_much_cost_little() {
    // A GIF of a few bytes with a canvas of four billion pixels, and one whose frames are large and many.
    let canvas = |side: u16| {
        let side = side.to_le_bytes();
        [b"GIF89a", &side[..], &side[..], &[0x80, 0, 0, 0, 0, 0, 255, 255, 255]].concat()
    };
    let frame = |side: u16| {
        let side = side.to_le_bytes();
        let head = [0x2c, 0, 0, 0, 0, side[0], side[1], side[0], side[1], 0, 2];
        [&head[..], &[2, 0x44, 0x01, 0]].concat()
    };
    let huge = [canvas(u16::MAX), frame(1), frame(1), vec![0x3b]].concat();
    let refused = see(&huge).unwrap_err().to_string();
    assert!(refused.contains("4294836225 pixels, the limit is 50000000"), "{refused}");
    let many = [canvas(5000), frame(1).repeat(400), vec![0x3b]].concat();
    let refused = see(&many).unwrap_err().to_string();
    assert!(refused.contains("400 frames of 5000x5000"), "{refused}");
    // A table that names the same bytes as many packets, and one that claims four billion of them.
    let mp4 = file("high.mp4");
    let at = mp4.windows(4).position(|name| name == b"stsz").expect("a table of sizes");
    let mut bytes = mp4.clone();
    // A size for all packets.
    bytes[at + 8..at + 12].copy_from_slice(&6_000_u32.to_be_bytes());
    assert!(see(&bytes).is_err());
    bytes[at + 12..at + 16].copy_from_slice(&u32::MAX.to_be_bytes());
    assert!(see(&bytes).is_err());
}

#[test]
fn no_bytes_make_it_panic() {
    let mut state = 7_u32;
    let mut random = move |below: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as usize % below
    };
    for name in ["high.mp4", "baseline.mp4", "motion.mp4", "moving.gif", "moving.webp", "fields.mp4"] {
        let whole = file(name);
        for _ in 0..40 {
            let mut bytes = whole.clone();
            for _ in 0..1 + random(8) {
                let at = random(bytes.len());
                bytes[at] ^= 1 << random(8);
            }
            bytes.truncate(bytes.len() - random(2) * random(bytes.len()));
            // Refused or read; a panic of a decoder is contained and told as a corrupt item.
            let _ = see(&bytes);
        }
    }
}
