//! Chunks as vLLM writes them, and others.

use super::*;
use serde_json::json;

fn read(chunks: &[serde_json::Value]) -> (Vec<v1::Delta>, Result<v1::Summary, CallError>) {
    let now = Instant::now();
    let mut reader = AnswerReader::new(1, now);
    let mut pieces = Vec::new();
    for chunk in chunks {
        match reader.read(chunk.to_string().as_bytes(), now) {
            Ok(read) => pieces.extend(read),
            Err(e) => return (pieces, Err(e)),
        }
    }
    (pieces, reader.finish())
}

fn choice(delta: serde_json::Value, fields: serde_json::Value) -> serde_json::Value {
    let mut choice = json!({"index": 0, "delta": delta, "finish_reason": null});
    for (name, value) in fields.as_object().unwrap() {
        choice[name] = value.clone();
    }
    json!({"choices": [choice]})
}

#[test]
fn the_first_chunk_of_a_chat_is_no_piece_and_reasoning_is_apart() {
    let (pieces, end) = read(&[
        choice(json!({"role": "assistant", "content": ""}), json!({})),
        choice(json!({"reasoning": "hm"}), json!({"token_ids": [1]})),
        choice(json!({"reasoning_content": "m"}), json!({"token_ids": [2]})),
        choice(json!({"content": "yes"}), json!({"token_ids": [3], "finish_reason": "stop"})),
        json!({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3, "prompt_tokens_details": null}}),
    ]);
    let texts: Vec<_> = pieces.iter().map(|p| (p.reasoning.as_str(), p.text.as_str())).collect();
    assert_eq!(texts, [("hm", ""), ("m", ""), ("", "yes")]);
    let usage = end.unwrap().usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens), (4, 3, 0));
}

#[test]
fn ids_of_tokens_stand_beside_their_log_probabilities_where_they_are_told() {
    let logprobs = json!({"content": [
        {"token": "a", "logprob": -0.25, "bytes": [97], "top_logprobs": [
            {"token": "a", "logprob": -0.25, "bytes": [97]}, {"token": "b", "logprob": -2.0, "bytes": null},
        ]},
    ]});
    let (pieces, _) =
        read(&[choice(json!({"content": "a"}), json!({"token_ids": [9], "logprobs": logprobs}))]);
    let token = &pieces[0].logprobs[0];
    let chosen = token.chosen.as_ref().unwrap();
    assert_eq!((chosen.token_id, chosen.logprob, &chosen.bytes[..]), (9, -0.25, &b"a"[..]));
    let top: Vec<_> = token.top.iter().map(|t| (t.token_id, t.text.as_str())).collect();
    assert_eq!(top, [(9, "a"), (0, "b")]);
    let many = json!({"token_ids": [9, 9], "logprobs": logprobs});
    let (pieces, _) = read(&[choice(json!({"content": "a"}), many)]);
    assert_eq!(pieces[0].logprobs[0].chosen.as_ref().unwrap().token_id, 0, "ids that do not fit are none");
}

#[test]
fn an_answer_without_its_end_is_lost_and_an_error_in_it_has_its_code() {
    let open = choice(json!({"content": "a"}), json!({}));
    assert!(matches!(read(std::slice::from_ref(&open)).1, Err(CallError::Lost(_))));
    let failed = choice(json!({"content": ""}), json!({"finish_reason": "error"}));
    let (pieces, end) = read(&[open, failed]);
    assert_eq!(pieces.len(), 1);
    assert!(end.unwrap_err().is_internal());
    let error = json!({"error": {"message": "x", "code": 400}});
    assert!(!read(&[error]).1.unwrap_err().is_internal());
    assert!(matches!(read(&[json!([1])]).1, Err(CallError::Unreadable(_))));
    assert!(matches!(read(&[json!({"choices": [{"index": -1}]})]).1, Err(CallError::Unreadable(_))));
}
