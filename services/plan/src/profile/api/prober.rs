//! Requests of a measurement, alone or several at once; no two have a text or an image in common.

use super::error::ApiProfileError;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use triptych_bench::client::{Clock, ContentSource, Reply, Target, learn_wording};
use triptych_bench::media::Media;
use triptych_bench::offered::{ItemShape, Offered, OfferedItem};
use triptych_bench::outcome::End;
use triptych_bench::prompt::Wording;

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ask {
    text: u32,
    output: u32,
    side: u32,
    n_images: u32,
}

impl Ask {
    /// A text of so many tokens.
    pub(super) fn text(tokens: u32, output: u32) -> Self {
        Self { text: tokens, output, side: 0, n_images: 0 }
    }

    /// A text with images before it, and one output token.
    pub(super) fn images(text: u32, (side, n_images): (u32, u32)) -> Self {
        Self { text, output: 1, side, n_images }
    }
}

/// An answer; times count from when it was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// Prompt tokens, as the server counted them, or else as they were asked for.
    pub(super) prompt_tokens: u32,
    /// Arrival of each token.
    pub(super) tokens: Vec<Duration>,
    /// Arrival of the end.
    pub(super) ended: Duration,
}

impl Answer {
    /// Time to the first token; without one, to the end.
    pub(super) fn first(&self) -> Duration {
        self.tokens.first().copied().unwrap_or(self.ended)
    }
}

/// Sender of the requests.
pub(super) struct Prober {
    content: ContentSource,
    n_sent: u64,
}

impl Prober {
    /// A sender that has learned what the server's tokens are.
    pub(super) async fn learn(target: &Arc<dyn Target>, salt: u64) -> Self {
        let media = Media::new(salt);
        // What cannot be asked is taken to be usual.
        let wording = learn_wording(target.as_ref(), &media, salt).await.unwrap_or(Wording::DIGITS);
        // Behind the numbers of the probes.
        Self { content: ContentSource { media, wording, seed: salt }, n_sent: 1000 }
    }

    /// Bytes of an image's file.
    pub(super) fn image_bytes(&self, side: u32) -> usize {
        let shape = ItemShape::Image { width: side, height: side };
        self.content.media.file(&OfferedItem { content: 0, shape }).len()
    }

    /// Sends one request.
    ///
    /// # Errors
    /// [`ApiProfileError::Unanswered`].
    pub(super) async fn one(
        &mut self,
        target: &Arc<dyn Target>,
        ask: &Ask,
    ) -> Result<Answer, ApiProfileError> {
        let send = target.prepare(&self.offered(ask), &self.content);
        read(ask, send(Clock::started()).await)
    }

    /// Sends the same kind of request `n` times at once.
    ///
    /// # Errors
    /// [`ApiProfileError::Unanswered`] of the first that was not answered.
    pub(super) async fn several(
        &mut self,
        target: &Arc<dyn Target>,
        (n, ask): (u32, &Ask),
    ) -> Result<Vec<Answer>, ApiProfileError> {
        let ready: Vec<_> = (0..n).map(|_| target.prepare(&self.offered(ask), &self.content)).collect();
        let clock = Clock::started();
        let mut tasks: JoinSet<Reply> = ready.into_iter().map(|send| send(clock)).collect();
        let mut answers = Vec::new();
        while let Some(Ok(reply)) = tasks.join_next().await {
            answers.push(read(ask, reply)?);
        }
        Ok(answers)
    }

    fn offered(&mut self, ask: &Ask) -> Offered {
        self.n_sent += 1;
        let index = self.n_sent;
        let shape = ItemShape::Image { width: ask.side, height: ask.side };
        let item = |i: u32| OfferedItem { content: index << 8 | u64::from(i + 1), shape };
        Offered {
            index,
            at: Duration::ZERO,
            text_tokens: ask.text,
            output_tokens: ask.output,
            items: (0..ask.n_images).map(item).collect(),
            session: None,
            blocks: None,
            slo: None,
        }
    }
}

fn read(ask: &Ask, reply: Reply) -> Result<Answer, ApiProfileError> {
    match reply.end {
        End::Whole | End::Short => Ok(Answer {
            prompt_tokens: reply.prompt_tokens.unwrap_or(ask.text),
            tokens: reply.tokens,
            ended: reply.ended,
        }),
        end => {
            let images = if ask.n_images > 0 {
                format!(" with {} images of {} pixels each way", ask.n_images, ask.side)
            } else {
                String::new()
            };
            let what = format!("a prompt of {} tokens{images}", ask.text);
            Err(ApiProfileError::Unanswered { what, end })
        }
    }
}
