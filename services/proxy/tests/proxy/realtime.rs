//! `/v1/realtime`: a live transcription over a WebSocket, its events, its bounds and its end.

use crate::fakes::{GenerateStep, summary, text};
use crate::support::{Cluster, eventually};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::{SinkExt, StreamExt};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{WebSocketStream, client_async};
use triptych_core::{Failure, FailureClass};
use triptych_proto::v1;
use triptych_runtime::status::to_status;

const DELTA: &str = "conversation.item.input_audio_transcription.delta";
const COMPLETED: &str = "conversation.item.input_audio_transcription.completed";
const FAILED: &str = "conversation.item.input_audio_transcription.failed";

/// A client with an open session.
struct Client(WebSocketStream<TcpStream>);

impl Client {
    async fn try_connect(cluster: &Cluster, query: &str) -> Result<Self, Error> {
        let stream = TcpStream::connect(cluster.proxy.http).await.unwrap();
        let url = format!("ws://{}/v1/realtime{query}", cluster.proxy.http);
        let request = url.into_client_request().unwrap();
        Ok(Self(client_async(request, stream).await?.0))
    }

    async fn connect(cluster: &Cluster) -> Self {
        let mut client = Self::try_connect(cluster, "?intent=transcription&model=asr").await.unwrap();
        let created = client.next().await;
        assert_eq!(
            (&created["type"], &created["session"]["type"]),
            (&json!("session.created"), &json!("transcription"))
        );
        client
    }

    async fn send(&mut self, event: Value) {
        self.0.send(Message::text(event.to_string())).await.unwrap();
    }

    /// Sends seconds of silence.
    async fn append(&mut self, seconds: f64) {
        let audio = vec![0; (seconds * 48_000.0) as usize];
        self.send(json!({"type": "input_audio_buffer.append", "audio": STANDARD.encode(audio)})).await;
    }

    async fn commit(&mut self) {
        self.send(json!({"type": "input_audio_buffer.commit"})).await;
    }

    /// The next event.
    async fn next(&mut self) -> Value {
        loop {
            match self.0.next().await.expect("the session is open").unwrap() {
                Message::Text(text) => return serde_json::from_str(&text).unwrap(),
                Message::Ping(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// The events up to one of this type.
    async fn until(&mut self, kind: &str) -> Vec<Value> {
        let mut events = Vec::new();
        loop {
            let event = tokio::time::timeout(Duration::from_secs(60), self.next()).await;
            let event = event.unwrap_or_else(|_| panic!("no {kind} behind {events:?}"));
            let is_last = event["type"] == kind;
            events.push(event);
            if is_last {
                return events;
            }
        }
    }
}

fn says(transcript: &str) -> GenerateStep {
    GenerateStep::Send(vec![text(transcript), summary(v1::Summary::default())])
}

/// Waits for this many transcriptions.
async fn asked(cluster: &Cluster, n: usize) {
    eventually("a transcription is asked for", async || cluster.pd.requests().len() >= n).await;
}

#[tokio::test]
async fn text_goes_out_when_two_transcripts_agree_and_the_rest_at_the_commit() {
    let cluster = Cluster::start().await;
    cluster.pd.script([says(" one two"), says(" one two three"), says(" one two three four.")]);
    let mut client = Client::connect(&cluster).await;
    let transcription = json!({"language": "en", "prompt": "Numbers"});
    let input = json!({"format": {"type": "audio/pcm", "rate": 24_000}, "transcription": transcription});
    client.send(json!({"type": "session.update", "session": {"type": "transcription", "audio": {"input": input}}})).await;
    let updated = client.next().await;
    assert_eq!(updated["session"]["audio"]["input"]["transcription"]["language"], "en", "{updated}");
    client.append(1.0).await;
    asked(&cluster, 1).await;
    client.append(1.0).await;
    let events = client.until(DELTA).await;
    assert_eq!(events.last().unwrap()["delta"], "one two");
    client.append(0.2).await;
    client.commit().await;
    let events = client.until(COMPLETED).await;
    let kinds: Vec<&str> = events.iter().filter_map(|event| event["type"].as_str()).collect();
    assert_eq!(kinds, ["input_audio_buffer.committed", "conversation.item.added", DELTA, COMPLETED]);
    assert_eq!(events[2]["delta"], " three four.");
    let completed = &events[3];
    assert_eq!(completed["transcript"], "one two three four.");
    assert_eq!(completed["usage"], json!({"type": "duration", "seconds": 2.2}));
    assert!(
        events
            .iter()
            .all(|event| event["item_id"] == events[0]["item_id"]
                || event["item"]["id"] == events[0]["item_id"])
    );
    let request = cluster.pd.requests().pop().unwrap();
    let Some(v1::prompt::Kind::Speech(task)) = request.prompt.unwrap().kind else { panic!() };
    assert_eq!(
        (task.language.as_deref(), task.prompt.as_deref(), task.timestamps),
        (Some("en"), Some("Numbers"), true)
    );
    // The next item follows it.
    client.append(0.5).await;
    client.commit().await;
    let committed = client.until("input_audio_buffer.committed").await.pop().unwrap();
    assert_eq!(committed["previous_item_id"], events[0]["item_id"]);
    assert_eq!(client.until(COMPLETED).await.pop().unwrap()["transcript"], "hello world");
}

#[tokio::test]
async fn a_mistake_is_an_event_and_the_session_goes_on() {
    let cluster = Cluster::start().await;
    let mut client = Client::connect(&cluster).await;
    for (event, expect) in [
        (json!({"type": "response.create", "event_id": "e1"}), json!({"event_id": "e1", "code": null})),
        (json!({"type": "input_audio_buffer.append", "audio": "*"}), json!({"param": "audio"})),
        (json!({"type": "input_audio_buffer.append", "audio": "AA=="}), json!({"param": "audio"})),
        (
            json!({"type": "input_audio_buffer.commit"}),
            json!({"code": "input_audio_buffer_commit_empty", "param": null}),
        ),
        (
            json!({"type": "session.update", "session": {"type": "realtime"}}),
            json!({"param": "session.type", "type": "invalid_request_error"}),
        ),
    ] {
        client.send(event.clone()).await;
        let answer = client.next().await;
        assert_eq!(answer["type"], "error", "{answer}");
        for (field, value) in expect.as_object().unwrap() {
            assert_eq!(&answer["error"][field], value, "{event}: {answer}");
        }
    }
    client.append(0.5).await;
    client.send(json!({"type": "input_audio_buffer.clear"})).await;
    assert_eq!(client.next().await["type"], "input_audio_buffer.cleared");
    client.commit().await;
    assert_eq!(client.next().await["error"]["code"], "input_audio_buffer_commit_empty");
    client.append(0.5).await;
    client.commit().await;
    assert_eq!(client.until(COMPLETED).await.pop().unwrap()["transcript"], "hello world");
}

#[tokio::test]
async fn what_a_model_refuses_of_the_extras_is_left_out_and_what_stays_refused_fails_the_item() {
    let cluster = Cluster::start().await;
    let refused = || GenerateStep::Fail(to_status(&Failure::invalid("this model has no prompts")));
    cluster.pd.script([refused(), refused(), says(" so")]);
    let mut client = Client::connect(&cluster).await;
    client.append(0.5).await;
    client.commit().await;
    assert_eq!(client.until(COMPLETED).await.pop().unwrap()["transcript"], "so");
    let times = cluster.pd.requests().into_iter().map(|request| match request.prompt.unwrap().kind {
        Some(v1::prompt::Kind::Speech(task)) => (task.timestamps, task.fallback.is_some()),
        other => panic!("{other:?}"),
    });
    assert_eq!(times.collect::<Vec<_>>(), [(true, true), (true, true), (false, false)]);
    cluster.pd.script([refused()]);
    client.append(0.5).await;
    client.commit().await;
    let failed = client.until(FAILED).await.pop().unwrap();
    assert_eq!(failed["error"]["type"], "invalid_request_error", "{failed}");
    // An overloaded worker is asked again.
    cluster.pd.script([
        GenerateStep::Fail(to_status(&Failure::new(FailureClass::Overloaded, "later"))),
        says(" at last"),
    ]);
    client.append(0.5).await;
    client.commit().await;
    assert_eq!(client.until(COMPLETED).await.pop().unwrap()["transcript"], "at last");
}

#[tokio::test]
async fn sessions_of_a_tenant_and_their_time_are_bounded() {
    let cluster = Cluster::with(|config| {
        config.sessions.per_tenant = 1;
        config.sessions.longest = Duration::from_secs(3);
    })
    .await;
    let mut first = Client::connect(&cluster).await;
    let refused = Client::try_connect(&cluster, "").await.err().expect("there is one");
    let Error::Http(response) = refused else { panic!("{refused}") };
    assert_eq!(response.status().as_u16(), 429);
    let expired = first.until("error").await.pop().unwrap();
    assert_eq!(expired["error"]["type"], "timeout_error", "{expired}");
    assert!(matches!(first.0.next().await, Some(Ok(Message::Close(Some(_))))));
    drop(first);
    eventually("the place is free", async || Client::try_connect(&cluster, "").await.is_ok()).await;
    let (status, body) = cluster.proxy.get("/v1/realtime").await;
    assert_eq!(status, 426, "{body}");
    let other = Client::try_connect(&cluster, "?intent=conversation").await.err().expect("it is refused");
    assert!(matches!(other, Error::Http(response) if response.status() == 400));
}

#[tokio::test]
async fn a_socket_that_is_dropped_frees_what_it_held() {
    let cluster = Cluster::with(|config| config.sessions.per_tenant = 1).await;
    cluster.pd.script([GenerateStep::SendThenHold(vec![text(" one")])]);
    let mut client = Client::connect(&cluster).await;
    client.append(1.0).await;
    asked(&cluster, 1).await;
    let running = "triptych_requests_running{}";
    assert_eq!(cluster.proxy.metric(running).await, 1.0);
    drop(client);
    eventually("nothing runs", async || cluster.proxy.metric(running).await == 0.0).await;
    Client::connect(&cluster).await;
}

#[tokio::test]
async fn a_session_ends_with_its_server() {
    let cluster = Cluster::start().await;
    let mut client = Client::connect(&cluster).await;
    cluster.proxy.drain.begin();
    let error = client.until("error").await.pop().unwrap();
    assert_eq!(error["error"]["type"], "server_error", "{error}");
    assert!(matches!(client.0.next().await, Some(Ok(Message::Close(Some(_))))));
}
