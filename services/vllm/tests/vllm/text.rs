//! Text: parameters on the way there, answers on the way back, and what is refused.

use crate::cluster::{CHAT, Proxy, eventually};
use crate::fake::{MODEL, Step, Vllm, event, hello, piece, role, usage};
use serde_json::{Value, json};

async fn cluster(options: &str) -> (Vllm, Proxy) {
    let vllm = Vllm::start().await;
    let proxy = Proxy::start(Vec::new(), vec![vllm.setting(options)]).await;
    (vllm, proxy)
}

fn ask(fields: Value) -> Value {
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]});
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

#[tokio::test]
async fn a_chat_is_asked_field_by_field_and_answered_whole_or_in_pieces() {
    let (vllm, proxy) = cluster("?priorities=true").await;
    let fields = json!({
        "temperature": 0.1, "top_p": 0.9, "top_k": 5, "min_p": 0.05, "seed": 11, "max_tokens": 9, "min_tokens": 1,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5, "stop": ["END"],
        "stop_token_ids": [4], "logit_bias": {"7": 2.5}, "bad_words": ["no"], "ignore_eos": true,
        "response_format": {"type": "json_object"},
    });
    let (status, answer) = proxy.post(CHAT, &ask(fields)).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["choices"][0]["message"]["content"], "Hello");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let expect = json!({"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5});
    for (name, n) in expect.as_object().unwrap() {
        assert_eq!(&answer["usage"][name], n, "{answer}");
    }
    let asked = vllm.asked().pop().unwrap();
    assert_eq!(asked.path, CHAT);
    assert_eq!(asked.headers["authorization"], "Bearer secret");
    assert!(asked.headers["x-request-id"].starts_with("req-"), "{:?}", asked.headers);
    let expect = json!({
        "model": MODEL, "stream": true, "stream_options": {"include_usage": true}, "return_token_ids": true,
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.1, "top_p": 0.9, "top_k": 5, "min_p": 0.05, "seed": 11, "max_tokens": 9, "min_tokens": 1,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5, "stop": ["END"],
        "stop_token_ids": [4], "logit_bias": {"7": 2.5}, "bad_words": ["no"], "ignore_eos": true,
        "structured_outputs": {"json_object": true},
    });
    let sorted = |value: &Value| {
        value.as_object().unwrap().clone().into_iter().collect::<std::collections::BTreeMap<_, _>>()
    };
    assert_eq!(sorted(&asked.body), sorted(&expect));

    let stream = proxy.client.post(proxy.url(CHAT)).json(&ask(json!({"stream": true}))).send().await.unwrap();
    let text = stream.text().await.unwrap();
    assert!(
        text.contains("\"Hel\"") && text.contains("\"lo\"") && text.ends_with("data: [DONE]\n\n"),
        "{text}"
    );
}

#[tokio::test]
async fn a_completion_has_its_log_probabilities() {
    let (vllm, proxy) = cluster("").await;
    let chunk = json!({"id": "cmpl-1", "object": "text_completion", "model": MODEL, "choices": [{
        "index": 0, "text": "a b", "finish_reason": "length", "token_ids": [5, 6],
        "logprobs": {
            "text_offset": [0, 1], "token_logprobs": [-0.5, -1.0], "tokens": ["a", " b"],
            "top_logprobs": [{"a": -0.5, "c": -2.0}, null],
        },
    }]});
    vllm.script([Step::Stream(vec![event(&chunk), usage(1, 2)])]);
    let body = json!({"model": MODEL, "prompt": "x", "logprobs": 1});
    let (status, answer) = proxy.post("/v1/completions", &body).await;
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("a b"), &json!("length")));
    assert_eq!(choice["logprobs"]["tokens"], json!(["a", " b"]));
    assert_eq!(choice["logprobs"]["token_logprobs"], json!([-0.5, -1.0]));
    let asked = vllm.asked().pop().unwrap();
    assert_eq!((asked.path.as_str(), &asked.body["prompt"]), ("/v1/completions", &json!("x")));
    assert_eq!(asked.body["logprobs"], 1);
}

#[tokio::test]
async fn calls_of_tools_are_read_by_the_proxy() {
    let (vllm, proxy) = cluster("?tools=hermes").await;
    let call = "<tool_call>{\"name\": \"look\", \"arguments\": {\"x\": 1}}</tool_call>";
    vllm.script([Step::Stream(vec![role(), piece(call, 7, Some("stop")), usage(3, 1)])]);
    let tool = json!({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}});
    let (status, answer) = proxy.post(CHAT, &ask(json!({"tools": [tool]}))).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "look", "{answer}");
    let asked = vllm.asked().pop().unwrap().body;
    assert_eq!(
        (&asked["tool_choice"], &asked["tools"][0]["function"]["name"]),
        (&json!("none"), &json!("look"))
    );
}

#[tokio::test]
async fn what_vllm_has_no_field_for_is_refused_by_name() {
    let (vllm, proxy) = cluster("").await;
    for (fields, param) in [
        (json!({"num_beams": 2}), "num_beams"),
        (json!({"no_repeat_ngram_size": 2}), "no_repeat_ngram_size"),
        (json!({"prompt_logprobs": 1}), "prompt_logprobs"),
        (json!({"seed": u64::MAX}), "seed"),
    ] {
        let (status, answer) = proxy.post(CHAT, &ask(fields)).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{answer}");
    }
    assert!(vllm.asked().is_empty(), "nothing was sent");
}

#[tokio::test]
async fn models_and_tokens_are_those_of_the_server() {
    let (vllm, proxy) = cluster("").await;
    let models = json!({"data": [
        {"id": MODEL, "max_model_len": 512}, {"id": "style", "parent": MODEL, "root": "/loras/style"},
    ]});
    vllm.serve_models(models);
    eventually("the adapter is announced", async || {
        let list = proxy.get("/v1/models").await.to_string();
        list.contains("\"style\"") && list.contains(MODEL)
    })
    .await;
    let body = json!({"model": MODEL, "prompt": "hi"});
    let (status, tokens) = proxy.post("/tokenize", &body).await;
    assert_eq!((status, &tokens["tokens"]), (200, &json!([5, 6])), "{tokens}");
    vllm.script([Step::Stream(hello())]);
    let (status, text) = proxy.chat(&ask(json!({"model": "style"}))).await;
    assert_eq!((status, text.as_str()), (200, "Hello"));
    assert_eq!(vllm.asked().pop().unwrap().body["model"], "style");
}
