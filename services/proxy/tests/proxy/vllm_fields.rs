//! Fields of vLLM's that change what a PD worker is asked, or what the answer has: on the way there and back.

use crate::fakes::{GenerateStep, delta, hello, model, summary, text};
use crate::support::Cluster;
use serde_json::{Value, json};
use triptych_core::Modality;
use triptych_proto::v1;

const CHAT: &str = "/v1/chat/completions";

async fn cluster(is_trusting: bool, reasoning: v1::ReasoningSyntax) -> Cluster {
    let chat = v1::ChatFormat { reasoning: reasoning.into(), ..v1::ChatFormat::default() };
    let served = v1::WorkerModel { chat: Some(chat), ..model("chat", Modality::Image, 1) };
    Cluster::serving(vec![served], |config| config.bounds.chat_templates = is_trusting).await
}

fn ask(fields: Value) -> Value {
    let mut body = json!({"model": "chat", "messages": [{"role": "user", "content": "hi"}]});
    for (key, value) in fields.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

/// A prompt of three tokens, of which the second is an item's.
fn scored() -> GenerateStep {
    let ranked = |token_id, text: &str, logprob, rank| v1::RankedToken {
        logprob: Some(v1::TokenLogprob {
            token_id,
            text: text.into(),
            logprob,
            bytes: text.as_bytes().to_vec().into(),
        }),
        rank,
    };
    let token = v1::PromptToken { tokens: vec![ranked(7, "b", -2.5, 3), ranked(5, "a", -0.5, 1)] };
    let piece = |tokens, prompt_offset| {
        delta(v1::Delta { prompt_logprobs: tokens, prompt_offset, ..v1::Delta::default() })
    };
    let pieces = [piece(vec![v1::PromptToken::default()], 1), piece(vec![token], 2), text("yes")];
    GenerateStep::Send(pieces.into_iter().chain([summary(v1::Summary::default())]).collect())
}

#[tokio::test]
async fn log_probabilities_of_the_prompt_are_objects_by_token_id() {
    let cluster = cluster(false, v1::ReasoningSyntax::Unspecified).await;
    let expect = json!([null, null, {
        "7": {"logprob": -2.5, "rank": 3, "decoded_token": "b"},
        "5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
    }]);
    cluster.pd.script([scored()]);
    let (status, chat) = cluster.proxy.post(CHAT, &ask(json!({"prompt_logprobs": 1}))).await;
    assert_eq!((status, &chat["prompt_logprobs"]), (200, &expect), "{chat}");
    assert_eq!(cluster.pd.requests().pop().unwrap().sampling.unwrap().prompt_logprobs, Some(1));
    cluster.pd.script([scored(), GenerateStep::Send(hello())]);
    let body = json!({"model": "chat", "prompt": "hi", "prompt_logprobs": 1});
    let (status, completion) = cluster.proxy.post("/v1/completions", &body).await;
    assert_eq!((status, &completion["choices"][0]["prompt_logprobs"]), (200, &expect), "{completion}");
    let (_, none) = cluster.proxy.post(CHAT, &ask(json!({}))).await;
    assert!(none.get("prompt_logprobs").is_none(), "{none}");
    for path in [CHAT, "/v1/completions"] {
        let body = ask(json!({"prompt": "hi", "prompt_logprobs": 1, "stream": true}));
        let (status, refused) = cluster.proxy.post(path, &body).await;
        assert_eq!((status, &refused["error"]["param"]), (400, &json!("prompt_logprobs")), "{refused}");
    }
}

#[tokio::test]
async fn settings_reach_the_worker_under_their_names() {
    let cluster = cluster(false, v1::ReasoningSyntax::Unspecified).await;
    let body = ask(json!({
        "allowed_token_ids": [5, 6], "include_stop_str_in_output": true, "stop": "x", "truncate_prompt_tokens": 9,
    }));
    let (status, answer) = cluster.proxy.post(CHAT, &body).await;
    assert_eq!(status, 200, "{answer}");
    let sampling = cluster.pd.requests().pop().unwrap().sampling.unwrap();
    assert_eq!(sampling.allowed_token_ids, [5, 6]);
    assert!(sampling.include_stop_str_in_output);
    assert_eq!(sampling.truncate_prompt_tokens, Some(9));
    let (status, refused) = cluster.proxy.post(CHAT, &ask(json!({"prompt_logprobs": 21}))).await;
    assert_eq!((status, &refused["error"]["param"]), (400, &json!("prompt_logprobs")), "{refused}");
}

#[tokio::test]
async fn a_chat_template_is_taken_where_the_server_trusts_its_clients() {
    let template = ask(json!({"chat_template": "{{ messages }}"}));
    let strict = cluster(false, v1::ReasoningSyntax::Unspecified).await;
    let tokenize = "/tokenize";
    for path in [CHAT, tokenize] {
        let (status, refused) = strict.proxy.post(path, &template).await;
        assert_eq!((status, &refused["error"]["param"]), (400, &json!("chat_template")), "{refused}");
        assert!(refused["error"]["message"].as_str().unwrap().contains("--trust-request-chat-template"));
    }
    let trusting = cluster(true, v1::ReasoningSyntax::Unspecified).await;
    let (status, answer) = trusting.proxy.post(CHAT, &template).await;
    assert_eq!(status, 200, "{answer}");
    let prompt = trusting.pd.requests().pop().unwrap().prompt.unwrap();
    let Some(v1::prompt::Kind::Chat(chat)) = prompt.kind else { panic!("{prompt:?}") };
    assert_eq!(chat.chat_template.as_deref(), Some("{{ messages }}"));
    let (status, refused) =
        trusting.proxy.post(CHAT, &ask(json!({"chat_template": "x".repeat((64 << 10) + 1)}))).await;
    assert_eq!((status, &refused["error"]["param"]), (400, &json!("chat_template")), "{refused}");
}

#[tokio::test]
async fn magistrals_reasoning_is_apart_from_its_text() {
    let cluster = cluster(false, v1::ReasoningSyntax::Mistral).await;
    let end = v1::Delta { finish_reason: v1::FinishReason::Stop.into(), ..v1::Delta::default() };
    let pieces = [text("[THI"), text("NK]hm[/THINK"), text("]yes"), delta(end)];
    let step = pieces.into_iter().chain([summary(v1::Summary::default())]).collect();
    cluster.pd.script([GenerateStep::Send(step)]);
    let (_, body) = cluster.proxy.post(CHAT, &ask(json!({}))).await;
    let message = &body["choices"][0]["message"];
    assert_eq!((&message["content"], &message["reasoning"]), (&json!("yes"), &json!("hm")), "{body}");
}
