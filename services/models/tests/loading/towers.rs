//! Digests of towers, which the Python package makes of the same files; times of several towers.

use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;
use triptych_core::{DType, Modality, TowerIdx};
use triptych_models::compute::{Compute, ComputeConfig, ForwardTimes, StepSizes, TimedForwards};
use triptych_models::{LoadFormat, Model, ModelSource};

fn golden(name: &str) -> Model {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let dir = golden.join(name).join("model");
    Model::open(&ModelSource { dir, name: None, format: LoadFormat::Safetensors, packed: None }).unwrap()
}

#[test]
fn towers_of_golden_models_are_those_of_the_python_side() {
    // `services/ec/python/tests/test_tower.py` has the same.
    for (name, fingerprint) in [
        ("qwen2_vl_two_images", "31cfa0402cbdc12ce03324432b2fe9213506b6ab1185593193dfe5669bda6ea7"),
        ("qwen2_5_vl_window112", "2cdfa16b89ab70b7d6b8fbe6d63eb416a0ca764a80a9077f0bcb0b45d2ff0a1a"),
        ("qwen3_vl_one_level", "c2e111f021efdbdc001b9ce48e17c131847aaa8dbc8cc4adebf66dd552bf9a74"),
    ] {
        let model = golden(name);
        let tower = model.tower(Modality::Image).unwrap().unwrap();
        assert_eq!(tower.rows_of_vllm(Modality::Image, DType::Bf16).to_string(), fingerprint, "{name}");
        assert_eq!(model.tower(Modality::Video).unwrap(), None);
    }
}

/// No time at all, and a note of each tower that was asked for.
struct Asked(Mutex<Vec<TowerIdx>>);

impl ForwardTimes for Asked {
    fn step(&self, _: StepSizes) -> Duration {
        Duration::ZERO
    }

    fn encode(&self, tower: TowerIdx, _: &[u32]) -> Duration {
        self.0.lock().unwrap().push(tower);
        Duration::ZERO
    }

    fn project(&self, _: usize) -> Duration {
        Duration::ZERO
    }
}

#[test]
fn each_tower_of_a_timed_worker_takes_its_own_time() {
    let asked: &'static Asked = Box::leak(Box::new(Asked(Mutex::default())));
    let config = ComputeConfig { timed: Some(TimedForwards(asked)), ..ComputeConfig::default() };
    let (compute, model) = (Compute::new(config).unwrap(), golden("cogagent_chat"));
    for (id, _) in model.encoders() {
        let (_, input) = model.example_input(id.tower).unwrap();
        let rows = compute.load_encoder(&model, id).unwrap().encode(&[&input]).unwrap();
        assert!(!rows[0].is_empty());
    }
    assert_eq!(*asked.0.lock().unwrap(), [TowerIdx(0), TowerIdx(1)]);
}
