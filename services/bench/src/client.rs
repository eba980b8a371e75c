//! Who is asked: a request is made ready ahead of its time, and then sent and read to its end.
//!
//! [`grpc`] speaks `triptych.v1.Triptych`, [`http`] any OpenAI-compatible server. Neither retries: what the first try
//! came to is what is judged.

pub mod grpc;
pub mod http;
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
    /// When it started.
    pub start: Instant,
}

impl Clock {
    /// Started at this moment.
    pub fn started() -> Self {
        Self { start: Instant::now() }
    }

    /// How long ago it started.
    pub fn now(&self) -> Duration {
        self.start.elapsed()
    }
}

/// What prompts and items are made of.
#[derive(Clone, Debug)]
pub struct Kit {
    /// Items.
    pub media: Media,
    /// Texts.
    pub wording: Wording,
    /// Of the texts.
    pub seed: u64,
}

/// What came back for one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// When each token arrived.
    pub tokens: Vec<Duration>,
    /// When its end did.
    pub ended: Duration,
    /// How it ended.
    pub end: End,
    /// Tokens of the prompt, as the server counted them.
    pub prompt_tokens: Option<u32>,
    /// Where the time went, where the server says so.
    pub stages: Option<StageTimes>,
    /// Where its items' encoder outputs came from, where the server says so.
    pub sources: Option<ItemSources>,
}

impl Reply {
    /// A request that got nothing.
    pub fn without_tokens(end: End, ended: Duration) -> Self {
        Self { tokens: Vec::new(), ended, end, prompt_tokens: None, stages: None, sources: None }
    }
}

/// Where the time of one request went, by the server's clocks.
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
pub type Sending = Pin<Box<dyn Future<Output = Reply> + Send>>;

/// A request whose bytes are ready: called with the run's clock, it is sent.
pub type Ready = Box<dyn FnOnce(Clock) -> Sending + Send>;

/// Who is asked.
pub trait Target: Send + Sync + 'static {
    /// Makes a request ready. Called off the sending path, on a thread that may compute.
    fn prepare(&self, offered: &Offered, kit: &Kit) -> Ready;

    /// Its address, for results and messages.
    fn name(&self) -> String;

    /// The model's name; empty where the server chooses.
    fn model(&self) -> String;
}

/// A request that nobody judges: short, alone, and answered or not.
fn alone(text_tokens: u32, index: u64) -> Offered {
    let at = Duration::ZERO;
    Offered { index, at, text_tokens, output_tokens: 1, items: Vec::new(), session: None }
}

/// Asks the server what texts cost ([`Wording::of_probes`]).
///
/// # Errors
/// What the server answered, if it answers no probe with a count of tokens.
pub async fn learn_wording(target: &dyn Target, media: &Media, seed: u64) -> Result<Wording, End> {
    let mut probes = Vec::new();
    let mut last = End::Failed("the server counts no prompt tokens".to_owned());
    for alphabet in Alphabet::ALL {
        for n_units in [24, 96] {
            let kit = Kit { media: media.clone(), wording: Wording::exact(alphabet), seed };
            let ready = target.prepare(&alone(n_units, u64::from(n_units)), &kit);
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
