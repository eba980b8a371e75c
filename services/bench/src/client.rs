//! Clients: a request is prepared ahead of its time, then sent, and its response is read to the end.
//!
//! [`grpc`] speaks `triptych.v1.Triptych`, [`http`] any OpenAI-compatible server; [`models`] chooses the model. None retries: what the first try
//! came to is what is judged.

pub mod grpc;
pub mod http;
pub mod models;
mod body;
mod sse;
mod tokens;

use crate::media::Media;
use crate::offered::Offered;
use crate::outcome::End;
use crate::prompt::{Alphabet, Probe, Wording};
use crate::result::ItemSources;
use std::pin::Pin;
use std::time::Duration;
use tokio::time::Instant;

/// Time since the start of a run.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// Time of the start.
    pub start: Instant,
}

impl Clock {
    /// Started at this moment.
    pub fn started() -> Self {
        Self { start: Instant::now() }
    }

    /// Time since the start.
    pub fn now(&self) -> Duration {
        self.start.elapsed()
    }
}

/// Sources of prompts and items.
#[derive(Clone, Debug)]
pub struct ContentSource {
    /// Source of items.
    pub media: Media,
    /// Source of texts.
    pub wording: Wording,
    /// Seed of the texts.
    pub seed: u64,
}

/// Response to one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// Arrival time of each token.
    pub tokens: Vec<Duration>,
    /// Arrival time of the end.
    pub ended: Duration,
    /// Kind of end.
    pub end: End,
    /// Tokens of the prompt, as the server counted them.
    pub prompt_tokens: Option<u32>,
    /// Times of the stages, if the server reports them.
    pub stages: Option<StageTimes>,
    /// Sources of its items' encoder outputs, if the server reports them.
    pub sources: Option<ItemSources>,
}

impl Reply {
    /// A request that got nothing.
    pub fn without_tokens(end: End, ended: Duration) -> Self {
        Self { tokens: Vec::new(), ended, end, prompt_tokens: None, stages: None, sources: None }
    }
}

/// Stage times of one request, by the server's clocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTimes {
    /// Waiting for an encoder batch and for the first engine step.
    pub queue: Duration,
    /// Preprocessing and encoder forward.
    pub encode: Duration,
    /// Publishing encoder outputs.
    pub publish: Duration,
    /// Loading them.
    pub load: Duration,
    /// Prefill.
    pub prefill: Duration,
}

/// A request on its way.
pub type ResponseFuture = Pin<Box<dyn Future<Output = Reply> + Send>>;

/// A request whose bytes are ready: called with the run's clock, it is sent.
pub type PreparedRequest = Box<dyn FnOnce(Clock) -> ResponseFuture + Send>;

/// A server that requests are sent to.
pub trait Target: Send + Sync + 'static {
    /// Makes a request ready. Called off the sending path, on a thread that may compute.
    fn prepare(&self, offered: &Offered, content: &ContentSource) -> PreparedRequest;

    /// Its address, for results and messages.
    fn name(&self) -> String;

    /// The model's name; empty where the server chooses.
    fn model(&self) -> String;
}

/// A short request that is not judged.
fn alone(text_tokens: u32, index: u64) -> Offered {
    let at = Duration::ZERO;
    Offered {
        index,
        at,
        text_tokens,
        output_tokens: 1,
        items: Vec::new(),
        session: None,
        blocks: None,
        slo: None,
    }
}

/// Measures the tokens of texts with probes ([`Wording::of_probes`]).
///
/// # Errors
/// End of the last probe, if none has a count of tokens.
pub async fn learn_wording(target: &dyn Target, media: &Media, seed: u64) -> Result<Wording, End> {
    let mut probes = Vec::new();
    let mut last = End::Failed("the server counts no prompt tokens".to_owned());
    for alphabet in Alphabet::ALL {
        for n_units in [24, 96] {
            let content = ContentSource { media: media.clone(), wording: Wording::exact(alphabet), seed };
            let ready = target.prepare(&alone(n_units, u64::from(n_units)), &content);
            let reply = ready(Clock::started()).await;
            match reply.prompt_tokens {
                Some(prompt_tokens) => probes.push(Probe { alphabet, n_units, prompt_tokens }),
                None => last = reply.end,
            }
        }
        if Wording::of_probes(&probes).is_some_and(|w| w == Wording::exact(alphabet)) {
            break;
        }
    }
    Wording::of_probes(&probes).ok_or(last)
}
