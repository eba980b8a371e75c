//! Long-form Whisper, beyond one pass, against transformers' own functions.

use crate::case::{Case, assert_within, cpu, cuda, encoded, max_error, stored};
use serde_json::Value;
use triptych_core::Modality;
use triptych_core::prompt::SpeechFallback;
use triptych_kernels::Backend;
use triptych_kernels::Precision;
use triptych_kernels::reference::ReferenceBackend;
use triptych_models::decoder::AlignInput;
use triptych_models::speech::align::{AttentionWeights, first_rows};
use triptych_models::speech::quality::{WindowQuality, WindowVerdict, compression_ratio, judge};
use triptych_models::speech::sequential::{PreviousLimits, SequentialWindow, previous_tokens};
use triptych_models::speech::stitch::seam;
use triptych_models::speech::words::words;

const CASES: [&str; 3] = ["whisper_en_odd_heads", "whisper_multilingual", "whisper_deep_f16"];

/// Probabilities of attention, between 0 and 1.
const WEIGHTS: f32 = 2e-4;

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).expect("token ids")
}

fn number(value: &Value) -> usize {
    value.as_u64().expect("an integer") as usize
}

fn list(value: &Value) -> &[Value] {
    value.as_array().expect("a list")
}

/// AttentionWeights of the chosen heads, and from them the row of every token, over all lists of a case.
fn alignments_match<B: Backend>(backend: &B) {
    for name in CASES {
        let case = Case::open(name);
        let long = Case::open_part(name, "long");
        let model = case.model();
        let facts = model.prompts().speech().expect("a speech model");
        let mut encoder = model.load_encoder(Modality::Audio, backend).expect("encoder weights");
        let mut decoder = model.load_decoder(backend).expect("decoder weights");
        let inputs = crate::whisper::batch_inputs(&case);
        let mut n_near = 0;
        for one in list(&long.json["alignments"]) {
            let i = number(&one["input"]);
            let tokens = ids(&one["tokens"]);
            let n_prompt = number(&one["n_prompt"]);
            let rows = encoder.encode(&[&inputs[i]]).expect("golden features fit").remove(0);
            let hidden = encoder.hidden();
            let bytes = stored(&rows, hidden);
            let input = AlignInput {
                tokens: &tokens,
                rows: encoded(&bytes, hidden),
                heads: &facts.alignment_heads,
                adapter: None,
            };
            let weights = decoder.align(&input).expect("a decoder with cross-attention");
            if i < 2 {
                let what = format!("{name} {} weights of {i}", backend.name());
                assert_within(&what, max_error(&weights, &long.values(&format!("align.{i}")).1), WEIGHTS);
            }
            let n_rows = rows.len() / hidden;
            let heads = weights.chunks_exact(tokens.len() * n_rows);
            let free: Vec<f32> = heads.flat_map(|head| &head[n_prompt * n_rows..]).copied().collect();
            let weights = AttentionWeights {
                values: &free,
                n_heads: facts.alignment_heads.len(),
                n_tokens: tokens.len() - n_prompt,
                n_rows,
            };
            let found = first_rows(weights, number(&one["n_heard"]), facts.median);
            let expected = ids(&one["rows"]);
            assert_eq!(found.len(), expected.len(), "{name} {i}");
            let off =
                found.iter().zip(&expected).filter(|(f, e)| (**f as i64 - i64::from(**e)).abs() > 1).count();
            // Random weights leave paths of nearly equal weight; one that turns earlier moves a few tokens.
            assert!(off * 10 <= found.len(), "{name} {i}: {off} of {} tokens begin elsewhere", found.len());
            n_near += usize::from(off == 0);
        }
        let n_lists = list(&long.json["alignments"]).len();
        assert!(n_near * 4 >= n_lists * 3, "{name}: {n_near} of {n_lists} lists are right to a row");
    }
}

#[test]
fn reference_aligns_as_the_reference() {
    alignments_match(&ReferenceBackend::new());
}

#[test]
fn cpu_aligns_as_the_reference() {
    alignments_match(&cpu(Precision::F32));
}

#[test]
fn cuda_aligns_as_the_reference() {
    alignments_match(&cuda(Precision::F32));
}

#[test]
fn heads_that_are_not_there_are_refused() {
    let case = Case::open(CASES[0]);
    let backend = cpu(Precision::F32);
    let mut decoder = case.model().load_decoder(&backend).expect("decoder weights");
    let bytes = stored(&[0.0; 36 * 4], 36);
    let rows = encoded(&bytes, 36);
    let mut align = |tokens: &[u32], rows, heads: &[(u32, u32)]| {
        decoder.align(&AlignInput { tokens, rows, heads, adapter: None }).is_err()
    };
    assert!(!align(&[1, 2], rows, &[(0, 0)]));
    assert!(align(&[1, 2], rows, &[(1, 0)]) && align(&[1, 2], rows, &[(0, 3)]));
    let wide = encoded(&bytes, 48);
    let none = encoded(&[], 36);
    assert!(align(&[1, 2], wide, &[(0, 0)]) && align(&[1, 2], none, &[(0, 0)]) && align(&[], rows, &[]));
}

#[test]
fn windows_seek_and_prompt_as_the_reference() {
    for name in CASES {
        let case = Case::open(name);
        let long = Case::open_part(name, "long");
        let facts = case.model().prompts().speech().expect("a speech model");
        let first_time = facts.first_time.expect("times");
        for run in list(&long.json["sequences"]) {
            let duration_ms = number(&run["n_frames"]) as u32 * 10;
            let windows = list(&run["windows"]);
            let mut previous = Vec::new();
            let mut segments = Vec::new();
            for (i, window) in windows.iter().enumerate() {
                let tokens = ids(&window["tokens"]);
                let prompt = ids(&window["prompt"]);
                let start_ms = number(&window["seek"]) as u32 * 10;
                let frame =
                    SequentialWindow { start_ms, duration_ms, window_ms: facts.window_ms, first_time };
                if run["conditioned"] == true && i > 0 {
                    let prompted =
                        &prompt[1..prompt.len() - list(&case.json["prompt_with_timestamps"]).len()];
                    assert_eq!(prompted, previous, "{name}, window {i}");
                }
                let decoded = frame.decoded(&tokens);
                if let Some(next) = windows.get(i + 1) {
                    assert_eq!(
                        decoded.next_ms,
                        Some(number(&next["seek"]) as u32 * 10),
                        "{name}, window {i}"
                    );
                }
                previous = previous_tokens(
                    &previous,
                    &tokens,
                    &decoded,
                    PreviousLimits { first_time, max_tokens: facts.max_previous },
                );
                segments.extend(
                    decoded.segments.into_iter().map(|s| (s.start_s, s.end_s, tokens[s.tokens].to_vec())),
                );
            }
            if let Some(expected) = run["segments"].as_array() {
                assert_eq!(segments.len(), expected.len(), "{name}");
                for ((start, end, tokens), e) in segments.iter().zip(expected) {
                    let near = |t: f64, e: &Value| (t - e.as_f64().expect("a time")).abs() < 1e-6;
                    assert!(near(*start, &e[0]) && near(*end, &e[1]), "{name}: {start} {end} {e}");
                    assert_eq!(*tokens, ids(&e[2]), "{name}");
                }
            }
        }
    }
}

#[test]
fn windows_are_judged_as_the_reference() {
    for name in CASES {
        let case = Case::open(name);
        let long = Case::open_part(name, "long");
        let vocab = case.model().prompts().speech().expect("a speech model").vocab;
        for one in list(&long.json["fallbacks"]) {
            let float = |value: &Value| value.as_f64().map(|v| v as f32);
            let ratio = compression_ratio(&ids(&one["tokens"]), vocab);
            let expected = float(&one["compression_ratio"]).expect("a ratio");
            assert!((ratio / expected - 1.0).abs() < 0.05, "{name}: {ratio}, expected {expected}");
            let [compression, logprob, no_speech] = [0, 1, 2].map(|i| float(&one["limits"][i]));
            let fallback = SpeechFallback {
                compression_ratio: compression,
                logprob,
                no_speech,
                ..SpeechFallback::default()
            };
            let quality = WindowQuality {
                compression_ratio: ratio,
                logprob: float(&one["logprob"]).expect("a number"),
                no_speech: float(&one["no_speech"]).expect("a number"),
            };
            let expected = match (one["again"] == true, one["skip"] == true) {
                (_, true) => WindowVerdict::Silent,
                (true, _) => WindowVerdict::Again,
                _ => WindowVerdict::Keep,
            };
            assert_eq!(judge(&fallback, quality), expected, "{name}: {one}");
        }
    }
}

#[test]
fn words_and_seams_are_those_of_the_reference() {
    for name in CASES {
        let case = Case::open(name);
        let long = Case::open_part(name, "long");
        let model = case.model();
        for one in list(&long.json["words"]) {
            let tokens = ids(&one["tokens"]);
            let found = words(model.tokenizer(), &tokens, one["language"].as_str());
            let texts: Vec<&str> = found.iter().map(|w| w.text.as_str()).collect();
            let expected: Vec<&str> = list(&one["words"]).iter().map(|w| w.as_str().expect("text")).collect();
            assert_eq!(texts, expected, "{name}");
            let ends: Vec<u32> = found.iter().map(|w| w.tokens.end as u32).collect();
            assert_eq!(ends, ids(&one["ends"]), "{name}");
        }
        for one in list(&long.json["seams"]) {
            let left = ids(&one["left"]);
            let right = ids(&one["right"]);
            let (keep, skip) = seam(&left, &right);
            assert_eq!([&left[..keep], &right[skip..]].concat(), ids(&one["joined"]), "{name}: {one}");
        }
    }
}
