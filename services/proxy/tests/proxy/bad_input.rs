//! Invalid requests: each gets an error that names the field, and none reaches a worker.

use crate::fakes::GenerateStep;
use crate::support::{Cluster, IMAGE, ask, client, question};
use serde_json::{Value, json};
use tonic::{Code, Request};
use triptych_core::limits::Limits;
use triptych_core::{Failure, FailureClass};
use triptych_proto::v1;
use triptych_runtime::status::to_status;

const PATH: &str = "/v1/chat/completions";

fn small() -> Limits {
    Limits { max_items: 2, max_item_bytes: 100, max_body_bytes: 20_000, ..Limits::default() }
}

fn user(content: Value) -> Value {
    json!({"messages": [{"role": "user", "content": content}]})
}

fn image(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url}})
}

/// A valid request with one field set.
fn with(field: &str, value: Value) -> Value {
    let mut body = user(json!("hi"));
    body[field] = value;
    body
}

#[tokio::test]
async fn bad_chat_requests() {
    let cluster = Cluster::with(|config| config.limits = small()).await;
    let large = format!("data:image/png;base64,{}", "A".repeat(200));
    let at_url = json!("messages[0].content[0].image_url");
    let null = Value::Null;
    let cases: Vec<(Value, u16, Value, &str)> = vec![
        (json!({}), 400, json!("messages"), "messages is empty"),
        (json!({"messages": []}), 400, json!("messages"), "messages is empty"),
        (user(json!("  ")), 400, json!("messages"), "the prompt is empty"),
        (user(json!([])), 400, json!("messages"), "the prompt is empty"),
        (json!([]), 400, null.clone(), "the body is an array, expected is a JSON object"),
        (user(json!(5)), 400, json!("messages[0].content"), "a string or a list of parts"),
        (
            user(json!([{"type": "text", "text": 5}])),
            400,
            json!("messages[0].content[0].text"),
            "line 1 column",
        ),
        (with("model", json!("gpt-4o")), 404, json!("model"), "\"gpt-4o\" is not served; served are"),
        (with("temperature", json!(3)), 400, json!("temperature"), "temperature is 3, allowed is 0 to 2"),
        (with("temperature", json!("hot")), 400, json!("temperature"), "\"hot\", expected is a number"),
        (with("repetition_penalty", json!(1e-45)), 400, json!("repetition_penalty"), "allowed is 0.01 to 10"),
        (with("repetition_penalty", json!(1e39)), 400, json!("repetition_penalty"), "allowed is 0.01 to 10"),
        (with("stop", json!(vec!["a"; 160])), 400, json!("stop"), "stop is 160 strings, allowed is up to 16"),
        (with("n", json!(0)), 400, json!("n"), "n is 0, allowed is 1 to 16"),
        (with("n", json!(4_000_000_000u32)), 400, json!("n"), "allowed is 1 to 16"),
        (with("n", json!(-1)), 400, json!("n"), "n is -1, expected is an integer from 0"),
        (with("max_tokens", json!(0)), 400, json!("max_tokens"), "1 or more"),
        (with("stop", json!([""])), 400, json!("stop"), "an empty string"),
        (with("stop", json!(5)), 400, json!("stop"), "a string or a list of strings"),
        (with("seed", json!(1.5)), 400, json!("seed"), "64-bit integer"),
        (with("top_logprobs", json!(3)), 400, json!("top_logprobs"), "needs logprobs"),
        (with("tools", json!([{"type": "function"}])), 400, json!("tools[0].function"), "is missing"),
        (
            with("response_format", json!({"type": "xml"})),
            400,
            json!("response_format.type"),
            "allowed are text, json_object and json_schema",
        ),
        (user(json!([image("data:image/png;base64,")])), 400, at_url.clone(), "0 bytes"),
        (user(json!([image("data:image/png;base64,&&&&")])), 400, at_url.clone(), "not base64"),
        (user(json!([image(&large)])), 413, at_url.clone(), "150 bytes or more, the limit is 100"),
        (user(json!([image("not a url")])), 400, at_url.clone(), "cannot be read"),
        (user(json!([image("file:///etc/passwd")])), 400, at_url.clone(), "allowed are http and https"),
        (user(json!([image("data:,"), image("data:,"), image("data:,")])), 400, at_url.clone(), "not base64"),
        (
            user(json!(vec![image("http://a"); 3])),
            400,
            json!("items"),
            "the request has 3 items, the limit is 2",
        ),
        (
            json!({"model": "asr", "messages": [{"role": "user", "content": [image("http://a/")]}]}),
            400,
            at_url,
            "\"asr\" reads audio, the request has image",
        ),
    ];
    for (body, status, param, expect) in cases {
        let (found, answer) = cluster.proxy.post(PATH, &body).await;
        assert_eq!((found, &answer["error"]["param"]), (status, &param), "{body}: {answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(expect), "{body}: {answer}");
        let code = &answer["error"]["code"];
        assert!(code.is_null() || code.is_string());
    }
    assert!(cluster.encoder.jobs().is_empty() && cluster.pd.requests().is_empty());
    let (status, _) = cluster.proxy.post(PATH, &user(json!("still there?"))).await;
    assert_eq!(status, 200);
}

#[tokio::test]
async fn a_prompt_beyond_the_context_has_openais_code() {
    let cluster = Cluster::start().await;
    let too_long =
        Failure::new(FailureClass::TooLarge, "the prompt has 5000 tokens, the model's context holds 4096");
    let on_encoder =
        Failure::new(FailureClass::TooLarge, "the text has 5000 tokens, the limit is 512 tokens");
    let cases = [
        (PATH, user(json!("hi")), too_long.clone().with_param("prompt"), "messages"),
        ("/v1/completions", json!({"prompt": "hi", "model": "vl"}), too_long.with_param("prompt"), "prompt"),
        (PATH, user(json!("hi")), on_encoder.with_param("prompt"), "messages"),
    ];
    for (path, body, failure, param) in cases {
        cluster.pd.script([GenerateStep::Fail(to_status(&failure))]);
        let (status, answer) = cluster.proxy.post(path, &body).await;
        let error = &answer["error"];
        assert_eq!((status, &error["code"]), (400, &json!("context_length_exceeded")), "{answer}");
        assert_eq!((&error["param"], &error["type"]), (&json!(param), &json!("invalid_request_error")));
        assert_eq!(error["message"], failure.message);
    }
}

#[tokio::test]
async fn bodies_that_are_not_json() {
    let cluster = Cluster::with(|config| config.limits = small()).await;
    let deep = format!("{{\"messages\": {}", "[".repeat(10_000));
    let cases: [(&[u8], &str); 8] = [
        (b"", "the body is empty"),
        (b"{\"model\": \"vl\",\n \"messages\": oops}", "at line 2 column 14"),
        (b"{\"model\": \"\xff\"}", "invalid unicode code point"),
        (b"{\"model\": \"vl\"", "not valid JSON: it ends too early at line 1"),
        (b"{", "not valid JSON: it ends too early at line 1 column 1"),
        (b" [1]", "the body is an array, expected is a JSON object"),
        (b"{} {}", "goes on after its JSON"),
        (deep.as_bytes(), "is an array, expected is"),
    ];
    for (body, expect) in cases {
        let response = client().post(cluster.proxy.url(PATH)).body(body.to_vec()).send().await.unwrap();
        assert_eq!(response.status(), 400);
        let answer: Value = response.json().await.unwrap();
        assert!(answer["error"]["message"].as_str().unwrap().contains(expect), "{answer}");
    }
}

#[tokio::test]
async fn urls_of_internal_addresses_are_refused_in_every_notation() {
    let cluster = Cluster::start().await;
    for host in [
        "127.0.0.1",
        "2130706433",
        "0x7f000001",
        "0177.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "localhost",
        "169.254.169.254",
    ] {
        let (status, answer) =
            cluster.proxy.post(PATH, &user(json!([image(&format!("http://{host}:9/x"))]))).await;
        assert_eq!(status, 400, "{host}: {answer}");
        assert!(
            answer["error"]["message"].as_str().unwrap().contains("does not fetch from"),
            "{host}: {answer}"
        );
    }
}

#[tokio::test]
async fn unknown_routes_and_methods_are_refused() {
    let cluster = Cluster::start().await;
    let http = client();
    let cases = [
        (http.get(cluster.proxy.url("/v1/nothing")), 404, "there is no GET /v1/nothing"),
        (http.post(cluster.proxy.url("/v1/images/generations")), 404, "there is no POST"),
        (http.get(cluster.proxy.url(PATH)), 405, "GET is not allowed on /v1/chat/completions"),
        (http.delete(cluster.proxy.url("/v1/models")), 405, "DELETE is not allowed"),
        (http.get(cluster.proxy.url("/v1/models/no/such")), 404, "\"no/such\" is not served"),
    ];
    for (request, status, expect) in cases {
        let response = request.send().await.unwrap();
        assert_eq!(response.status().as_u16(), status);
        assert_eq!(response.headers().contains_key("allow"), status == 405);
        let answer: Value = response.json().await.unwrap();
        assert!(answer["error"]["message"].as_str().unwrap().contains(expect), "{answer}");
        assert_eq!(answer["error"]["type"], "invalid_request_error");
    }
}

/// A question about one image, with a change.
fn change(change: impl FnOnce(&mut v1::GenerateRequest)) -> v1::GenerateRequest {
    let mut request = question(&[IMAGE]);
    change(&mut request);
    request
}

fn chat(request: &mut v1::GenerateRequest) -> &mut v1::prompt::Chat {
    match request.prompt.as_mut().unwrap().kind.as_mut().unwrap() {
        v1::prompt::Kind::Chat(chat) => chat,
        other => panic!("{other:?}"),
    }
}

/// Checks that each request is refused with the field and the text; all but one as InvalidArgument.
async fn refused(cases: Vec<(v1::GenerateRequest, &str, &str)>) {
    let cluster = Cluster::with(|config| config.limits = small()).await;
    for (request, param, expect) in cases {
        let unknown_model = request.model == "x";
        let status = ask(&cluster.proxy, request).await.unwrap_err();
        let found = status.metadata().get("triptych-param").map(|v| v.to_str().unwrap().to_owned());
        let code = if unknown_model { Code::NotFound } else { Code::InvalidArgument };
        assert_eq!((status.code(), found.as_deref()), (code, Some(param)), "{status}");
        assert!(status.message().contains(expect), "{status}");
    }
    assert!(cluster.encoder.jobs().is_empty() && cluster.pd.requests().is_empty());
}

#[tokio::test]
async fn bad_items_over_grpc() {
    let text = v1::item::Source::Text("x".into());
    refused(vec![
        (change(|r| r.items[0].modality = 77), "items[0].modality", "is 77, which is not"),
        (change(|r| r.items[0].modality = 0), "items[0].modality", "is 0"),
        (change(|r| r.items[0].modality = 2), "items[0]", "reads image, the request has audio"),
        (change(|r| r.items[0].source = None), "items[0]", "no data, url, text or tokens"),
        (change(|r| r.items[0].source = Some(text)), "items[0]", "modality is image"),
        (change(|r| r.items.clear()), "messages[0].parts[0]", "names items[0], the request has 0"),
        (change(|r| r.items.push(r.items[0].clone())), "items[1]", "items[1] is not named"),
        (change(|r| r.items = vec![r.items[0].clone(); 9]), "items", "9 items, the limit is 2"),
        (question(&[&[0; 101]]), "items[0]", "101 bytes or more, the limit is 100"),
        (question(&[b""]), "items[0]", "0 bytes"),
    ])
    .await;
}

#[tokio::test]
async fn bad_prompts_and_settings_over_grpc() {
    let top_p = v1::Sampling { top_p: Some(2.0), ..Default::default() };
    let speech = v1::prompt::Kind::Speech(v1::SpeechTask { kind: 8, ..Default::default() });
    refused(vec![
        (change(|r| r.prompt = None), "prompt", "prompt is missing"),
        (change(|r| r.model = "x".into()), "model", "\"x\" is not served"),
        (change(|r| chat(r).messages[0].role = 9), "role", "role is 9, which is not a value of Role"),
        (change(|r| chat(r).messages[0].parts[0].kind = None), "part", "part is missing"),
        (change(|r| chat(r).messages.clear()), "messages", "messages is empty"),
        (change(|r| r.prompt.as_mut().unwrap().kind = Some(speech)), "speech.kind", "speech.kind is 8"),
        (change(|r| r.sampling = Some(top_p)), "top_p", "top_p is 2"),
    ])
    .await;
}

#[tokio::test]
async fn grpc_messages_that_cannot_be_decoded_are_the_clients_mistake() {
    let cluster = Cluster::with(|config| config.limits = small()).await;
    let status = ask(&cluster.proxy, question(&[&[0; 30_000]])).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("20000"), "{status}");

    // Field 1 is a string, and this is no UTF-8. A raw frame: the generated types cannot hold it.
    let message = [0x0a, 0x02, 0xff, 0xfe];
    let frame = [&[0, 0, 0, 0, message.len() as u8][..], &message].concat();
    let http = reqwest::Client::builder().no_proxy().http2_prior_knowledge().build().unwrap();
    let url = format!("http://{}/triptych.v1.Triptych/Generate", cluster.proxy.grpc);
    let request =
        http.post(url).header("content-type", "application/grpc").header("te", "trailers").body(frame);
    let response = request.send().await.unwrap();
    assert_eq!(response.headers()["grpc-status"], (Code::InvalidArgument as i32).to_string().as_str());
    assert!(response.headers()["grpc-message"].to_str().unwrap().contains("UTF-8"));

    let mut late = Request::new(question(&[]));
    late.metadata_mut().insert("grpc-timeout", "soon".parse().unwrap());
    let status = cluster.proxy.client().generate(late).await.unwrap_err();
    assert!(status.message().contains("grpc-timeout"), "{status}");
    assert!(ask(&cluster.proxy, question(&[])).await.is_ok());
}
