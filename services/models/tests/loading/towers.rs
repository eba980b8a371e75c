//! Digests of towers, which the Python package makes of the same files.

use std::path::Path;
use triptych_core::{DType, Modality};
use triptych_models::{LoadFormat, Model, ModelSource};

#[test]
fn towers_of_golden_models_are_those_of_the_python_side() {
    // `services/ec/python/tests/test_tower.py` has the same.
    for (name, fingerprint) in [
        ("qwen2_vl_two_images", "31cfa0402cbdc12ce03324432b2fe9213506b6ab1185593193dfe5669bda6ea7"),
        ("qwen2_5_vl_window112", "2cdfa16b89ab70b7d6b8fbe6d63eb416a0ca764a80a9077f0bcb0b45d2ff0a1a"),
        ("qwen3_vl_one_level", "c2e111f021efdbdc001b9ce48e17c131847aaa8dbc8cc4adebf66dd552bf9a74"),
    ] {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
        let model = Model::open(&ModelSource {
            dir: golden.join(name).join("model"),
            name: None,
            format: LoadFormat::Safetensors,
            packed: None,
        })
        .unwrap();
        let tower = model.tower(Modality::Image).unwrap().unwrap();
        assert_eq!(tower.rows_of_vllm(Modality::Image, DType::Bf16).to_string(), fingerprint, "{name}");
        assert_eq!(model.tower(Modality::Video).unwrap(), None);
    }
}
