//! Steps of decoding captured as graphs, on the stand-in for the CUDA driver: logits are those of eager steps to the bit,
//! whatever was replayed before. In this build all memory of a graph is NaN before each replay.

use crate::case::{Case, cuda};
use crate::greedy::{Mix, Sequence, greedy};
use triptych_core::EncodedRows;
use triptych_core::graph_stats::GraphStats;
use triptych_kernels::{Backend, Precision};
use triptych_models::ModelError;
use triptych_models::decoder::{DecodeGraphConfig, Decoder, DecoderInfo, StepInput};
use triptych_models::sampling::Choices;

/// A decoder of every kind of positions, heads, windows and cross-attention.
const CASES: [&str; 22] = [
    "bart_odd_heads",
    "marian_en_de",
    "flan_t5",
    "blenderbot_small",
    "whisper_en_odd_heads",
    "moonshine_narrow_rope_bf16",
    "trocr_vit",
    "vit_gpt2",
    "vit_bert",
    "qwen2_vl_odd_heads",
    "qwen2_5_vl_window56",
    "qwen3_vl_wide_heads",
    "qwen3_vl_moe_dense_layer",
    "qwen2_moe_shared",
    "qwen3_5_text_tied",
    "qwen3_5_text_biased",
    "qwen3_5_moe_listed_layers",
    "llava_next_llama3",
    "step3_wide_queries",
    "cogagent_chat",
    "gemma3_narrow_window",
    "gemma2_low_caps",
];

/// A decoder that keeps the bits of all logits.
struct Recorder {
    decoder: Box<dyn Decoder>,
    logits: Vec<Vec<u32>>,
}

impl Recorder {
    fn new<B: Backend>(case: &Case, backend: &B, graphs: Option<DecodeGraphConfig>) -> Self {
        let mut decoder = case.model().load_decoder(backend).expect("decoder weights");
        decoder.use_graphs(graphs);
        Self { decoder, logits: Vec::new() }
    }
}

impl Decoder for Recorder {
    fn info(&self) -> DecoderInfo {
        self.decoder.info()
    }

    fn allocate_kv(&mut self, self_blocks: usize, cross_blocks: usize) -> Result<(), ModelError> {
        self.decoder.allocate_kv(self_blocks, cross_blocks)
    }

    fn allocate_host(&mut self, n_blocks: usize) -> Result<(), ModelError> {
        self.decoder.allocate_host(n_blocks)
    }

    fn allocate_states(&mut self, n_slots: usize) -> Result<(), ModelError> {
        self.decoder.allocate_states(n_slots)
    }

    fn copy_states(&mut self, pairs: &[(u32, u32)]) -> Result<(), ModelError> {
        self.decoder.copy_states(pairs)
    }

    fn reset_states(&mut self, slots: &[u32]) -> Result<(), ModelError> {
        self.decoder.reset_states(slots)
    }

    fn project_cross(&mut self, rows: &[EncodedRows<'_>], slots: &[u32]) -> Result<(), ModelError> {
        self.decoder.project_cross(rows, slots)
    }

    fn forward(&mut self, step: &StepInput<'_>) -> Result<Choices, ModelError> {
        let mut choices = self.decoder.forward(step)?;
        let rows = choices.rows.get_mut(0, step.logit_rows.len()).expect("every row");
        assert!(rows.iter().all(|value| value.is_finite()), "logits of a step of {}", step.token_ids.len());
        self.logits.push(rows.iter().map(|value| value.to_bits()).collect());
        Ok(choices)
    }

    fn copy_blocks(&mut self, pairs: &[(u32, u32)]) -> Result<(), ModelError> {
        self.decoder.copy_blocks(pairs)
    }

    fn swap_out(&mut self, pairs: &[(u32, u32)]) -> Result<(), ModelError> {
        self.decoder.swap_out(pairs)
    }

    fn swap_in(&mut self, pairs: &[(u32, u32)]) -> Result<(), ModelError> {
        self.decoder.swap_in(pairs)
    }
}

/// Prompts and encoder rows of other sizes each, some past a block.
fn sequences(info: &DecoderInfo) -> Vec<Sequence> {
    let sequence = |i: usize| {
        let n = 1 + (i * 17) % 41;
        let prompt: Vec<u32> = (0..n).map(|k| ((7 * i + 3 * k) % info.vocab) as u32).collect();
        let n_cross = if info.cross_attention { 3 + 20 * i } else { 0 };
        let cross = (0..n_cross * info.encoder_hidden).map(|k| ((k * 37 + i) % 101) as f32 / 50.0 - 1.0);
        Sequence {
            positions: (0..n as u32).map(|p| [p; 3]).collect(),
            next_position: n as u32,
            hidden: info.encoder_hidden,
            adapter: None,
            embeds: Vec::new(),
            cross: cross.collect(),
            prompt,
        }
    };
    (0..5).map(sequence).collect()
}

fn replays_are_eager(precision: Precision, cases: &[&str]) {
    for name in cases {
        let case = Case::open(name);
        let backend = cuda(precision);
        let config = DecodeGraphConfig { max_sequences: 4, ..DecodeGraphConfig::default() };
        let [mut eager, mut graphed] =
            [None, Some(config)].map(|graphs| Recorder::new(&case, &backend, graphs));
        let sequences = sequences(&eager.info());
        // They begin and end one after another: steps of one to five sequences, some beside a prompt.
        let mix = Mix { stagger: 1, chunk: 16 };
        let tokens = [&mut eager, &mut graphed].map(|decoder| greedy(decoder, &sequences, 9, mix));
        assert_eq!(tokens[0], tokens[1], "{name} {precision:?}");
        assert_eq!(eager.logits.len(), graphed.logits.len(), "{name}");
        for (i, (expected, actual)) in eager.logits.iter().zip(&graphed.logits).enumerate() {
            assert_eq!(actual, expected, "{name} {precision:?}: step {i}");
        }
        let stats = graphed.decoder.graph_stats();
        assert!(stats.replays > 5 && stats.graphs >= 2 && stats.n_bytes > 0, "{name}: {stats:?}");
        assert!(stats.padding_tokens > 0 && stats.padding_tokens < stats.tokens, "{name}: {stats:?}");
        // Steps of five are more than the largest graph takes.
        assert!(stats.eager > 0, "{name}: {stats:?}");
        assert_eq!(eager.decoder.graph_stats(), GraphStats::default());
    }
}

#[test]
fn replays_give_the_logits_of_eager_steps() {
    replays_are_eager(Precision::F32, &CASES);
}

#[test]
fn replays_in_bf16_and_int8_give_the_logits_of_eager_steps() {
    replays_are_eager(
        Precision::Bf16,
        &["bart_odd_heads", "flan_t5", "qwen2_vl_odd_heads", "qwen3_5_text_tied"],
    );
    replays_are_eager(Precision::Int8, &["whisper_en_odd_heads"]);
}

#[test]
fn no_graph_is_captured_once_their_memory_is_taken() {
    let case = Case::open("bart_odd_heads");
    let config = DecodeGraphConfig { max_sequences: 8, max_bytes: 1 };
    let mut decoder = Recorder::new(&case, &cuda(Precision::F32), Some(config));
    let sequences = sequences(&decoder.info());
    greedy(&mut decoder, &sequences, 6, Mix { stagger: 3, chunk: 16 });
    let stats = decoder.decoder.graph_stats();
    // The first was captured when nothing was taken.
    assert_eq!(stats.graphs, 1, "{stats:?}");
    assert!(stats.eager > 0 && stats.replays > 0, "{stats:?}");
}
