//! Quantized checkpoints: every layer is what its publisher's formula makes of it, and a whole model is that of its layers.

use super::{STORED, Tensors, golden, open, without_weights, write};
use safetensors::tensor::{TensorView, serialize};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use triptych_core::{DType, Modality};
use triptych_kernels::Precision;
use triptych_kernels::reference::ReferenceBackend;
use triptych_models::compute::{Compute, ComputeConfig};
use triptych_models::quantization::{GptqZeros, Quantization};
use triptych_models::weights::{TensorRole, Weights};
use triptych_models::{Model, ModelError, ModelSource, PackedFolder};

fn quantized(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/quantized").join(case)
}

fn read(case: &str, file: &str) -> Vec<u8> {
    std::fs::read(quantized(case).join(file)).expect("a golden file")
}

/// The settings of a case.
fn settings(case: &str) -> Value {
    let config: Value = serde_json::from_slice(&read(case, "config.json")).expect("JSON");
    config["quantization_config"].clone()
}

/// A directory of weights with these settings.
fn with_settings(weights: &[u8], settings: &Value) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(dir.path().join("model.safetensors"), weights).expect("a written file");
    let config = json!({ "quantization_config": settings });
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("a written file");
    dir
}

/// Values of a weight; or the error.
fn values(dir: &Path, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
    let weights = Weights::open(dir, STORED)?;
    let names = [format!("absent.{name}"), name.to_owned()];
    assert!(weights.has(&names), "{name}");
    Ok(weights.tensor(&names, shape, TensorRole::Matrix)?.values())
}

/// Values of a tensor of f32.
fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

#[test]
fn layers_are_dequantized_as_published() {
    const CASES: [(&str, &str); 10] = [
        ("fp8_blocks", "fp8, blocks of 128x128"),
        ("fp8_small_blocks", "fp8, blocks of 8x16"),
        ("fp8_tensor", "fp8"),
        ("float_scales", "compressed-tensors, float-quantized"),
        ("float_blocks", "compressed-tensors, float-quantized, blocks of 8x16"),
        ("int8", "compressed-tensors, int-quantized"),
        ("packed", "compressed-tensors, pack-quantized"),
        ("gptq", "gptq, 4 bits, groups of 8"),
        ("gptq_v2", "gptq_v2, 4 bits, groups of 8"),
        ("awq", "awq, 4 bits, groups of 8"),
    ];
    for (case, text) in CASES {
        let method = Quantization::of(&quantized(case)).expect("read").expect("quantized");
        assert_eq!(method.to_string(), text);
        let expected = read(case, "expected.safetensors");
        let expected = SafeTensors::deserialize(&expected).expect("golden tensors");
        assert!(!expected.is_empty());
        for (name, tensor) in expected.iter() {
            let found = values(&quantized(case), name, tensor.shape()).expect(name);
            assert_eq!(found, f32s(tensor.data()), "{case}: {name}");
        }
    }
}

/// Name, element type, shape and bytes of each tensor of a file.
type Stored = Vec<(String, Dtype, Vec<usize>, Vec<u8>)>;

fn stored(file: &[u8]) -> Stored {
    let file = SafeTensors::deserialize(file).expect("golden tensors");
    let tensors = file.iter();
    tensors.map(|(name, t)| (name.to_owned(), t.dtype(), t.shape().to_vec(), t.data().to_vec())).collect()
}

fn written(tensors: &Stored) -> Vec<u8> {
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name, TensorView::new(*dtype, shape.clone(), data).expect("data of the shape"))
    });
    serialize(views, None).expect("tensors")
}

/// A model directory with the weights of `t5_gptq`, and one with the values of these weights.
fn whole_models() -> [tempfile::TempDir; 2] {
    let [with_codes, with_values] = [(); 2].map(|()| without_weights("t5_v1_1"));
    let config = with_codes.path().join("config.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&config).expect("config")).expect("JSON");
    json["quantization_config"] = settings("t5_gptq");
    std::fs::write(config, json.to_string()).expect("a written file");
    let file = read("t5_gptq", "model.safetensors");
    std::fs::write(with_codes.path().join("model.safetensors"), &file).expect("a written file");
    let weights = Weights::open(with_codes.path(), STORED).expect("weights");
    let original = std::fs::read(golden("t5_v1_1").join("model.safetensors")).expect("golden weights");
    let original = SafeTensors::deserialize(&original).expect("golden weights are whole");
    let tensors: Tensors = original
        .iter()
        .map(|(name, t)| {
            let tensor = weights.tensor(&[name.to_owned()], t.shape(), TensorRole::Matrix).expect(name);
            let values = tensor.values().into_iter().flat_map(f32::to_le_bytes).collect();
            (name.to_owned(), (t.shape().to_vec(), values))
        })
        .collect();
    write(with_values.path(), "model.safetensors", &tensors);
    [with_codes, with_values]
}

#[test]
fn a_whole_model_is_that_of_its_dequantized_layers() {
    let dirs = whole_models();
    let models = dirs.each_ref().map(|dir| open(dir.path(), STORED));
    let rows = models.each_ref().map(|model| {
        let limits = triptych_core::limits::Limits::default();
        let options = triptych_core::ItemOptions::default();
        let processor = model.preprocess();
        let input =
            processor.preprocess(Modality::Text, b"the quick brown fox", &options, &limits).expect("tokens");
        let mut encoder = model.load_encoder(Modality::Text, &ReferenceBackend::new()).expect("an encoder");
        model.load_decoder(&ReferenceBackend::new()).expect("a decoder");
        encoder.encode(&[&input]).expect("rows")
    });
    assert!(!rows[0][0].is_empty());
    assert_eq!(rows[0], rows[1]);

    let [codes, values] = models.each_ref().map(|model| model.inventory().expect("an inventory"));
    assert_eq!(codes.quantization.expect("quantized").to_string(), "gptq, 4 bits, groups of 16");
    assert_eq!(values.quantization, None);
    let encoders = [codes.encoder, values.encoder].map(|encoder| encoder.expect("an encoder").stage);
    for [codes, values] in [encoders, [codes.decoder, values.decoder]] {
        assert_eq!(codes.n_parameters, values.n_parameters);
        assert_eq!(codes.loaded.int8, values.loaded.int8, "held as the dequantized model is");
        assert!(codes.stored_bytes < values.stored_bytes / 2);
    }
    assert_eq!(codes.unused, values.unused);
}

#[test]
fn the_fingerprint_covers_codes_scales_and_the_method() {
    let [dir, _] = whole_models();
    let print = || open(dir.path(), STORED).fingerprint(Modality::Text, DType::F32).expect("weights");
    let before = print();
    let file = dir.path().join("model.safetensors");
    let whole = std::fs::read(&file).expect("weights");
    for part in ["qweight", "qzeros", "scales", "g_idx"] {
        let mut tensors = stored(&whole);
        let name = format!("encoder.block.0.layer.0.SelfAttention.q.{part}");
        tensors.iter_mut().find(|t| t.0 == name).expect("a tensor").3[0] ^= 1;
        std::fs::write(&file, written(&tensors)).expect("a written file");
        assert_ne!(print(), before, "{part}");
    }
    std::fs::write(&file, &whole).expect("a written file");
    assert_eq!(print(), before);
    let config = dir.path().join("config.json");
    let text = std::fs::read_to_string(&config).expect("config");
    let changed = text.replace("\"bits\":4", "\"bits\":4,\"checkpoint_format\":\"gptq_v2\"");
    assert_ne!(changed, text);
    std::fs::write(&config, changed).expect("a written file");
    assert_ne!(print(), before);
}

#[test]
fn the_fingerprint_of_a_tower_covers_a_method_beside_its_own_configuration() {
    const CASE: &str = "qwen2_vl_odd_heads";
    let dir = without_weights(CASE);
    let weights = golden(CASE).join("model.safetensors");
    std::fs::copy(weights, dir.path().join("model.safetensors")).expect("a copy");
    let config = dir.path().join("config.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&config).expect("config")).expect("JSON");
    let mut print = |settings: Value| {
        json["quantization_config"] = settings;
        std::fs::write(&config, json.to_string()).expect("a written file");
        open(dir.path(), STORED).fingerprint(Modality::Image, DType::F32).expect("weights")
    };
    let prints = [Value::Null, settings("fp8_blocks"), settings("gptq"), settings("gptq_v2")].map(&mut print);
    for (i, one) in prints.iter().enumerate() {
        assert!(!prints[i + 1..].contains(one), "{i}");
    }
}

#[test]
fn another_method_has_packed_weights_of_its_own() {
    let [dir, _] = whole_models();
    let parent = tempfile::tempdir().expect("a folder");
    let folder = PackedFolder { dir: parent.path().join("packed"), min_bytes: 0, max_bytes: 1 << 30 };
    let n_packed = || {
        let packed = Some(folder.clone());
        let source = ModelSource { dir: dir.path().to_owned(), name: None, format: STORED, packed };
        let model = Model::open(&source).expect("a model");
        let config = ComputeConfig { threads: 1, precision: Precision::Int4, ..ComputeConfig::default() };
        Compute::new(config).and_then(|compute| compute.load_decoder(&model)).expect("a decoder");
        std::fs::read_dir(&folder.dir).expect("a folder").count()
    };
    assert_eq!(n_packed(), 1);
    assert_eq!(n_packed(), 1, "of the first start");
    let config = dir.path().join("config.json");
    let text = std::fs::read_to_string(&config).expect("config");
    let changed = text.replace("\"bits\":4", "\"bits\":4,\"checkpoint_format\":\"gptq_v2\"");
    std::fs::write(&config, changed).expect("a written file");
    assert_eq!(n_packed(), 2, "the same codes are other values");
}

#[test]
fn tensors_that_do_not_fit_each_other_are_refused_by_name() {
    let check = |case: &str, part: &str, edit: &dyn Fn(&mut Stored), message: &str| {
        let mut tensors = stored(&read(case, "model.safetensors"));
        edit(&mut tensors);
        let dir = with_settings(&written(&tensors), &settings(case));
        let layer = part.split('.').next().expect("a layer");
        let expected = stored(&read(case, "expected.safetensors"));
        let weight = format!("{layer}.weight");
        let shape = &expected.iter().find(|t| t.0 == weight).expect("a weight").2;
        let error = values(dir.path(), &weight, shape).expect_err(part).to_string();
        assert!(error.contains(part) && error.contains(message), "{case}: {error}: no {message:?}");
    };
    let without = |name: &'static str| move |t: &mut Stored| t.retain(|tensor| tensor.0 != name);
    let reshaped = |name: &'static str, shape: &'static [usize]| {
        move |tensors: &mut Stored| {
            let tensor = tensors.iter_mut().find(|t| t.0 == name).expect("a tensor");
            tensor.2 = shape.to_vec();
            tensor.3.resize(shape.iter().product::<usize>() * tensor.1.bitsize() / 8, 0);
        }
    };
    let retyped = |name: &'static str, dtype: Dtype| {
        move |tensors: &mut Stored| {
            let tensor = tensors.iter_mut().find(|t| t.0 == name).expect("a tensor");
            tensor.1 = dtype;
            tensor.3.resize(tensor.2.iter().product::<usize>() * dtype.bitsize() / 8, 0);
        }
    };
    let filled = |name: &'static str, byte: u8| {
        move |tensors: &mut Stored| {
            tensors.iter_mut().find(|t| t.0 == name).expect("a tensor").3.fill(byte);
        }
    };
    for part in ["in_order.qzeros", "in_order.scales"] {
        check("gptq", part, &without(part), "is missing");
        check("gptq", part, &reshaped(part, &[4, 3]), "is [4, 3], the configuration says [5, ");
    }
    check("gptq", "in_order.qweight", &reshaped("in_order.qweight", &[5, 16]), "says [5, 24]");
    check("gptq", "in_order.qweight", &retyped("in_order.qweight", Dtype::I64), "is I64, expected one of");
    check("gptq", "desc_act.g_idx", &reshaped("desc_act.g_idx", &[39]), "says [40]");
    check("gptq", "desc_act.g_idx", &filled("desc_act.g_idx", 5), "a group that is not one of 5");
    check("gptq", "desc_act.g_idx", &filled("desc_act.g_idx", 0xff), "a group that is not one of 5");
    check("awq", "layer.qweight", &reshaped("layer.qweight", &[40, 4]), "says [40, 3]");
    check("awq", "layer.scales", &retyped("layer.scales", Dtype::I8), "is I8, expected one of");
    check("packed", "odd.weight_shape", &filled("odd.weight_shape", 1), "weight_shape is [");
    check("packed", "groups.weight_scale", &reshaped("groups.weight_scale", &[10, 5]), "says [10, 1]");
    check("packed", "zeros.weight_zero_point", &reshaped("zeros.weight_zero_point", &[1, 3]), "says [2, 3]");
    check("fp8_blocks", "0.weight_scale", &without("0.weight_scale_inv"), "is missing");
    check("fp8_blocks", "0.weight_scale_inv", &reshaped("0.weight_scale_inv", &[2, 2]), "says [2, 1]");
    check("int8", "group.weight_scale", &reshaped("group.weight_scale", &[9, 5]), "says [9, 1]");

    // A weight of bytes is none without a method.
    let dir = with_settings(&read("int8", "model.safetensors"), &Value::Null);
    let error = values(dir.path(), "channel.weight", &[9, 12]).expect_err("refused").to_string();
    assert!(error.contains("tensor channel.weight is I8, expected F32, F16 or BF16"), "{error}");
}

#[test]
fn methods_that_are_not_read_say_what_would_do() {
    let packed = |key: &str, value: Value| {
        let mut settings = settings("packed");
        *settings.pointer_mut(key).expect("a key of the settings") = value;
        settings
    };
    let with = |case: &str, key: &str, value: Value| {
        let mut settings = settings(case);
        settings[key] = value;
        settings
    };
    let group = "/config_groups/group_0/weights";
    for (settings, reason) in [
        (json!({ "quant_method": "bitsandbytes", "load_in_4bit": true }), "quant_method is bitsandbytes"),
        (json!({ "quant_method": "gptq", "bits": 8 }), "bits is 8, expected 4"),
        (json!({ "quant_method": "gptq" }), "bits is missing, expected 4"),
        (with("gptq", "checkpoint_format", json!("marlin")), "\"marlin\", expected gptq or gptq_v2"),
        (with("gptq", "group_size", json!(0)), "group_size is 0, expected a count or -1"),
        (with("gptq", "is_marlin_format", json!(true)), "is_marlin_format is true"),
        (with("awq", "version", json!("gemv")), "version is \"gemv\", expected gemm"),
        (with("awq", "zero_point", json!(false)), "zero_point is false"),
        (with("fp8_blocks", "fmt", json!("e5m2")), "fmt is \"e5m2\""),
        (with("fp8_blocks", "scale_fmt", json!("ue8m0")), "scale_fmt is \"ue8m0\", expected float"),
        (with("fp8_blocks", "weight_block_size", json!([128, 0])), "expected two counts"),
        (with("packed", "format", json!("nvfp4-pack-quantized")), "format is nvfp4-pack-quantized, expected"),
        (
            with("packed", "sparsity_config", json!({ "format": "sparse-24-bitmask" })),
            "sparsity_config.format",
        ),
        (
            with("packed", "transform_config", json!({ "config_groups": { "u": {} } })),
            "transform_config is set",
        ),
        (packed(&format!("{group}/num_bits"), json!(8)), "type is int of 8 bits, expected int of 4"),
        (packed(&format!("{group}/strategy"), json!("tensor_group")), "strategy is \"tensor_group\""),
        (packed("/config_groups", Value::Null), "config_groups is missing"),
        (json!({}), "it has no quant_method"),
        (json!([]), "it has no quant_method"),
    ] {
        let dir = with_settings(&[], &settings);
        let error = Quantization::of(dir.path()).expect_err("refused").to_string();
        assert!(error.contains("is a quantized checkpoint (quantization_config: "), "{error}");
        assert!(error.contains(reason) && error.contains("--precision int8 or int4"), "{error}: no {reason}");
    }
}

#[test]
fn a_method_is_found_where_older_quantizers_put_it() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let old = json!({ "bits": 4, "group_size": -1, "desc_act": false }).to_string();
    std::fs::write(dir.path().join("quantize_config.json"), old).expect("a written file");
    let gptq = Quantization::Gptq { group_size: None, zeros: GptqZeros::LessOne };
    assert_eq!(Quantization::of(dir.path()).expect("read"), Some(gptq));
    std::fs::remove_file(dir.path().join("quantize_config.json")).expect("the file was there");
    let old = json!({ "zero_point": true, "q_group_size": 128, "w_bit": 4, "version": "GEMM" }).to_string();
    std::fs::write(dir.path().join("quant_config.json"), old).expect("a written file");
    let awq = Quantization::Awq { group_size: Some(128) };
    assert_eq!(Quantization::of(dir.path()).expect("read"), Some(awq));
    let nested = json!({ "text_config": { "quantization_config": settings("fp8_blocks") } });
    std::fs::write(dir.path().join("config.json"), nested.to_string()).expect("a written file");
    let fp8 = Quantization::Fp8 { block: Some([128, 128]) };
    assert_eq!(Quantization::of(dir.path()).expect("read"), Some(fp8));
}
