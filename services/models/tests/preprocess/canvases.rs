//! Processors that bring every image to one canvas: what their files say, old and new, and what is refused.

use std::path::Path;
use triptych_models::ModelError;
use triptych_models::preprocess::CanvasSettings;
use triptych_models::preprocess::image::canvas::CanvasStep;
use triptych_models::preprocess::image::{ImageSize, ResizeFilter};

fn read(file: &str, json: &serde_json::Value) -> Result<CanvasSettings, ModelError> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(Path::new(dir.path()).join(file), json.to_string()).expect("a file");
    CanvasSettings::from_dir(dir.path())
}

fn size(width: u32, height: u32) -> ImageSize {
    ImageSize { width, height }
}

#[test]
fn files_of_every_generation_are_read() {
    let check = |json: serde_json::Value, steps: &[CanvasStep], filter: ResizeFilter| {
        let settings = read("preprocessor_config.json", &json).expect("settings");
        assert_eq!((settings.steps.as_slice(), settings.filter), (steps, filter), "{json}");
    };
    check(
        serde_json::json!({ "feature_extractor_type": "ViTFeatureExtractor", "size": 384, "resample": 3 }),
        &[CanvasStep::Exact(size(384, 384))],
        ResizeFilter::Bicubic,
    );
    check(
        serde_json::json!({ "image_processor_type": "ViTImageProcessorFast", "size": { "height": 32, "width": 64 } }),
        &[CanvasStep::Exact(size(64, 32))],
        ResizeFilter::Bilinear,
    );
    check(
        serde_json::json!({ "image_processor_type": "DeiTImageProcessor" }),
        &[CanvasStep::Exact(size(256, 256)), CanvasStep::CenterCrop(size(224, 224))],
        ResizeFilter::Bicubic,
    );
    check(
        serde_json::json!({ "image_processor_type": "BeitImageProcessor", "size": [40, 30], "do_center_crop": true }),
        &[CanvasStep::Exact(size(30, 40)), CanvasStep::CenterCrop(size(224, 224))],
        ResizeFilter::Bicubic,
    );
    check(
        serde_json::json!({ "image_processor_type": "CLIPImageProcessor", "size": 99, "crop_size": 90 }),
        &[CanvasStep::ShortestEdge(99), CanvasStep::CenterCrop(size(90, 90))],
        ResizeFilter::Bicubic,
    );
    // Donut wrote its sizes across, down.
    let page = size(1920, 2560);
    check(
        serde_json::json!({
            "feature_extractor_type": "DonutFeatureExtractor", "size": [1920, 2560], "do_align_long_axis": true,
        }),
        &[
            CanvasStep::AlignLongAxis(page),
            CanvasStep::ShortestEdge(1920),
            CanvasStep::Thumbnail { bounds: page, filter: None },
            CanvasStep::Pad(page),
        ],
        ResizeFilter::Bilinear,
    );
    check(
        serde_json::json!({ "image_processor_type": "DonutImageProcessor", "do_resize": false, "do_pad": false }),
        &[CanvasStep::Thumbnail { bounds: page, filter: None }],
        ResizeFilter::Bilinear,
    );
    let page = size(672, 896);
    check(
        serde_json::json!({ "image_processor_type": "NougatImageProcessor", "resample": 1 }),
        &[
            CanvasStep::CropMargin,
            CanvasStep::ShortestEdge(672),
            CanvasStep::Thumbnail { bounds: page, filter: Some(ResizeFilter::Bicubic) },
            CanvasStep::Pad(page),
        ],
        ResizeFilter::Lanczos,
    );
}

#[test]
fn a_processor_config_holds_the_same_one_level_down() {
    let part = serde_json::json!({ "image_processor_type": "CLIPImageProcessor", "do_center_crop": false, "size": 7 });
    let whole = serde_json::json!({ "processor_class": "Florence2Processor", "image_processor": part });
    let settings = read("processor_config.json", &whole).expect("settings");
    assert_eq!(settings, read("preprocessor_config.json", &part).expect("settings"));
    assert_eq!(settings.steps, [CanvasStep::ShortestEdge(7)]);
    let error = read("processor_config.json", &serde_json::json!({})).expect_err("no part").to_string();
    assert!(error.contains("processor_config.json: image_processor"), "{error}");
}

#[test]
fn normalising_and_rescaling_can_be_switched_off() {
    let json = serde_json::json!({
        "image_processor_type": "ViTImageProcessor", "do_normalize": false, "do_rescale": false,
    });
    let settings = read("preprocessor_config.json", &json).expect("settings");
    assert_eq!((settings.mean, settings.std, settings.rescale), ([0.0; 3], [1.0; 3], 1.0));
}

#[test]
fn unsupported_settings_are_refused_by_name() {
    let check = |key: &str, value: serde_json::Value, expect: &str| {
        let mut json = serde_json::json!({ "image_processor_type": "ViTImageProcessor" });
        json[key] = value;
        let error = read("preprocessor_config.json", &json).expect_err("refused").to_string();
        assert!(error.starts_with(&format!("preprocessor_config.json: {key} is ")), "{error}");
        assert!(error.contains(expect), "{error}");
    };
    check("image_processor_type", "PvtImageProcessor".into(), "ViTImageProcessor, or that of DeiT");
    check("do_resize", false.into(), "expected true");
    check("do_pad", true.into(), "expected false");
    check("do_reduce_labels", true.into(), "expected false");
    check(
        "resample",
        6.into(),
        "0 (nearest), 1 (lanczos), 2 (bilinear), 3 (bicubic), 4 (box) or 5 (hamming)",
    );
    check("size", serde_json::json!({ "longest_edge": 100, "shortest_edge": 10 }), "1 to 8192");
    check("size", 1_000_000.into(), "1 to 8192");
    check("size", serde_json::json!({ "height": 0, "width": 10 }), "1 to 8192");
    check("image_std", serde_json::json!([0.5, 0.0, 0.5]), "numbers above 0");
    check("image_mean", serde_json::json!([0.5]), "three numbers");
}
