//! The inventory of a directory: sizes of the stages, names of what they share and of what nobody reads.

use super::{CASE, STORED, golden, open, part, tensors, without_weights, write};
use triptych_models::ModelError;
use triptych_models::model::Inventory;

fn inventory(dir: &std::path::Path) -> Result<Inventory, ModelError> {
    open(dir, STORED).inventory()
}

#[test]
fn stages_add_up_to_the_file() {
    let all = tensors();
    let found = inventory(&golden(CASE)).expect("an inventory");
    let values = |of: &str| part(&all, of).values().map(|(_, data)| data.len()).sum::<usize>();
    let encoder = found.encoder.expect("an encoder");
    for (stage, of) in [(&encoder.stage, "encoder."), (&found.decoder, "decoder.")] {
        assert_eq!(stage.n_tensors, part(&all, of).len());
        assert_eq!(stage.stored_bytes, values(of));
        assert_eq!(stage.n_parameters * 4, values(of), "the file is f32");
        assert!(stage.loaded.f32 >= stage.stored_bytes);
        assert!(stage.loaded.bf16 < stage.loaded.f32 && stage.loaded.int8 < stage.loaded.bf16);
    }
    // Four bits are for the decoder.
    assert_eq!(encoder.stage.loaded.int4, encoder.stage.loaded.int8);
    assert!(found.decoder.loaded.int4 < found.decoder.loaded.int8);
    assert_eq!(found.kv.per_token.int4, found.kv.per_token.int8);
    assert_eq!((found.shared, found.unused), (vec![], vec![]));
    assert_eq!(encoder.row.f32, 2 * encoder.row.bf16);
}

#[test]
fn a_table_that_is_the_head_too_takes_memory_once() {
    let model = open(&golden(CASE), STORED);
    let spec = &model.spec().decoder;
    let found = model.inventory().expect("an inventory");
    assert!(spec.head.tied);
    let table = spec.vocab * spec.stack.hidden * 4;
    let loaded = found.decoder.loaded;
    assert!(
        (found.decoder.stored_bytes..found.decoder.stored_bytes + table).contains(&loaded.f32),
        "{loaded:?}"
    );
    // Where weights are bytes a small table is not, and the head is.
    assert!(loaded.int8 > table / 2 + table / 4, "{loaded:?}");
}

#[test]
fn layers_without_a_window_hold_what_is_behind_the_windows_of_others() {
    // Keys and values of 2 heads of 32 values in 3 layers, of which one has no window.
    let kv = inventory(&golden("gemma3_narrow_window")).expect("an inventory").kv;
    assert_eq!(kv.per_token.f32, 3 * 2 * 2 * 32 * 4);
    let behind = kv.behind_window.expect("layers with a window");
    assert_eq!((behind.window, behind.per_token.f32), (6, kv.per_token.f32 / 3));
    assert_eq!(inventory(&golden(CASE)).expect("an inventory").kv.behind_window, None);
}

#[test]
fn unused_and_missing_tensors_are_named() {
    let dir = without_weights(CASE);
    let mut more = tensors();
    more.insert("model.pooler.weight".to_owned(), (vec![2, 2], vec![0; 16]));
    write(dir.path(), "model.safetensors", &more);
    assert_eq!(inventory(dir.path()).expect("an inventory").unused, ["model.pooler.weight"]);

    let missing = "model.encoder.layers.0.fc1.bias";
    more.remove(missing).expect("the model has it");
    write(dir.path(), "model.safetensors", &more);
    let error = inventory(dir.path()).expect_err("a tensor is missing");
    let serving = super::load_both(&open(dir.path(), STORED))[0].take().expect("a tensor is missing");
    assert!(matches!(&error, ModelError::MissingTensor { name, .. } if name == missing), "{error}");
    assert_eq!(error.to_string(), serving.to_string());
}
