//! Servers that misbehave: a request ends once, with the right text or a typed error.

use crate::cluster::{CHAT, Proxy, eventually};
use crate::fake::{MODEL, Step, Vllm, event, piece, role, usage};
use serde_json::{Value, json};

fn ask() -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})
}

fn error(code: u16, message: &str) -> Value {
    json!({"error": {"message": message, "type": "InternalServerError", "param": null, "code": code}})
}

/// Each of these is a failure of the server before its first token, so the request is sent again.
#[tokio::test]
async fn a_failure_before_the_first_token_is_tried_again() {
    let vllm = Vllm::start().await;
    let proxy = Proxy::start(Vec::new(), vec![vllm.setting("")]).await;
    let steps = [
        ("a 500", Step::Status(500, error(500, "boom").to_string())),
        ("a page", Step::Status(502, "<html>".into())),
        ("cut at once", Step::Cut(Vec::new())),
        ("cut after the role", Step::Cut(vec![role()])),
        (
            "an error in the stream",
            Step::Stream(vec![role(), event(&error(500, "boom")), "data: [DONE]\n\n".into()]),
        ),
        ("no JSON", Step::Stream(vec!["data: {\n\n".into()])),
        ("another JSON", Step::Stream(vec!["data: [1, 2]\n\n".into()])),
        ("an endless line", Step::Stream(vec!["data: ".into(), "x".repeat(5 << 20)])),
        ("an end without an answer", Step::Stream(vec!["data: [DONE]\n\n".into()])),
        ("a stream without end", Step::Stream(vec![role()])),
    ];
    for (what, step) in steps {
        let n = vllm.asked().len();
        vllm.script([step]);
        assert_eq!(proxy.chat(&ask()).await, (200, "Hello".to_owned()), "{what}");
        assert_eq!(vllm.asked().len(), n + 2, "{what}");
    }
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_not_begun_again() {
    let (one, other) = (Vllm::start().await, Vllm::start().await);
    let proxy = Proxy::start(Vec::new(), vec![one.setting(""), other.setting("")]).await;
    let cut = || Step::Cut(vec![role(), piece("Hel", 7, None)]);
    one.script([cut()]);
    other.script([cut()]);
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": true});
    let response = proxy.client.post(proxy.url(CHAT)).json(&body).send().await.unwrap();
    let text = response.text().await.unwrap();
    assert!(text.contains("\"Hel\"") && text.contains("\"error\"") && !text.contains("\"lo\""), "{text}");
    assert_eq!(one.asked().len() + other.asked().len(), 1);
}

#[tokio::test]
async fn mistakes_of_a_request_come_back_to_its_client() {
    let vllm = Vllm::start().await;
    let proxy = Proxy::start(Vec::new(), vec![vllm.setting("")]).await;
    let of = |message: &str, param: &str| {
        json!({"error": {"message": message, "type": "BadRequestError", "param": param, "code": 400}})
            .to_string()
    };
    for (code, body, expect, says) in [
        (400, of("top_p must be in (0, 1]", "top_p"), 400, "top_p must be in"),
        (
            400,
            of("This model's maximum context length is 512 tokens.", "input_tokens"),
            400,
            "maximum context length",
        ),
        (413, "too much".to_owned(), 413, "too much"),
    ] {
        vllm.script([Step::Status(code, body)]);
        let (status, text) = proxy.chat(&ask()).await;
        assert_eq!(status, expect, "{text}");
        assert!(text.contains(says), "{text}");
    }
    assert_eq!(vllm.asked().len(), 3, "none was sent again");
    let choice = json!({"choices": [{"index": 7, "delta": {"content": "x"}, "finish_reason": "stop"}]});
    vllm.script([Step::Stream(vec![event(&choice), usage(1, 1)])]);
    assert_eq!(proxy.chat(&ask()).await.0, 500, "an answer that nobody asked for");
}

#[tokio::test]
async fn a_client_that_goes_away_ends_its_request_at_the_server() {
    let vllm = Vllm::start().await;
    let proxy = Proxy::start(Vec::new(), vec![vllm.setting("")]).await;
    vllm.script([Step::Hold(vec![role(), piece("Hel", 7, None)]), Step::Hold(Vec::new())]);
    for n in 1..=2 {
        let mut body = ask();
        body["stream"] = true.into();
        let request = tokio::spawn(proxy.client.post(proxy.url(CHAT)).json(&body).send());
        eventually("it is asked", async || vllm.asked().len() == n).await;
        if n == 1 {
            // The answer has begun; its reader goes away.
            drop(request.await.unwrap().unwrap());
        } else {
            request.abort();
        }
        eventually("the server saw it", async || vllm.n_dropped() == n).await;
    }
}

#[tokio::test]
async fn a_server_that_dies_gets_nothing_and_is_found_again_by_its_answers() {
    let (one, other) = (Vllm::start().await, Vllm::start().await);
    let proxy = Proxy::start(Vec::new(), vec![one.setting(""), other.setting("")]).await;
    one.kill();
    for _ in 0..8 {
        assert_eq!(proxy.chat(&ask()).await, (200, "Hello".to_owned()));
    }
    other.lose_engine();
    eventually("nobody serves", async || proxy.status("/readyz").await != 200).await;
}
