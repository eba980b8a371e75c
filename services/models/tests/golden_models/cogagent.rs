//! CogAgent's decoder block: image rows among the tokens, and rows of another image by narrower cross-attention.
//!
//! Only the block is built, as a spec; the model around it is in no release of transformers, and no family serves it.

use crate::case::{Case, assert_bf16_close, assert_logits_close, encoded, stored};
use std::sync::Arc;
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_kernels::Backend;
use triptych_kernels::ops::{Activation, AttentionShape};
use triptych_kernels::reference::ReferenceBackend;
use triptych_models::LoadFormat;
use triptych_models::decoder::{Decoder, EmbedRows, PagedBatch, StepInput, TransformerDecoder};
use triptych_models::sampling::ChooseBatch;
use triptych_models::spec::*;
use triptych_models::weights::Weights;

const CASES: [&str; 3] = ["cogagent_narrow_cross_f32", "cogagent_more_heads_f16", "cogagent_one_head_bf16"];

static NAMES: DecoderNames = DecoderNames {
    prefixes: &[""],
    tokens: &["embed_tokens"],
    positions: "",
    stack: StackNames {
        input_norm: "",
        layers: "layers",
        attention: AttentionNames {
            norm: "input_layernorm",
            qkv: QkvNames::Split(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            out: "self_attn.o_proj",
        },
        cross: Some(CrossNames {
            norm: "post_cross_attention_layernorm",
            qkv: ["cross_attn.q_proj", "cross_attn.k_proj", "cross_attn.v_proj"],
            out: "cross_attn.o_proj",
        }),
        feed_forward_norm: "post_attention_layernorm",
        feed_forward_inner: &["mlp.gate_proj", "mlp.up_proj"],
        feed_forward_outer: "mlp.down_proj",
        final_norm: "norm",
    },
    head: &["lm_head"],
    head_bias: None,
};

fn attention(n_heads: usize, n_kv_heads: usize, head_dim: usize) -> AttentionSpec {
    AttentionSpec {
        shape: AttentionShape {
            n_heads,
            n_kv_heads,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            softcap: None,
        },
        bias: AttentionBias { q: false, k: false, v: false, out: false },
        head_norms: None,
    }
}

fn size(case: &Case, key: &str) -> usize {
    case.json[key].as_u64().unwrap_or_else(|| panic!("{key}")) as usize
}

fn spec(case: &Case) -> DecoderSpec {
    let hidden = size(case, "hidden");
    let heads = size(case, "heads");
    let cross_heads = size(case, "cross_heads");
    let number = |key: &str| case.json[key].as_f64().expect("a number") as f32;
    DecoderSpec {
        vocab: size(case, "vocab"),
        max_context: 256,
        positions: Positions::Rotary(RotarySpec::new(number("rope_theta"), RotaryAxes::Single)),
        stack: StackSpec {
            hidden,
            n_layers: size(case, "layers"),
            attention: attention(heads, size(case, "kv_heads"), hidden / heads),
            feed_forward: FeedForwardSpec {
                width: size(case, "width"),
                kind: FeedForwardKind::Gated,
                activation: Activation::Silu,
                bias: false,
            },
            norm: NormSpec::rms(number("rms_norm_eps")),
            input_norm: InputNorm::Absent,
            placement: NormPlacement::Pre,
            final_norm: true,
            layers: Vec::new(),
        },
        items: ItemsSpec::CrossAttention(CrossSpec {
            encoder_hidden: size(case, "high_hidden"),
            attention: attention(cross_heads, cross_heads, size(case, "cross_dim")),
            layers: CrossLayers::Every,
        }),
        embedding_scale: 1.0,
        head: HeadSpec::plain(false),
        names: &NAMES,
    }
}

fn load<B: Backend>(case: &Case, backend: &B) -> TransformerDecoder<B> {
    let weights = Weights::open(&case.dir.join("model"), LoadFormat::Safetensors).expect("golden weights");
    TransformerDecoder::load(&spec(case), &weights, backend).expect("every tensor of the spec")
}

/// A request of a case: rows that stand among the tokens after the first, and rows that are cross-attended to.
struct Request {
    low: Arc<[u8]>,
    high: Arc<[u8]>,
    tokens: Vec<u32>,
}

fn requests(case: &Case) -> Vec<Request> {
    let prompt: Vec<u32> = serde_json::from_value(case.json["prompt"].clone()).expect("tokens");
    let rows =
        |i: usize, name: &str, width| stored(&case.values(&format!("{i}.{name}")).1, size(case, width));
    let request = |i| Request {
        low: rows(i, "low", "hidden"),
        high: rows(i, "high", "high_hidden"),
        tokens: prompt.clone(),
    };
    (0..2).map(request).collect()
}

/// Blocks of every request: enough for any sequence here, one behind the other.
const BLOCKS: usize = 4;

/// Runs the last `n_tokens` tokens of each request as one step; logits of all its rows.
fn step(decoder: &mut dyn Decoder, case: &Case, requests: &[Request], n_tokens: usize) -> Vec<f32> {
    let mut token_ids = vec![];
    let mut positions = vec![];
    let mut slots = vec![];
    let mut embeds = vec![];
    let mut query_start_loc = vec![0];
    let mut table_start_loc = vec![0];
    let mut blocks = vec![];
    let mut lens = vec![];
    let mut cross_lens = vec![];
    for (i, request) in requests.iter().enumerate() {
        let first = request.tokens.len() - n_tokens;
        if first == 0 {
            let rows = encoded(&request.low, size(case, "hidden"));
            embeds.push(EmbedRows { first_row: token_ids.len() + 1, rows });
        }
        token_ids.extend_from_slice(&request.tokens[first..]);
        positions.extend((first..request.tokens.len()).map(|p| [p as u32; 3]));
        slots.extend((first..request.tokens.len()).map(|p| (i * BLOCKS * KV_BLOCK_TOKENS + p) as u32));
        query_start_loc.push(token_ids.len() as u32);
        blocks.extend((i * BLOCKS..(i + 1) * BLOCKS).map(|block| block as u32));
        table_start_loc.push(blocks.len() as u32);
        lens.push(request.tokens.len() as u32);
        cross_lens.push(encoded(&request.high, size(case, "high_hidden")).n_rows() as u32);
    }
    let batch = |seq_lens| PagedBatch {
        query_start_loc: &query_start_loc,
        table_start_loc: &table_start_loc,
        block_tables: &blocks,
        seq_lens,
    };
    let all: Vec<u32> = (0..token_ids.len() as u32).collect();
    let mut chosen = decoder
        .forward(&StepInput {
            token_ids: &token_ids,
            positions: &positions,
            embeds: &embeds,
            slot_mapping: &slots,
            self_kv: batch(lens.as_slice()),
            cross_kv: Some(batch(cross_lens.as_slice())),
            cross_rows: None,
            state_slots: None,
            adapters: &[],
            logit_rows: &all,
            choose: &ChooseBatch::whole(all.len()),
        })
        .expect("a step that fits");
    chosen.rows.get_mut(0, all.len()).expect("every row").to_vec()
}

fn project(decoder: &mut dyn Decoder, case: &Case, requests: &[Request]) {
    let n_blocks = BLOCKS * requests.len();
    decoder.allocate_kv(n_blocks, n_blocks).expect("room for caches");
    for (i, request) in requests.iter().enumerate() {
        let rows = encoded(&request.high, size(case, "high_hidden"));
        let n_rows = rows.n_rows();
        let first = i * BLOCKS * KV_BLOCK_TOKENS;
        let slots: Vec<u32> = (first..first + n_rows).map(|slot| slot as u32).collect();
        decoder.project_cross(&[rows], &slots).expect("rows fit");
    }
}

/// Logits of both prompts, run together.
fn logits<B: Backend>(case: &Case, backend: &B) -> Vec<Vec<f32>> {
    let mut decoder = load(case, backend);
    let requests = requests(case);
    project(&mut decoder, case, &requests);
    let n_prompt = requests[0].tokens.len();
    let both = step(&mut decoder, case, &requests, n_prompt);
    both.chunks_exact(n_prompt * size(case, "vocab")).map(<[f32]>::to_vec).collect()
}

fn matches_reference<B: Backend>(backend: &B) {
    for name in CASES {
        let case = Case::open(name);
        for (i, logits) in logits(&case, backend).iter().enumerate() {
            let what = format!("{name} {} request {i}", backend.name());
            assert_logits_close(&what, logits, &case.values(&format!("{i}.logits")).1);
        }
        let mut decoder = load(&case, backend);
        let mut requests = requests(&case);
        project(&mut decoder, &case, &requests);
        let expected = case.greedy_tokens();
        let vocab = size(&case, "vocab");
        let n_prompt = requests[0].tokens.len();
        let mut n_tokens = n_prompt;
        for _ in 0..expected[0].len() {
            let logits = step(&mut decoder, &case, &requests, n_tokens);
            for (request, rows) in requests.iter_mut().zip(logits.chunks_exact(n_tokens * vocab)) {
                let last = rows[rows.len() - vocab..].iter().enumerate();
                let best = last.max_by(|a, b| a.1.total_cmp(b.1)).expect("logits");
                request.tokens.push(best.0 as u32);
            }
            n_tokens = 1;
        }
        for (request, expected) in requests.iter().zip(&expected) {
            assert_eq!(&request.tokens[n_prompt..], expected, "{name}");
        }
    }
}

fn bf16_is_as_near_as_the_references<B: Backend>(backend: &B) {
    for name in CASES {
        let case = Case::open(name);
        for (i, logits) in logits(&case, backend).iter().enumerate() {
            let [exact, bf16] = ["logits", "logits_bf16"].map(|t| case.values(&format!("{i}.{t}")).1);
            assert_bf16_close(&format!("{name} request {i}"), logits, &exact, &bf16);
        }
    }
}

crate::case::tests_on_every_back_end!();

/// The purpose of narrow cross-attention: its cache is smaller than self-attention's by the widths of their heads.
#[test]
fn the_cross_cache_is_as_narrow_as_its_heads() {
    let case = Case::open(CASES[1]);
    let info = load(&case, &ReferenceBackend::new()).info();
    let width = |heads: &str, dim: usize| size(&case, heads) * dim;
    let own = width("kv_heads", size(&case, "hidden") / size(&case, "heads"));
    let cross = width("cross_heads", size(&case, "cross_dim"));
    assert_eq!(info.self_block_bytes * cross, info.cross_block_bytes * own);
}
