//! `/v1/responses` through the whole cluster: the answers are those of chat, with a call of a tool and its result, reasoning,
//! an image, an audio clip, and a format.

use crate::tools::{THINKS, answer, check_arguments, post, template, with_template};
use base64::Engine as _;
use serde_json::{Value, json};
use triptych_tests::cluster::Cluster;
use triptych_tests::samples::{ask_images, data_url, heldout, text_of};

const PATH: &str = "/v1/responses";

/// Items of an output, by type.
fn of_type<'a>(response: &'a Value, kind: &str) -> Vec<&'a Value> {
    let items = response["output"].as_array().unwrap_or_else(|| panic!("no output in {response}"));
    items.iter().filter(|item| item["type"] == kind).collect()
}

fn output_text(response: &Value) -> &str {
    of_type(response, "message")[0]["content"][0]["text"].as_str().expect("a text")
}

/// The response that ends a stream.
fn last_response(events: &str) -> Value {
    let last = events.lines().filter_map(|line| line.strip_prefix("data: ")).next_back().expect("events");
    let mut last: Value = serde_json::from_str(last).expect("JSON");
    assert_eq!(last["type"], "response.completed", "{last}");
    last["response"].take()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tool_is_called_and_its_result_read_without_anything_stored() {
    let calls = with_template("qwen2_tied", &template("hermes"));
    let thinks = with_template("qwen3_windowed_layers", &THINKS.into());
    let (calls, thinks) =
        (format!("agent={}", calls.path().display()), format!("thinks={}", thinks.path().display()));
    let cluster = Cluster::start(&["--model", &calls, "--model", &thinks]).await;
    let parameters = json!({
        "type": "object",
        "properties": {
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 5},
        },
        "required": ["unit", "days"], "additionalProperties": false,
    });
    let tool = json!({"type": "function", "name": "weather", "parameters": parameters, "strict": true});
    let mut body = json!({
        "model": "agent", "input": [{"role": "user", "content": "Is it cold?"}], "tools": [tool],
        "instructions": "Be brief.", "tool_choice": {"type": "function", "name": "weather"},
        "temperature": 0, "max_output_tokens": 200, "store": false,
        "include": ["reasoning.encrypted_content"],
    });
    let whole = answer(&cluster, PATH, &body).await;
    assert_eq!((&whole["status"], &whole["store"]), (&json!("completed"), &json!(false)), "{whole}");
    let call = of_type(&whole, "function_call")[0].clone();
    assert_eq!(call["name"], "weather");
    check_arguments(call["arguments"].as_str().expect("arguments"));
    body["stream"] = true.into();
    let streamed = last_response(&post(&cluster, PATH, &body).await);
    assert_eq!(of_type(&streamed, "function_call")[0]["arguments"], call["arguments"]);
    assert_eq!(streamed["usage"]["output_tokens"], whole["usage"]["output_tokens"]);

    // The output goes back as it is, with the result after it.
    let mut input = body["input"].as_array().expect("a list").clone();
    input.extend(whole["output"].as_array().expect("items").iter().cloned());
    input.push(json!({"type": "function_call_output", "call_id": call["call_id"], "output": "7 degrees"}));
    body["stream"] = false.into();
    body["input"] = input.into();
    body["tool_choice"] = "auto".into();
    body["tools"][0]["strict"] = false.into();
    body["max_output_tokens"] = 6.into();
    let after = answer(&cluster, PATH, &body).await;
    assert_eq!(after["status"], "incomplete", "six random tokens: {after}");
    let n_input = |response: &Value| response["usage"]["input_tokens"].as_u64().expect("a count");
    assert!(n_input(&after) > n_input(&whole), "call and result are in the prompt");
    check_as_chat(&cluster, &after).await;

    let body = json!({"model": "thinks", "input": "Is it cold?", "temperature": 0, "max_output_tokens": 8});
    let thought = answer(&cluster, PATH, &body).await;
    let text = of_type(&thought, "reasoning")[0]["content"][0]["text"].as_str().expect("reasoning");
    assert!(!text.is_empty() && of_type(&thought, "message").is_empty(), "{thought}");
    assert!(thought["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64() > Some(0));
}

/// The same conversation in chat has the same answer.
async fn check_as_chat(cluster: &Cluster, response: &Value) {
    let asked = json!({"model": "agent", "input": "Which way?", "instructions": "Be brief.", "temperature": 0,
        "max_output_tokens": 12});
    let ours = answer(cluster, PATH, &asked).await;
    let chat = json!({"model": "agent", "temperature": 0, "max_tokens": 12, "messages": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which way?"}]});
    let theirs = answer(cluster, "/v1/chat/completions", &chat).await;
    assert_eq!(output_text(&ours), text_of(&theirs));
    assert_eq!(ours["usage"]["input_tokens"], theirs["usage"]["prompt_tokens"]);
    assert_ne!(response["id"], ours["id"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn images_audio_and_formats_are_answered_as_in_chat() {
    let cluster = Cluster::start(&[]).await;
    let png = heldout("scene.png");
    let question = "What is in this picture?";
    let (_, chat) = cluster.chat(ask_images("shapes-qwen2-vl", question, &[&png])).await;
    let content = json!([
        {"type": "input_image", "image_url": data_url(&png)}, {"type": "input_text", "text": question},
    ]);
    let body = json!({"model": "shapes-qwen2-vl", "input": [{"role": "user", "content": content}],
        "temperature": 0, "include": ["message.output_text.logprobs"], "top_logprobs": 2});
    let found = answer(&cluster, PATH, &body).await;
    assert_eq!(output_text(&found), text_of(&chat));
    let logprobs = found["output"][0]["content"][0]["logprobs"].as_array().expect("a list");
    let joined: String = logprobs.iter().map(|t| t["token"].as_str().expect("a token")).collect();
    assert_eq!(joined.trim(), text_of(&chat).trim());
    assert_eq!(logprobs[0]["top_logprobs"].as_array().map(Vec::len), Some(2));

    let wav = base64::engine::general_purpose::STANDARD.encode(heldout("digits.wav"));
    let audio = json!([{"type": "input_audio", "input_audio": {"data": wav, "format": "wav"}}]);
    let body =
        json!({"model": "digits-whisper", "input": [{"role": "user", "content": audio}], "temperature": 0});
    let heard = answer(&cluster, PATH, &body).await;
    assert!(output_text(&heard).chars().any(|c| c.is_ascii_digit()), "{heard}");

    let schema = json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"], "additionalProperties": false});
    let format = json!({"format": {"type": "json_schema", "name": "count", "schema": schema}});
    let body = json!({"model": "shapes-qwen2-vl", "input": [{"role": "user", "content": content}],
        "temperature": 0, "text": format});
    let counted = answer(&cluster, PATH, &body).await;
    let value: Value = serde_json::from_str(output_text(&counted)).expect("JSON of the schema");
    assert!(value["n"].is_u64(), "{counted}");
}
