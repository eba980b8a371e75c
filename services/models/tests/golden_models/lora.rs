//! LoRA adapters as PEFT writes them, on models of other cases: logits, greedy tokens, and several adapters in one batch.

use crate::case::{Case, assert_bf16_close, assert_int8_close, assert_logits_close, cpu, cuda};
use crate::greedy::{GreedyCheck, Mix, Sequence, assert_greedy, greedy, teacher_forced};
use std::path::Path;
use triptych_kernels::reference::ReferenceBackend;
use triptych_kernels::{Backend, Precision};
use triptych_models::ModelError;
use triptych_models::decoder::Decoder;
use triptych_models::lora::LoraAdapter;

const CASES: [&str; 3] = ["lora_llama", "lora_qwen2", "lora_whisper"];

/// Above the rank of every adapter here.
const MAX_RANK: usize = 16;

/// A case with its base model's, and the adapters in the order of `expected.json`.
struct Adapted {
    case: Case,
    base: Case,
    names: Vec<String>,
    adapters: Vec<LoraAdapter>,
}

impl Adapted {
    fn open(name: &str) -> Self {
        let case = Case::open(name);
        let base = Case::open(case.json["base"].as_str().expect("the case of the base model"));
        let names: Vec<String> = case.json["adapters"]
            .as_array()
            .expect("adapters")
            .iter()
            .map(|adapter| adapter["name"].as_str().expect("a name").to_owned())
            .collect();
        let open = |name: &String| LoraAdapter::open(&case.dir.join(name), MAX_RANK).expect("an adapter");
        Self { adapters: names.iter().map(open).collect(), names, base, case }
    }

    fn decoder<B: Backend>(&self, backend: &B) -> Box<dyn Decoder> {
        let mut decoder = self.base.model().load_decoder(backend).expect("decoder weights");
        for adapter in &self.adapters {
            decoder.load_adapter(adapter).expect("layers that the decoder has");
        }
        decoder
    }

    /// The prompt with each adapter, and last without one.
    fn sequences(&self) -> Vec<Sequence> {
        let prompt: Vec<u32> = serde_json::from_value(self.case.json["input_ids"].clone()).expect("tokens");
        let (hidden, cross) = match self.base.model().max_cross_rows() {
            Some(_) => {
                let (shape, rows) = self.base.values("encoder_last_hidden_state");
                (*shape.last().expect("a matrix"), rows)
            }
            None => (self.base.model().spec().decoder.stack.hidden, Vec::new()),
        };
        let ids = self.adapters.iter().map(|adapter| Some(adapter.id())).chain([None]);
        ids.map(|adapter| Sequence {
            positions: (0..prompt.len() as u32).map(|i| [i; 3]).collect(),
            next_position: prompt.len() as u32,
            prompt: prompt.clone(),
            hidden,
            cross: cross.clone(),
            embeds: Vec::new(),
            adapter,
        })
        .collect()
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
        let mut decoder = adapted.decoder(backend);
        for (adapter, sequence) in adapted.names.iter().zip(adapted.sequences()) {
            let logits = teacher_forced(&mut *decoder, &sequence);
            let [exact, bf16] =
                ["logits", "logits_bf16"].map(|kind| adapted.case.values(&format!("{adapter}.{kind}")).1);
            let own = &logits[logits.len() - exact.len()..];
            check(&format!("{name} {adapter} {}", backend.name()), own, [&exact, &bf16]);
        }
    }
}

fn matches_reference<B: Backend>(backend: &B) {
    for_logits(backend, |name, logits, [exact, _]| assert_logits_close(name, logits, exact));
}

fn bf16_is_as_near_as_the_references<B: Backend>(backend: &B) {
    for_logits(backend, |name, logits, [exact, bf16]| assert_bf16_close(name, logits, exact, bf16));
}

/// All adapters and none in one batch, whose steps mix prompts with decoding.
fn greedy_tokens_match<B: Backend>(backend: &B) {
    for name in CASES {
        let adapted = Adapted::open(name);
        let (sequences, expected) = (adapted.sequences(), adapted.greedy_tokens());
        let mix = Mix { stagger: 3, chunk: 7 };
        let check = GreedyCheck { sequences: &sequences, expected: &expected, n_alone: usize::MAX, mix };
        assert_greedy(backend, &mut *adapted.decoder(backend), name, check);
    }
}

/// Tokens with random sampling of logits would hide a difference of a bit, so logits themselves are compared: of a row
/// beside rows of other adapters, and with no adapter loaded at all.
fn rows_are_the_same_to_the_bit_whatever_is_beside_them<B: Backend>(backend: &B) {
    let adapted = Adapted::open("lora_llama");
    let sequences = adapted.sequences();
    let mut decoder = adapted.decoder(backend);
    let alone: Vec<Vec<f32>> = sequences.iter().map(|one| teacher_forced(&mut *decoder, one)).collect();
    let n = sequences[0].prompt.len();
    let together = crate::greedy::teacher_forced_together(&mut *decoder, &sequences);
    let width = together.len() / sequences.len() / n;
    for (i, alone) in alone.iter().enumerate() {
        assert!(together[i * n * width..][..n * width] == *alone, "sequence {i}");
    }
    let mut plain = adapted.base.model().load_decoder(backend).expect("decoder weights");
    let last = sequences.last().expect("a sequence without an adapter");
    assert!(teacher_forced(&mut *plain, last) == *alone.last().expect("its logits"));
}

crate::case::tests_on_every_back_end!();

#[test]
fn cpu_in_int8_is_near() {
    for_logits(&cpu(Precision::Int8), |name, logits, [exact, _]| assert_int8_close(name, logits, exact));
}

#[test]
fn cpu_greedy_tokens_are_the_same_alone_and_in_a_batch() {
    greedy_tokens_match(&cpu(Precision::F32));
}

#[test]
fn cuda_greedy_tokens_are_the_same_alone_and_in_a_batch() {
    greedy_tokens_match(&cuda(Precision::F32));
}

#[test]
fn cpu_rows_do_not_depend_on_other_adapters() {
    for precision in [Precision::F32, Precision::Bf16, Precision::Int8] {
        rows_are_the_same_to_the_bit_whatever_is_beside_them(&cpu(precision));
    }
}

#[test]
fn cuda_rows_do_not_depend_on_other_adapters() {
    for precision in [Precision::F32, Precision::Bf16] {
        rows_are_the_same_to_the_bit_whatever_is_beside_them(&cuda(precision));
    }
}

#[test]
fn an_adapter_that_was_dropped_is_refused() {
    let adapted = Adapted::open("lora_llama");
    let mut decoder = adapted.decoder(&cpu(Precision::F32));
    decoder.unload_adapter(adapted.adapters[0].id());
    let sequences = adapted.sequences();
    let still = greedy(&mut *decoder, &sequences[1..], 4, Mix::PLAIN);
    assert_eq!(still[0], adapted.greedy_tokens()[1][..4]);
    let run = std::panic::AssertUnwindSafe(|| teacher_forced(&mut *decoder, &sequences[0]));
    assert!(std::panic::catch_unwind(run).is_err(), "the step is refused");
}

/// Its own message for each adapter that cannot be served.
#[test]
fn adapters_that_do_not_fit_are_refused_by_name() {
    let llama = Adapted::open("lora_llama");
    let high = LoraAdapter::open(&llama.case.dir.join("everything"), 8).expect_err("a rank of 9");
    assert!(high.to_string().contains("9 for model.layers.1.self_attn.q_proj"), "{high}");
    let none = LoraAdapter::open(Path::new("."), MAX_RANK).expect_err("no adapter");
    assert!(matches!(none, ModelError::File { .. }), "{none}");
    let refused = |base: &str, adapter: &LoraAdapter| {
        let mut decoder = Case::open(base).model().load_decoder(&ReferenceBackend::new()).expect("weights");
        decoder.load_adapter(adapter).expect_err("another model").to_string()
    };
    let other_shape = refused("qwen2_tied", &llama.adapters[0]);
    assert!(other_shape.contains("lora_"), "{other_shape}");
    let other_names = refused("t5_small", &llama.adapters[0]);
    assert!(other_names.contains("target_modules is model.layers.0.self_attn.q_proj"), "{other_names}");
    let skipping = refused("mllama_small_f32", &llama.adapters[0]);
    assert!(skipping.contains("skip"), "{skipping}");
}
