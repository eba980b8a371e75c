//! A session: events of the client in their order, and one transcription at a time beside them.
//!
//! Audio that waits is bounded: while there is too much, the socket is not read, and the client's sends wait. The session ends
//! with the socket, after its longest time, when the client is silent for long, and with the server; whatever it holds is
//! dropped with it.

use super::super::api::{AdmittedCall, HttpApi};
use super::events::{ClientEvent, EMPTY_COMMIT, Received, ServerEvent};
use super::item::LiveItem;
use super::settings::SessionSettings;
use super::transcript::{Extras, PartToHear, Transcriber, Transcript};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::future::{BoxFuture, OptionFuture};
use futures::{FutureExt, SinkExt, StreamExt};
use serde_json::json;
use std::collections::VecDeque;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Message};
use triptych_core::{Failure, FailureClass, ModelName};
use triptych_runtime::listener::ServerStream;

/// Seconds of audio that may wait before the socket is not read.
const MAX_HELD_S: f64 = 60.0;
/// Committed items that may wait before the socket is not read.
const MAX_ITEMS: usize = 16;
/// Time without a message, also none that answers a ping, after which a client is gone.
const IDLE: Duration = Duration::from_secs(90);
/// Time between two pings.
const PING: Duration = Duration::from_secs(30);
/// Longest wait for a client that does not read.
const SEND: Duration = Duration::from_secs(10);
/// Attempts at a part while the cluster is overloaded or away.
const MAX_ATTEMPTS: u32 = 6;
/// Pause before the next attempt where no other is asked for.
const PAUSE: Duration = Duration::from_millis(500);

type Socket = WebSocketStream<ServerStream>;
type Hearing = BoxFuture<'static, Result<Transcript, Failure>>;

/// A session.
pub(super) struct Session {
    api: HttpApi,
    transcriber: Transcriber,
    id: String,
    expires: Instant,
    settings: SessionSettings,
    extras: Extras,
    /// Items in their order; the last one may be open, all before it are committed.
    items: VecDeque<LiveItem>,
    /// The item that was committed last.
    previous: Option<String>,
    n_items: u64,
    n_events: u64,
    /// Samples of the part that is being transcribed; 0: none.
    n_hearing: usize,
    n_attempts: u32,
    /// Time before which no part is tried again.
    not_before: Instant,
}

/// The end of a session.
enum End {
    /// The client ended it, or is gone.
    Gone,
    /// The server ends it, and says why.
    Closed(Failure),
}

impl From<Failure> for End {
    fn from(failure: Failure) -> Self {
        Self::Closed(failure)
    }
}

impl Session {
    /// An admitted session without audio.
    pub(super) fn new(api: HttpApi, call: AdmittedCall, model: Option<ModelName>) -> Self {
        let transcriber = Transcriber {
            orchestrator: api.orchestrator.clone(),
            permit: call.permit,
            caller: call.caller,
            max_time: api.limits.max_request_time,
        };
        Self {
            transcriber,
            id: call.id.to_string().replacen("req-", "sess_", 1),
            expires: call.arrived + api.sessions.longest,
            settings: SessionSettings { model, ..SessionSettings::default() },
            extras: Extras::TimesAndContext,
            items: VecDeque::new(),
            previous: None,
            n_items: 0,
            n_events: 0,
            n_hearing: 0,
            n_attempts: 0,
            not_before: call.arrived,
            api,
        }
    }

    /// Serves a socket to its end.
    pub(super) async fn run(mut self, mut socket: Socket) {
        let end = self.serve(&mut socket).await;
        let Err(End::Closed(failure)) = end else { return };
        let _ = self.send(&mut socket, &ServerEvent::error(&failure, None)).await;
        let code = match failure.class {
            FailureClass::Unavailable => CloseCode::Away,
            FailureClass::TooLarge => CloseCode::Size,
            _ => CloseCode::Policy,
        };
        let frame = CloseFrame { code, reason: failure.class.as_str().into() };
        let _ = timeout(SEND, socket.close(Some(frame))).await;
    }

    async fn serve(&mut self, socket: &mut Socket) -> Result<(), End> {
        let created = ServerEvent::Created { session: self.object() };
        self.send(socket, &created).await?;
        let drain = self.api.orchestrator.drain.clone();
        let (mut closing, abort) = (Box::pin(drain.closing()), drain.abort_token());
        let (mut heard_of, mut pinged) = (Instant::now(), Instant::now());
        let mut hearing: Option<Hearing> = None;
        loop {
            if hearing.is_none() {
                while self.items.front().is_some_and(LiveItem::is_done) {
                    self.complete(socket).await?;
                }
                hearing = self.next_part();
            }
            let is_full = self.is_full();
            if is_full {
                // A socket that is not read answers nothing.
                heard_of = Instant::now();
            }
            let retry = hearing.is_none().then_some(self.not_before).filter(|at| *at > Instant::now());
            tokio::select! {
                message = socket.next(), if !is_full => {
                    heard_of = Instant::now();
                    self.receive(socket, message, &mut hearing).await?;
                }
                Some(outcome) = OptionFuture::from(hearing.as_mut()) => {
                    hearing = None;
                    self.settle(socket, outcome).await?;
                }
                Some(()) = OptionFuture::from(retry.map(sleep_until)) => {}
                () = sleep_until(self.expires) => return Err(expired(self.api.sessions.longest).into()),
                () = sleep_until(pinged + PING) => {
                    pinged = Instant::now();
                    if heard_of.elapsed() > IDLE {
                        return Err(End::Gone);
                    }
                    put(socket, Message::Ping(Default::default())).await?;
                }
                () = &mut closing => return Err(Failure::unavailable("the server is stopping").into()),
                () = abort.cancelled() => return Err(End::Gone),
            }
        }
    }

    /// True if as much waits as may.
    fn is_full(&self) -> bool {
        let held: f64 = self.items.iter().map(LiveItem::held_s).sum();
        held >= MAX_HELD_S || self.items.len() > MAX_ITEMS
    }

    /// The transcription that is due, begun.
    fn next_part(&mut self) -> Option<Hearing> {
        let n = self.items.front()?.next_part().filter(|_| self.not_before <= Instant::now())?;
        let item = self.items.front()?;
        let part = PartToHear {
            file: item.part(n),
            settings: self.settings.clone(),
            extras: self.extras,
            context: item.context().to_owned(),
        };
        self.n_hearing = n;
        Some(self.transcriber.clone().hear(part).boxed())
    }

    async fn receive(
        &mut self,
        socket: &mut Socket,
        message: Option<Result<Message, tokio_tungstenite::tungstenite::Error>>,
        hearing: &mut Option<Hearing>,
    ) -> Result<(), End> {
        let text = match message {
            Some(Ok(Message::Text(text))) => text,
            Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => return Ok(()),
            Some(Ok(Message::Binary(_))) => {
                let failure = Failure::invalid("a message is binary, events are JSON texts");
                return self.send(socket, &ServerEvent::error(&failure, None)).await;
            }
            Some(Err(tokio_tungstenite::tungstenite::Error::Capacity(e))) => {
                return Err(
                    Failure::new(FailureClass::TooLarge, format!("a message is too long: {e}")).into()
                );
            }
            None | Some(Ok(Message::Close(_)) | Err(_)) => return Err(End::Gone),
        };
        let Received { event, id } = Received::read(&text);
        let answers = match event {
            Ok(ClientEvent::Clear) => {
                if self.items.back().is_some_and(|item| !item.is_committed) {
                    if self.items.len() == 1 {
                        *hearing = None;
                    }
                    self.items.pop_back();
                }
                Ok(vec![ServerEvent::Cleared])
            }
            Ok(event) => self.apply(event),
            Err(failure) => Err(failure),
        };
        match answers {
            Ok(answers) => {
                for answer in &answers {
                    self.send(socket, answer).await?;
                }
                Ok(())
            }
            Err(failure) => self.send(socket, &ServerEvent::error(&failure, id)).await,
        }
    }

    /// Applies an event; returns those that answer it.
    fn apply(&mut self, event: ClientEvent) -> Result<Vec<ServerEvent>, Failure> {
        match event {
            ClientEvent::Update { session } => {
                let has_audio = self.items.back().is_some_and(|item| !item.is_committed);
                self.settings = self.settings.updated(&session, has_audio)?;
                self.extras = Extras::TimesAndContext;
                Ok(vec![ServerEvent::Updated { session: self.object() }])
            }
            ClientEvent::Append { audio } => {
                let refused =
                    |e| Failure::invalid(format!("the audio is not base64: {e}")).with_param("audio");
                let bytes = STANDARD.decode(audio).map_err(refused)?;
                let samples = self.settings.format.samples(&bytes).map_err(|f| f.with_param("audio"))?;
                self.open_item().push(&samples);
                Ok(Vec::new())
            }
            ClientEvent::Commit => self.commit(),
            ClientEvent::Clear => Ok(vec![ServerEvent::Cleared]),
        }
    }

    /// The item that audio is added to.
    fn open_item(&mut self) -> &mut LiveItem {
        if self.items.back().is_none_or(|item| item.is_committed) {
            self.n_items += 1;
            let id = format!("item_{}_{}", self.id.trim_start_matches("sess_"), self.n_items);
            self.items.push_back(LiveItem::new(id, self.settings.format.rate()));
        }
        let last = self.items.len() - 1;
        &mut self.items[last]
    }

    fn commit(&mut self) -> Result<Vec<ServerEvent>, Failure> {
        let open = self.items.back_mut().filter(|item| !item.is_committed && !item.is_too_short());
        let Some(item) = open else {
            let message = "the buffer has less than 100 ms of audio, which is no item";
            return Err(Failure::invalid(message).with_param(EMPTY_COMMIT));
        };
        item.is_committed = true;
        let item_id = item.id.clone();
        let previous_item_id = self.previous.replace(item_id.clone());
        let added = ServerEvent::added(&item_id, previous_item_id.clone());
        Ok(vec![ServerEvent::Committed { item_id, previous_item_id }, added])
    }

    /// Takes the outcome of the transcription of the first item.
    async fn settle(&mut self, socket: &mut Socket, outcome: Result<Transcript, Failure>) -> Result<(), End> {
        let n = std::mem::take(&mut self.n_hearing);
        let transcript = match outcome {
            Ok(transcript) => transcript,
            Err(failure) => return self.failed(socket, failure).await,
        };
        self.n_attempts = 0;
        let Some(item) = self.items.front_mut() else { return Ok(()) };
        let progress = item.heard(n, &transcript);
        let item_id = item.id.clone();
        if !progress.delta.is_empty() {
            let delta =
                ServerEvent::Delta { item_id: item_id.clone(), content_index: 0, delta: progress.delta };
            self.send(socket, &delta).await?;
        }
        if progress.is_complete { self.complete(socket).await } else { Ok(()) }
    }

    /// Tells the end of the first item.
    async fn complete(&mut self, socket: &mut Socket) -> Result<(), End> {
        let Some(item) = self.items.pop_front() else { return Ok(()) };
        let usage = json!({"type": "duration", "seconds": item.duration_s()});
        let (item_id, transcript) = (item.id.clone(), item.text().to_owned());
        self.send(socket, &ServerEvent::Completed { item_id, content_index: 0, transcript, usage }).await
    }

    /// Tries a part again, with less if the model refuses what the session adds; or gives the item up.
    async fn failed(&mut self, socket: &mut Socket, failure: Failure) -> Result<(), End> {
        if let Some(extras) = self.extras.after(&failure) {
            self.extras = extras;
            return Ok(());
        }
        let may_pass = matches!(
            failure.class,
            FailureClass::Overloaded | FailureClass::Unavailable | FailureClass::DeadlineExceeded
        );
        self.n_attempts += 1;
        if may_pass && self.n_attempts < MAX_ATTEMPTS {
            self.not_before = Instant::now() + failure.retry_after.unwrap_or(PAUSE);
            return Ok(());
        }
        self.n_attempts = 0;
        // A mistake in the settings is told with what the client had set.
        self.extras = Extras::TimesAndContext;
        let Some(item) = self.items.pop_front() else { return Ok(()) };
        self.send(socket, &ServerEvent::failed(item.id, &failure)).await
    }

    fn object(&self) -> serde_json::Value {
        let left = self.expires.saturating_duration_since(Instant::now());
        let at = (SystemTime::now() + left).duration_since(UNIX_EPOCH).unwrap_or_default();
        self.settings.object(&self.id, at.as_secs())
    }

    async fn send(&mut self, socket: &mut Socket, event: &ServerEvent) -> Result<(), End> {
        let text = event.text(self.n_events);
        self.n_events += 1;
        put(socket, Message::text(text)).await
    }
}

/// Sends a message; one that the client does not take ends the session.
async fn put(socket: &mut Socket, message: Message) -> Result<(), End> {
    match timeout(SEND, socket.send(message)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) | Err(_) => Err(End::Gone),
    }
}

fn expired(longest: Duration) -> Failure {
    let message = format!("the session has lasted {} s, its longest time: connect again", longest.as_secs());
    Failure::new(FailureClass::DeadlineExceeded, message)
}
