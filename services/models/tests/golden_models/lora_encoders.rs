//! LoRA adapters of encoders as PEFT writes them: rows of items with several adapters and none in one batch, and what the decoder
//! makes of them.

use crate::case::{
    Case, assert_bf16_close, assert_int8_close, assert_logits_close, assert_rows_close, cpu, cuda,
};
use crate::greedy::{GreedyCheck, Mix, Sequence, assert_greedy, teacher_forced};
use crate::{qwen_vl, text, whisper};
use triptych_core::{AdapterId, Modality};
use triptych_kernels::{Backend, Precision};
use triptych_models::Model;
use triptych_models::decoder::Decoder;
use triptych_models::encoder::{Encoder, EncoderGraphConfig};
use triptych_models::lora::{LoraAdapter, StageAdapters};
use triptych_models::preprocess::EncoderInput;

const CASES: [&str; 3] = ["lora_whisper_encoder", "lora_t5_encoder", "lora_qwen2_5_vl_tower"];

/// Above the rank of every adapter here.
const MAX_RANK: usize = 16;

/// A case with its base model's, and the adapters in the order of `expected.json`.
struct Adapted {
    case: Case,
    base: Case,
    model: Model,
    modality: Modality,
    inputs: Vec<EncoderInput>,
    names: Vec<String>,
    adapters: Vec<StageAdapters>,
}

impl Adapted {
    fn open(name: &str) -> Self {
        let case = Case::open(name);
        let base_name = case.json["base"].as_str().expect("the case of the base model");
        let base = Case::open(base_name);
        let (modality, inputs) = match base_name {
            "whisper_multilingual" => (Modality::Audio, whisper::batch_inputs(&base)[..2].to_vec()),
            "t5_small" => (Modality::Text, text::inputs(&base)[..3].to_vec()),
            _ => (Modality::Image, qwen_vl::load(base_name).images.into_values().collect()),
        };
        let told = case.json["adapters"].as_array().expect("adapters").iter();
        let names: Vec<String> =
            told.map(|adapter| adapter["name"].as_str().expect("a name").to_owned()).collect();
        let model = base.model();
        let modules = model.encoder_modules().expect("names of layers");
        let open = |name: &String| {
            modules.split(LoraAdapter::open(&case.dir.join(name), MAX_RANK).expect("an adapter"))
        };
        Self { adapters: names.iter().map(open).collect(), names, model, modality, inputs, base, case }
    }

    /// The encoder with the parts of all adapters.
    fn encoder<B: Backend>(&self, backend: &B) -> Box<dyn Encoder> {
        let mut encoder = self.model.load_encoder(self.modality, backend).expect("encoder weights");
        for part in self.adapters.iter().filter_map(|adapter| adapter.encoder.as_ref()) {
            encoder.load_adapter(part).expect("layers that the encoder has");
        }
        encoder
    }

    fn decoder<B: Backend>(&self, backend: &B) -> Box<dyn Decoder> {
        let mut decoder = self.model.load_decoder(backend).expect("decoder weights");
        for adapter in &self.adapters {
            decoder.load_adapter(&adapter.decoder).expect("layers that the decoder has");
        }
        decoder
    }

    /// Rows of every input with each adapter, and last without one: all in one batch, adapters side by side.
    fn rows(&self, encoder: &mut dyn Encoder) -> Vec<Vec<Vec<f32>>> {
        let ids: Vec<Option<AdapterId>> =
            self.adapters.iter().map(StageAdapters::encoder_id).chain([None]).collect();
        let pairs: Vec<_> =
            self.inputs.iter().flat_map(|input| ids.iter().map(move |id| (input, *id))).collect();
        let (batch, adapters): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        let rows = encoder.encode_adapted(&batch, &adapters, &mut |_| ()).expect("golden items fit");
        let of = |adapter: usize| rows.iter().skip(adapter).step_by(ids.len()).cloned().collect();
        (0..ids.len()).map(of).collect()
    }

    /// The prompt over rows of the adapter `i`, or of none.
    fn sequence(&self, i: usize, rows: &[Vec<f32>]) -> Sequence {
        let adapter = self.adapters.get(i).map(StageAdapters::id);
        if self.modality == Modality::Image {
            let loaded = qwen_vl::load(self.case.json["base"].as_str().expect("a case"));
            let rows = loaded.images.keys().cloned().zip(rows.iter().cloned()).collect();
            let k = self.base.json["many_rows_prompt"].as_u64().expect("a prompt") as usize;
            return Sequence { adapter, ..qwen_vl::sequence(&loaded, k, &rows) };
        }
        let prompt: Vec<u32> = serde_json::from_value(self.case.json["input_ids"].clone()).expect("tokens");
        Sequence {
            positions: (0..prompt.len() as u32).map(|i| [i; 3]).collect(),
            next_position: prompt.len() as u32,
            hidden: self.model.spec().encoder.as_ref().expect("an encoder").output_width(),
            cross: rows[0].clone(),
            prompt,
            embeds: Vec::new(),
            adapter,
        }
    }

    /// The prompt with each adapter, and last without one.
    fn sequences(&self, encoder: &mut dyn Encoder) -> Vec<Sequence> {
        self.rows(encoder).iter().enumerate().map(|(i, rows)| self.sequence(i, rows)).collect()
    }

    fn greedy_tokens(&self) -> Vec<Vec<u32>> {
        let tokens = |value: &serde_json::Value| serde_json::from_value(value.clone()).expect("tokens");
        let adapters = self.case.json["adapters"].as_array().expect("adapters").iter();
        let adapted = adapters.map(|adapter| tokens(&adapter["greedy_tokens"]));
        adapted.chain([tokens(&self.case.json["base_greedy_tokens"])]).collect()
    }
}

/// Calls `check` with the name of each adapter, its logits, and the expected ones in f32 and in bf16.
fn for_logits<B: Backend>(backend: &B, check: impl Fn(&str, &[f32], [&[f32]; 2])) {
    for name in CASES {
        let adapted = Adapted::open(name);
        let sequences = adapted.sequences(&mut *adapted.encoder(backend));
        let mut decoder = adapted.decoder(backend);
        for (adapter, sequence) in adapted.names.iter().zip(sequences) {
            let logits = teacher_forced(&mut *decoder, &sequence);
            let [exact, bf16] =
                ["logits", "logits_bf16"].map(|kind| adapted.case.values(&format!("{adapter}.{kind}")).1);
            let own = &logits[logits.len() - exact.len()..];
            check(&format!("{name} {adapter} {}", backend.name()), own, [&exact, &bf16]);
        }
    }
}

fn matches_reference<B: Backend>(backend: &B) {
    for name in CASES {
        let adapted = Adapted::open(name);
        let rows = adapted.rows(&mut *adapted.encoder(backend));
        for (adapter, rows) in adapted.names.iter().zip(rows) {
            for (i, rows) in rows.iter().enumerate() {
                let expected = adapted.case.values(&format!("{adapter}.rows.{i}")).1;
                assert_rows_close(&format!("{name} {adapter} {} rows {i}", backend.name()), rows, &expected);
            }
        }
    }
    for_logits(backend, |name, logits, [exact, _]| assert_logits_close(name, logits, exact));
}

fn bf16_is_as_near_as_the_references<B: Backend>(backend: &B) {
    for_logits(backend, |name, logits, [exact, bf16]| assert_bf16_close(name, logits, exact, bf16));
}

fn greedy_tokens_match<B: Backend>(backend: &B) {
    for name in CASES {
        let adapted = Adapted::open(name);
        let (sequences, expected) =
            (adapted.sequences(&mut *adapted.encoder(backend)), adapted.greedy_tokens());
        let mix = Mix { stagger: 3, chunk: 7 };
        let check = GreedyCheck { sequences: &sequences, expected: &expected, n_alone: 0, mix };
        assert_greedy(backend, &mut *adapted.decoder(backend), name, check);
    }
}

/// Rows of an item with an adapter are the same alone, and of one without as if none were loaded.
fn rows_are_the_same_to_the_bit_whatever_is_beside_them<B: Backend>(cases: &[&str], backend: &B) {
    for &name in cases {
        let adapted = Adapted::open(name);
        let mut encoder = adapted.encoder(backend);
        let together = adapted.rows(&mut *encoder);
        let mut plain = adapted.model.load_encoder(adapted.modality, backend).expect("encoder weights");
        for (i, input) in adapted.inputs.iter().enumerate() {
            for (adapter, together) in adapted.adapters.iter().zip(&together) {
                let ids = [adapter.encoder_id()];
                let alone = encoder.encode_adapted(&[input], &ids, &mut |_| ()).expect("a golden item");
                assert!(alone[0] == together[i], "{name} item {i} with an adapter");
            }
            let alone = plain.encode(&[input]).expect("a golden item");
            assert!(alone[0] == together[adapted.adapters.len()][i], "{name} item {i} without an adapter");
        }
    }
}

crate::case::tests_on_every_back_end!();

#[test]
fn cpu_in_int8_is_near() {
    for_logits(&cpu(Precision::Int8), |name, logits, [exact, _]| assert_int8_close(name, logits, exact));
}

#[test]
fn cpu_greedy_tokens_are_the_same_in_a_batch() {
    greedy_tokens_match(&cpu(Precision::F32));
}

#[test]
fn cpu_rows_do_not_depend_on_other_adapters() {
    for precision in [Precision::F32, Precision::Bf16] {
        rows_are_the_same_to_the_bit_whatever_is_beside_them(&CASES, &cpu(precision));
    }
}

#[test]
fn cuda_rows_do_not_depend_on_other_adapters() {
    rows_are_the_same_to_the_bit_whatever_is_beside_them(&CASES[1..2], &cuda(Precision::Bf16));
}

/// Items with adapters run beside the graphs of those without.
#[test]
fn captured_forwards_take_items_without_adapters() {
    let adapted = Adapted::open("lora_t5_encoder");
    let backend = cuda(Precision::F32);
    let expected = adapted.rows(&mut *adapted.encoder(&backend));
    let mut encoder = adapted.encoder(&backend);
    encoder.use_graphs(&EncoderGraphConfig::default());
    assert!(adapted.rows(&mut *encoder) == expected);
    let stats = encoder.graph_stats();
    assert!(stats.replays > 0 && stats.eager > 0, "{stats:?}");
}

#[test]
fn an_adapter_that_was_dropped_is_refused_and_others_are_not() {
    let adapted = Adapted::open("lora_t5_encoder");
    let mut encoder = adapted.encoder(&cpu(Precision::F32));
    let [gone, left] = [0, 1].map(|i| adapted.adapters[i].encoder_id());
    encoder.unload_adapter(gone.expect("a part for the encoder"));
    let input = &adapted.inputs[0];
    let refused = encoder.encode_adapted(&[input], &[gone], &mut |_| ()).expect_err("it is gone");
    assert!(refused.to_string().contains("is not loaded"), "{refused}");
    encoder.encode_adapted(&[input], &[left], &mut |_| ()).expect("it is loaded");
}

/// Parts by stage: an adapter of the decoder alone leaves the encoder as it is, and what neither stage has is refused by name.
#[test]
fn an_adapter_is_split_by_the_layers_of_the_encoder() {
    let parts = |base: &str, adapter: &str| {
        let adapter = Case::open(adapter.split('/').next().expect("a case")).dir.join("..").join(adapter);
        let adapter = LoraAdapter::open(&adapter, MAX_RANK).expect("an adapter");
        let (id, n_modules) = (adapter.id(), adapter.n_modules());
        let parts = Case::open(base).model().encoder_modules().expect("names").split(adapter);
        let n_encoder = parts.encoder.as_ref().map_or(0, LoraAdapter::n_modules);
        assert_eq!((parts.id(), parts.decoder.n_modules() + n_encoder), (id, n_modules), "{base}");
        let is_whole = parts.decoder.n_modules() == 0;
        assert_eq!(parts.encoder_id() == Some(id), is_whole, "{base}: a part has an identity of its own");
        (n_encoder, parts)
    };
    assert_eq!(parts("whisper_multilingual", "lora_whisper/decoder").0, 0);
    assert_eq!(parts("whisper_multilingual", "lora_whisper_encoder/encoder").1.decoder.n_modules(), 0);
    let (n_encoder, both) = parts("whisper_multilingual", "lora_whisper_encoder/both");
    assert_eq!((n_encoder, both.decoder.n_modules()), (12, 20));
    assert_eq!(parts("llama_tied", "lora_llama/attention").0, 0, "a model without an encoder");
    // Of the tower of another model.
    let (n_encoder, other) = parts("mllama_small_f32", "lora_qwen2_5_vl_tower/tower");
    assert_eq!(n_encoder, 0);
    let mut decoder =
        Case::open("qwen2_tied").model().load_decoder(&cpu(Precision::F32)).expect("decoder weights");
    let refused = decoder.load_adapter(&other.decoder).expect_err("no such layer").to_string();
    assert!(refused.contains("target_modules is model.visual.blocks.0.attn"), "{refused}");
}

/// PEFT adapts convolutions too, such as that of patches, where a target matches its name.
#[test]
fn an_adapter_of_a_convolution_is_refused_by_name() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = Case::open("lora_t5_encoder").dir.join("encoder/adapter_config.json");
    std::fs::copy(config, dir.path().join("adapter_config.json")).expect("a copy");
    let halves = [("lora_A", vec![2, 3, 1, 1]), ("lora_B", vec![4, 2, 1, 1])];
    let bytes = [0; 2 * 4 * 4];
    let tensor = |(half, shape): (&str, Vec<usize>)| {
        let n_bytes = shape.iter().product::<usize>() * 4;
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape, &bytes[..n_bytes]);
        (format!("base_model.model.patches.{half}.weight"), view.expect("whole tensors"))
    };
    let file = dir.path().join("adapter_model.safetensors");
    safetensors::serialize_to_file(halves.map(tensor), None, &file).expect("a file");
    let refused = LoraAdapter::open(dir.path(), MAX_RANK).expect_err("a convolution").to_string();
    assert!(refused.contains("target_modules is patches") && refused.contains("convolutions"), "{refused}");
}
