//! Encoders that are loaded later, from real files.

use super::*;
use std::path::{Path, PathBuf};
use std::time::Duration;
use triptych_core::clock::SystemClock;
use triptych_models::LoadFormat;
use triptych_runtime::memory_budget::MemoryBudget;

fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(case).join("model")
}

fn settings(weights: WeightsPolicy) -> LoadSettings {
    LoadSettings {
        is_bounded: false,
        compute: ComputeConfig { threads: 1, ..ComputeConfig::default() },
        dtype: DType::F32.into(),
        graphs: None,
        without: WithoutEncoder::Refused,
        lora: LoraSettings::default(),
        towers: TowerChoice::default(),
        weights,
    }
}

fn lazy() -> WeightsPolicy {
    let memory = MemoryBudget::counted_by(None, || None);
    WeightsPolicy::Lazy(LazyRules {
        idle: Some(Duration::from_secs(1)),
        memory,
        clock: Arc::new(SystemClock),
    })
}

fn load(dir: PathBuf, weights: WeightsPolicy) -> LoadedModel {
    let source = ModelSource { dir, name: None, format: LoadFormat::Safetensors, packed: None };
    settings(weights).load_all(&[source]).unwrap().pop().unwrap()
}

/// Widths and fingerprints of a model's towers.
fn identities(model: &LoadedModel) -> Vec<(usize, Vec<(EncoderId, Fingerprint)>)> {
    let width = |tower: &LoadedTower| match &tower.weights {
        TowerWeights::Loaded(encoder) => encoder.hidden(),
        TowerWeights::Lazy(lazy) => lazy.hidden,
    };
    model.towers.iter().map(|tower| (width(tower), tower.fingerprints.clone())).collect()
}

#[test]
fn an_encoder_that_is_loaded_later_is_the_same_as_one_that_is_held() {
    for case in ["qwen2_vl_two_images", "whisper_multilingual", "cogagent_chat", "bart_odd_heads"] {
        let (held, mut later) = (load(golden(case), WeightsPolicy::Eager), load(golden(case), lazy()));
        assert_eq!(identities(&held), identities(&later), "{case}");
        for tower in &mut later.towers {
            let TowerWeights::Lazy(lazy) = &mut tower.weights else { panic!("{case}") };
            assert!(lazy.n_bytes > 0, "{case}");
            for _ in 0..2 {
                assert_eq!((lazy.load)().unwrap().hidden(), lazy.hidden, "{case}");
            }
        }
    }
}

#[test]
fn files_that_changed_since_the_start_are_another_encoder_s_and_refused() {
    let dir = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(golden("whisper_multilingual")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    let mut model = load(dir.path().to_owned(), lazy());
    let TowerWeights::Lazy(lazy) = &mut model.towers[0].weights else { panic!("it is lazy") };
    assert!((lazy.load)().is_ok());
    // Other values of the same shapes, as of a checkpoint that was trained further.
    let file = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let head = 8 + usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    bytes[head..].iter_mut().step_by(4).for_each(|byte| *byte ^= 1);
    std::fs::remove_file(&file).unwrap();
    std::fs::write(&file, bytes).unwrap();
    let refused = (lazy.load)().err().expect("another encoder").to_string();
    assert!(refused.contains("by now, the worker serves"), "{refused}");
    std::fs::remove_file(&file).unwrap();
    assert!((lazy.load)().is_err());
}
