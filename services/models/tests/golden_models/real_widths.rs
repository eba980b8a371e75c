//! Arithmetic at the widths of published models: encoder rows and logits of two layers of each kind beside transformers'.
//!
//! Weights are not stored. Their values follow from their names, here as in `tests/golden/real_widths.py`.

use crate::case::{
    Case, assert_bf16_close, assert_int8_close, assert_logits_close, assert_routed_int8_close, cpu, rms_error,
};
use crate::drawn::Drawn;
use crate::greedy::{Sequence, teacher_forced};
use crate::wide_input;
use triptych_kernels::{CpuBackend, Precision};
use triptych_models::decoder::TransformerDecoder;
use triptych_models::encoder::{Encoder, TransformerEncoder};
use triptych_models::spec::EncoderSpec;

/// Cases of the gate: one of each way of an item into a decoder, the lightest.
const LIGHT: [&str; 4] = ["whisper_large_v3", "bart_large", "glm_ocr", "smolvlm_2_2b"];

/// A case with its weights.
struct Wide {
    name: &'static str,
    case: Case,
    drawn: Drawn,
}

impl Wide {
    fn open(name: &'static str) -> Self {
        Self { name, case: Case::open(&format!("real_widths/{name}")), drawn: Drawn::open(name) }
    }

    fn numbers<T: serde::de::DeserializeOwned>(&self, key: &str) -> T {
        serde_json::from_value(self.case.json[key].clone())
            .unwrap_or_else(|e| panic!("{}: {key}: {e}", self.name))
    }

    /// Stored values of rows `[n, width]`.
    fn stored(&self, values: &[f32], width: usize, at: &str) -> Vec<f32> {
        let (rows, stride) = (self.numbers::<Vec<usize>>(at), self.numbers::<usize>("stride"));
        rows.iter().flat_map(|row| values[row * width..][..width].iter().step_by(stride)).copied().collect()
    }

    /// Encoder rows, where there are any, and logits of the prompt; as far as they are stored.
    fn run(&self, backend: &CpuBackend) -> (Option<Vec<f32>>, Vec<f32>) {
        let prompt: Vec<u32> = self.numbers("prompt");
        let mut sequence = Sequence {
            positions: (0..prompt.len() as u32).map(|i| [i; 3]).collect(),
            next_position: prompt.len() as u32,
            prompt,
            hidden: self.drawn.spec.decoder.stack.hidden,
            ..Sequence::default()
        };
        if self.case.json.get("positions").is_some() {
            let [t, h, w] = self.numbers::<[Vec<u32>; 3]>("positions");
            sequence.positions = t.into_iter().zip(h).zip(w).map(|((t, h), w)| [t, h, w]).collect();
        }
        let rows = self.drawn.spec.encoder.as_ref().map(|spec| self.encode(spec, backend, &mut sequence));
        let mut decoder = TransformerDecoder::load(&self.drawn.spec.decoder, &self.drawn.weights, backend)
            .expect("a decoder");
        let logits = teacher_forced(&mut decoder, &sequence);
        (rows, self.stored(&logits, self.drawn.spec.decoder.vocab, "logit_rows"))
    }

    /// Encoder rows, put where the decoder reads them; as far as they are stored.
    fn encode(&self, spec: &EncoderSpec, backend: &CpuBackend, sequence: &mut Sequence) -> Vec<f32> {
        let given = &self.case.json;
        let inputs = wide_input::inputs(given, spec);
        assert_eq!(inputs.len(), spec.towers().count(), "{}: an input of each tower", self.name);
        let mut stored = Vec::new();
        for ((tower, input), at) in spec.towers().zip(&inputs).zip(["rows", "high_rows"]) {
            let mut encoder =
                TransformerEncoder::load(tower, &self.drawn.weights, backend).expect("an encoder");
            let rows = encoder.encode(&[input]).expect("an item that fits").remove(0);
            sequence.hidden = encoder.hidden();
            stored.extend(self.stored(&rows, encoder.hidden(), at));
            match given["item"][0].as_u64().or(given["seen_from"].as_u64()) {
                Some(first) if at == "rows" => sequence.embeds = vec![(first as usize, rows)],
                _ => sequence.cross = rows,
            }
        }
        stored
    }

    fn expected(&self, tensor: &str) -> Vec<f32> {
        self.case.values(tensor).1
    }

    /// Holds the case to the reference in each precision.
    fn check(&self) {
        let what = |part: &str| format!("{} {part}", self.name);
        let exact = self.expected("logits");
        let (rows, logits) = self.run(&cpu(Precision::F32));
        if let Some(rows) = rows {
            assert_logits_close(&what("rows"), &rows, &self.expected("rows"));
        }
        assert_logits_close(&what("logits"), &logits, &exact);
        let (rows, logits) = self.run(&cpu(Precision::Bf16));
        if let Some(rows) = rows {
            assert_bf16_close(&what("rows"), &rows, &self.expected("rows"), &self.expected("rows_bf16"));
        }
        assert_bf16_close(&what("logits"), &logits, &exact, &self.expected("logits_bf16"));
        let (_, logits) = self.run(&cpu(Precision::Int8));
        let has_experts = self.drawn.spec.decoder.stack.layers.iter().any(|layer| layer.experts.is_some());
        match has_experts {
            true => assert_routed_int8_close(&what("logits"), &logits, &exact, logits.len() / 3),
            false => assert_int8_close(&what("logits"), &logits, &exact),
        }
        assert!(rms_error(&logits, &exact) > 0.0, "{}: int8 is not exact", self.name);
    }
}

#[test]
fn two_layers_of_the_lightest_match() {
    LIGHT.iter().for_each(|name| Wide::open(name).check());
}

/// A test of each of the other cases.
macro_rules! heavy {
    ($($name:ident),* $(,)?) => {
        $(
            #[test]
            #[ignore = "gigabytes of weights, minutes: `cargo xtask test real-widths`"]
            fn $name() {
                Wide::open(stringify!($name)).check();
            }
        )*
    };
}

heavy!(
    pegasus_large,
    nllb_3_3b,
    flan_t5_xl,
    llama_3_1_8b,
    mistral_7b,
    qwen2_5_7b,
    qwen3_8b,
    gemma_2_9b,
    qwen2_vl_7b,
    qwen2_5_vl_7b,
    qwen3_vl_8b,
    llava_1_5_7b,
    internvl3_8b,
    gemma_3_4b,
    pixtral_12b,
    lighton_ocr_1b,
    qwen3_5_0_8b,
    qwen2_audio_7b,
    voxtral_mini_3b,
    bert2bert_base,
    mbart_large_50,
    opus_mt,
    blenderbot_400m,
    blenderbot_90m,
    gemma_3_1b,
    qwen3_5_0_8b_text,
    mixtral_8x7b,
    qwen1_5_moe_a2_7b,
    qwen3_30b_a3b,
    qwen3_vl_30b_a3b,
    qwen3_5_35b_a3b,
    trocr_base,
    qwen3_asr_1_7b,
    llama_3_2_11b_vision,
    moonshine_base,
    deepseek_ocr_2,
    cogagent_18b,
    step3_vl,
    mistral_small_3_1,
    donut_base,
    mt5_xl,
    umt5_xl,
    idefics3_8b,
    llava_1_6_mistral_7b,
    llava_onevision_qwen2_0_5b,
    internvl2_5_2b,
    florence_2_base,
);
