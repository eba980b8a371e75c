//! Tools through the whole cluster: models with random weights call them by grammar, each in the syntax of its template, and
//! read the results; and reasoning that a prompt begins.
//!
//! The models are golden ones with the templates of `golden/chat_tools`, which follow the published formats.

use serde_json::{Value, json};
use std::path::PathBuf;
use tempfile::TempDir;
use triptych_tests::cluster::{Cluster, reqwest_client};

const CHAT: &str = "/v1/chat/completions";

/// Template and model of each syntax.
const MODELS: [(&str, &str); 3] =
    [("hermes", "qwen2_tied"), ("llama3", "llama_tied"), ("mistral", "mistral_windowed")];

pub fn golden(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden").join(path)
}

pub fn json_of(path: &std::path::Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).expect("a golden file")).expect("JSON")
}

/// A template of the golden ones.
pub fn template(name: &str) -> Value {
    let templates = json_of(&golden("chat_tools/templates.json"));
    let mut found = templates.as_array().expect("templates").iter().filter(|t| t["name"] == name);
    found.next().expect("a template")["template"].clone()
}

/// A copy of a golden model with another template.
pub fn with_template(case: &str, template: &Value) -> TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    for entry in std::fs::read_dir(golden(case).join("model")).expect("a model") {
        let from = entry.expect("an entry").path();
        std::fs::copy(&from, dir.path().join(from.file_name().expect("a name"))).expect("a copy");
    }
    let path = dir.path().join("tokenizer_config.json");
    let mut config = json_of(&path);
    config["chat_template"] = template.clone();
    std::fs::write(path, config.to_string()).expect("a file");
    dir
}

fn tools() -> Value {
    let parameters = json!({
        "type": "object",
        "properties": {
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 5},
        },
        "required": ["unit", "days"],
        "additionalProperties": false,
    });
    json!([
        {"type": "function", "function": {"name": "weather", "parameters": parameters, "strict": true}},
        {"type": "function", "function": {"name": "now"}},
    ])
}

pub async fn post(cluster: &Cluster, path: &str, body: &Value) -> String {
    let response = reqwest_client().post(format!("{}{path}", cluster.http)).json(body).send();
    let response = response.await.expect("the proxy answers");
    let (status, text) = (response.status(), response.text().await.expect("a body"));
    assert_eq!(status, 200, "{body}: {text}");
    text
}

pub async fn answer(cluster: &Cluster, path: &str, body: &Value) -> Value {
    serde_json::from_str(&post(cluster, path, body).await).expect("JSON")
}

/// Arguments that fit the schema.
pub fn check_arguments(text: &str) {
    let arguments: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{text:?}: {e}"));
    assert!(["celsius", "fahrenheit"].contains(&arguments["unit"].as_str().expect("a unit")), "{text}");
    assert!((1..=5).contains(&arguments["days"].as_u64().expect("days")), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_calls_a_tool_in_its_syntax_and_reads_the_result() {
    let dirs = MODELS.map(|(name, case)| with_template(case, &template(name)));
    let models = MODELS.iter().zip(&dirs).map(|((name, _), dir)| format!("{name}={}", dir.path().display()));
    let args: Vec<String> = models.flat_map(|model| ["--model".to_owned(), model]).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    // These models write a call within one interval.
    let cluster = Cluster::start_with(&args, &[("TRIPTYCH_STREAM_INTERVAL", "0".into())]).await;
    for (model, _) in MODELS {
        let named = json!({"type": "function", "function": {"name": "weather"}});
        let mut body = json!({
            "model": model, "messages": [{"role": "user", "content": "Is it cold?"}], "tools": tools(),
            "tool_choice": named, "temperature": 0, "max_tokens": 200,
        });
        let whole = answer(&cluster, CHAT, &body).await;
        let (choice, message) = (&whole["choices"][0], &whole["choices"][0]["message"]);
        assert_eq!(
            (&choice["finish_reason"], &message["content"]),
            (&json!("tool_calls"), &Value::Null),
            "{whole}"
        );
        let call = &message["tool_calls"][0];
        assert_eq!(call["function"]["name"], "weather", "{whole}");
        check_arguments(call["function"]["arguments"].as_str().expect("arguments"));
        check_stream(&cluster, &body, call).await;
        check_tokens(&cluster, &body, &whole["usage"]["prompt_tokens"]).await;

        // The answer to the result is words that nothing holds to a form.
        let result = json!({"role": "tool", "tool_call_id": call["id"], "content": "7 degrees"});
        body["messages"] = json!([body["messages"][0], message, result]);
        body["tool_choice"] = "auto".into();
        body["max_tokens"] = 6.into();
        let answer = answer(&cluster, CHAT, &body).await;
        assert!(answer["choices"][0]["message"]["content"].is_string(), "{answer}");
        let n_prompt = |value: &Value| value["usage"]["prompt_tokens"].as_u64().expect("a count");
        assert!(n_prompt(&answer) > n_prompt(&whole), "call and result are in the prompt");
    }
}

/// The prompt has as many tokens as `/tokenize` says, and their text is the template's.
async fn check_tokens(cluster: &Cluster, body: &Value, n_prompt: &Value) {
    let mut body = body.clone();
    body["return_token_strs"] = true.into();
    let found = answer(cluster, "/tokenize", &body).await;
    assert_eq!((&found["count"], &found["max_model_len"]), (n_prompt, &json!(2048)), "{found}");
    let strs = found["token_strs"].as_array().expect("texts");
    assert_eq!(strs.len(), found["tokens"].as_array().expect("tokens").len());
    let back = json!({"model": body["model"], "tokens": found["tokens"]});
    let text = answer(cluster, "/detokenize", &back).await["prompt"].take();
    let text = text.as_str().expect("a text");
    assert!(text.contains("Is it cold?") && text.contains("\"weather\""), "{text}");
    let plain = json!({"model": body["model"], "prompt": "cold", "add_special_tokens": false});
    let tokens = answer(cluster, "/tokenize", &plain).await["tokens"].take();
    let back = json!({"model": body["model"], "tokens": tokens});
    assert_eq!(answer(cluster, "/detokenize", &back).await["prompt"], "cold");
}

/// The stream of the same request has the same call, its arguments in pieces.
async fn check_stream(cluster: &Cluster, body: &Value, call: &Value) {
    let mut body = body.clone();
    body["stream"] = true.into();
    let events = post(cluster, CHAT, &body).await;
    let events = events.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|e| *e != "[DONE]");
    let piece = |event: &str| {
        let event: Value = serde_json::from_str(event).expect("JSON");
        event.pointer("/choices/0/delta/tool_calls/0").cloned()
    };
    let pieces: Vec<Value> = events.filter_map(piece).collect();
    assert_eq!(pieces[0]["function"]["name"], "weather");
    let arguments: String =
        pieces.iter().filter_map(|piece| piece["function"]["arguments"].as_str()).collect();
    assert_eq!(arguments, call["function"]["arguments"].as_str().expect("arguments"));
    assert!(pieces.len() > 2, "{pieces:?}");
}

/// A template whose prompts end within reasoning, unless the request turns that off.
pub const THINKS: &str = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}<|im_start|>\
    {% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reasoning_that_the_prompt_began_is_apart_from_the_text_unless_it_is_turned_off() {
    let dir = with_template("qwen3_windowed_layers", &THINKS.into());
    let cluster = Cluster::start(&["--model", &format!("thinks={}", dir.path().display())]).await;
    let mut body = json!({
        "messages": [{"role": "user", "content": "Is it cold?"}], "temperature": 0, "max_tokens": 8,
    });
    let whole = answer(&cluster, CHAT, &body).await;
    let message = &whole["choices"][0]["message"];
    assert_eq!(message["content"], Value::Null, "{whole}");
    assert!(!message["reasoning_content"].as_str().expect("reasoning").is_empty(), "{whole}");
    assert_eq!(message["reasoning"], message["reasoning_content"]);
    body["chat_template_kwargs"] = json!({"enable_thinking": false});
    let whole = answer(&cluster, CHAT, &body).await;
    let message = &whole["choices"][0]["message"];
    assert!(!message["content"].as_str().expect("a text").is_empty(), "{whole}");
    assert_eq!(message.get("reasoning_content"), None, "{whole}");
}
