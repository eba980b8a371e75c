//! A stream with exact times under a paused clock, and a server that answers in every way over real sockets.

use super::*;
use crate::media::Media;
use crate::prompt::Wording;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::routing::{get, post};
use parking_lot::Mutex;
use std::sync::Arc;

fn content() -> ContentSource {
    ContentSource { media: Media::new(1), wording: Wording::DIGITS, seed: 1 }
}

fn offered(text_tokens: u32, output_tokens: u32, shapes: &[ItemShape]) -> Offered {
    let items =
        shapes.iter().zip(0..).map(|(shape, content)| crate::offered::OfferedItem { content, shape: *shape });
    let at = Duration::ZERO;
    Offered {
        index: 0,
        at,
        text_tokens,
        output_tokens,
        items: items.collect(),
        session: None,
        blocks: None,
        slo: None,
    }
}

fn chunk(text: &str) -> String {
    format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{text}\"}}}}]}}\n\n")
}

const END: &str =
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":4}}\n\ndata: [DONE]\n\n";

#[tokio::test(start_paused = true)]
async fn tokens_have_the_times_of_their_pieces() {
    let clock = Clock::started();
    let script = [(120, chunk("a")), (30, chunk("b") + &chunk("c")), (50, chunk("d")), (7, END.to_owned())];
    let stream = futures::stream::iter(script).then(|(pause, text)| async move {
        tokio::time::sleep(Duration::from_millis(pause)).await;
        Ok(Bytes::from(text))
    });
    let reply = read(stream, Some(4), clock).await;
    let millis: Vec<u128> = reply.tokens.iter().map(Duration::as_millis).collect();
    assert_eq!((millis, reply.ended.as_millis()), (vec![120, 150, 150, 200], 207));
    assert_eq!((reply.end, reply.prompt_tokens), (End::Whole, Some(9)));
}

#[tokio::test]
async fn how_a_stream_ends_is_how_its_request_ends() {
    let check = async |parts: Vec<Result<&str, &str>>, asked: Option<u32>, expect: End| {
        let parts = parts.into_iter().map(|p| p.map(|t| Bytes::from(t.to_owned())).map_err(str::to_owned));
        let reply = read(futures::stream::iter(parts), asked, Clock::started()).await;
        assert_eq!(reply.end, expect);
    };
    let one = chunk("a");
    let end = "data: [DONE]\n\n";
    check(vec![Ok(&one), Ok(end)], Some(1), End::Whole).await;
    check(vec![Ok(&one), Ok(end)], Some(2), End::Short).await;
    check(vec![Ok(&one), Ok(end)], None, End::Whole).await;
    check(vec![Ok(end)], None, End::Short).await;
    check(vec![Ok(&one)], Some(1), End::Failed("the stream ended without an end".into())).await;
    check(vec![Ok(&one), Err("reset")], Some(1), End::Failed("reset".into())).await;
    let error = "data: {\"error\":{\"message\":\"gone\"}}\n\n";
    check(vec![Ok(&one), Ok(error)], Some(1), End::Failed("gone".into())).await;
}

/// Triptych's fields, vLLM's, and an entry that is none.
const MODELS: &str = r#"{"object": "list", "data": [
    {"id": "ears", "object": "model", "modalities": ["audio"]},
    {"id": "vl", "object": "model", "owned_by": "vllm"}, 7,
    {"id": "eyes", "object": "model", "modalities": ["image", "smell"]}]}"#;

type Seen = Arc<Mutex<Vec<(String, Vec<u8>)>>>;

/// Answers by what the model is called; keeps the bodies.
async fn serve() -> (String, Seen) {
    async fn answer(
        State(seen): State<Seen>,
        headers: axum::http::HeaderMap,
        body: Bytes,
    ) -> axum::response::Response {
        let text = String::from_utf8_lossy(&body).into_owned();
        let kind = headers.get("content-type").and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned();
        seen.lock().push((kind, body.to_vec()));
        if text.contains("busy") {
            (StatusCode::TOO_MANY_REQUESTS, "").into_response()
        } else if text.contains("closed") {
            StatusCode::SERVICE_UNAVAILABLE.into_response()
        } else if text.contains("picky") {
            (StatusCode::BAD_REQUEST, "{\"error\":{\"message\":\"no such model\"}}").into_response()
        } else {
            (chunk("a") + &chunk("b") + &chunk("c") + &chunk("d") + END).into_response()
        }
    }
    triptych_runtime::tls::install_provider();
    let seen = Seen::default();
    let app = axum::Router::new()
        .route("/v1/models", get(|| async { MODELS }))
        .route("/v1/chat/completions", post(answer))
        .route("/v1/completions", post(answer))
        .route("/v1/audio/transcriptions", post(answer))
        .with_state(seen.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move { axum::serve(listener, app).await });
    (format!("http://{address}/v1/"), seen)
}

async fn ask(base: &str, endpoint: Endpoint, model: &str, offered: &Offered) -> Reply {
    let target = HttpTarget::new(base, endpoint, model.to_owned(), Some("key".into())).expect("a URL");
    target.prepare(offered, &content())(Clock::started()).await
}

#[tokio::test]
async fn statuses_are_told_apart() {
    let (base, _) = serve().await;
    let end = async |model: &str| ask(&base, Endpoint::Chat, model, &offered(4, 4, &[])).await.end;
    assert_eq!(end("good").await, End::Whole);
    assert_eq!(end("busy").await, End::Refused);
    assert_eq!(end("closed").await, End::Refused);
    assert_eq!(end("picky").await, End::Failed("400: no such model".into()));
    let nobody = ask("http://127.0.0.1:1", Endpoint::Chat, "good", &offered(4, 4, &[])).await;
    assert!(matches!(nobody.end, End::Failed(text) if text.starts_with("cannot connect")));
    assert!(HttpTarget::new("http://[", Endpoint::Chat, String::new(), None).is_err());
}

#[tokio::test]
async fn models_are_listed_with_what_they_take() {
    let (base, _) = serve().await;
    let target = HttpTarget::new(&base, Endpoint::Chat, String::new(), None).expect("a URL");
    let listed = target.models().await.expect("a list");
    let model = |name: &str, takes: Option<Modality>| ListedModel {
        name: name.into(),
        modalities: takes.map(|modality| [modality].into()),
    };
    let expect =
        [model("ears", Some(Modality::Audio)), model("vl", None), model("eyes", Some(Modality::Image))];
    assert_eq!(listed, expect);
}

#[tokio::test]
async fn bodies_are_what_openais_clients_send() {
    let (base, seen) = serve().await;
    let image = ItemShape::Image { width: 8, height: 8 };
    let audio = ItemShape::Audio { millis: 100 };
    ask(&base, Endpoint::Chat, "m", &offered(20, 4, &[image, audio])).await;
    ask(&base, Endpoint::Completions, "m", &offered(20, 4, &[])).await;
    ask(&base, Endpoint::Transcriptions, "m", &offered(0, 4, &[audio])).await;
    let seen = seen.lock().clone();
    let chat: serde_json::Value = serde_json::from_slice(&seen[0].1).expect("JSON");
    assert_eq!(
        (chat["stream"].as_bool(), chat["max_tokens"].as_u64(), chat["ignore_eos"].as_bool()),
        (Some(true), Some(4), Some(true))
    );
    assert_eq!(chat["stream_options"]["include_usage"], true);
    let parts = chat["messages"][0]["content"].as_array().expect("parts");
    assert!(parts[0]["image_url"]["url"].as_str().expect("a URL").starts_with("data:image/png;base64,iVBOR"));
    assert_eq!(parts[1]["input_audio"]["format"], "wav");
    assert_eq!(parts[2]["text"].as_str().map(str::len), Some(20));
    let completion: serde_json::Value = serde_json::from_slice(&seen[1].1).expect("JSON");
    assert_eq!(completion["prompt"].as_str().map(str::len), Some(20));
    assert!(seen[2].0.starts_with("multipart/form-data; boundary="));
    let form = String::from_utf8_lossy(&seen[2].1).into_owned();
    assert!(form.contains("name=\"model\"\r\n\r\nm\r\n") && form.contains("RIFF"), "{form}");
}
