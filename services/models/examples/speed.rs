use std::time::Instant;
use std::path::Path;
use triptych_core::Extent;
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_kernels::cpu::*;
use triptych_kernels::ops::PagedBatch;
use triptych_models::decoder::*;
use triptych_models::encoder::*;
use triptych_models::family::{Config, Family};
use triptych_models::preprocess::{EncoderInput, Features};
use triptych_models::weights::Weights;
fn main() {
    let json = serde_json::json!({
        "model_type": "whisper", "activation_function": "gelu", "d_model": 512, "num_mel_bins": 80,
        "encoder_layers": 6, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048,
        "decoder_layers": 6, "decoder_attention_heads": 8, "decoder_ffn_dim": 2048,
        "max_source_positions": 1500, "max_target_positions": 448, "vocab_size": 51865 });
    let config = Config::new("config.json", &json);
    let spec = Family::of(&config).unwrap().spec(&config).unwrap();
    let w = Weights::open(Path::new("."), triptych_models::LoadFormat::Dummy { seed: 1 }).unwrap();
    for precision in [Precision::F32, Precision::Bf16] {
        let b = CpuBackend::new(CpuConfig { threads: 2, precision, isa: None }).unwrap();
        let mut e = TransformerEncoder::load(&spec.encoder, &w, &b).unwrap();
        let mut d = TransformerDecoder::load(&spec.decoder, &w, &b).unwrap();
        let input = EncoderInput { extent: Extent::Windows { n_windows: 1, duration_ms: 1 }, n_tokens: 1500, features: Features::Mel(vec![0.1; 80 * 3000]) };
        let mut rows = vec![];
        let mut best = f64::MAX;
        for _ in 0..8 { let t = Instant::now(); rows = e.encode(&[&input]).unwrap().remove(0); best = best.min(t.elapsed().as_secs_f64()); }
        let (n, cb) = (32usize, 47usize);
        d.allocate_kv(n, n * cb).unwrap();
        let mut proj = f64::MAX;
        for s in 0..n {
            let slots: Vec<u32> = (0..1500).map(|i| (s * cb * KV_BLOCK_TOKENS + i) as u32).collect();
            let t = Instant::now(); d.project_cross(&rows, &slots).unwrap(); proj = proj.min(t.elapsed().as_secs_f64());
        }
        for n in [1usize, 32] {
            let u = |f: &dyn Fn(usize) -> usize, k: usize| -> Vec<u32> { (0..k).map(|i| f(i) as u32).collect() };
            let q = u(&|i| i, n + 1);
            let mut step = f64::MAX;
            let (st, sb, sl) = (u(&|i| i, n + 1), u(&|i| i, n), vec![11u32; n]);
            let (ct, cbk, cl) = (u(&|i| i * cb, n + 1), u(&|i| i, n * cb), vec![1500u32; n]);
            for _ in 0..15 {
                let t = Instant::now();
                d.forward(&StepInput { token_ids: &vec![7; n], positions: &vec![[10; 3]; n], embeds: &[], slot_mapping: &u(&|i| i * KV_BLOCK_TOKENS + 10, n),
                    self_kv: PagedBatch { query_start_loc: &q, table_start_loc: &st, block_tables: &sb, seq_lens: &sl },
                    cross_kv: Some(PagedBatch { query_start_loc: &q, table_start_loc: &ct, block_tables: &cbk, seq_lens: &cl }),
                    logit_rows: &u(&|i| i, n) }).unwrap();
                step = step.min(t.elapsed().as_secs_f64());
            }
            println!("{precision:?} batch {n}: step {:.2} ms", step * 1e3);
        }
        println!("{precision:?}: encode {:.1} ms, project {:.1} ms", best * 1e3, proj * 1e3);
    }
}
