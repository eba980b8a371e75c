//! An audio clip read in sequence: window after window, each an encoder job and a call of its own.
//!
//! The start of a window is known only when the one before is settled; the PD worker reports it in its summary, with what
//! the next prompt has to hold. Nothing of that is understood here. A window's pieces go out when it has ended, so
//! each window can be sent again as a whole.

use super::decode::Decoding;
use super::supply::Supply;
use super::work::{Orchestrator, Work};
use crate::encode::job::EncodeJob;
use triptych_core::prompt::{Prompt, SpeechResume, SpeechTask};
use triptych_core::{Failure, ItemOptions};
use triptych_proto::v1;

/// Reads the clip to its end; the windows' summaries as one.
pub(super) async fn run(work: &Work, mut task: SpeechTask, first: EncodeJob) -> Result<v1::Summary, Failure> {
    let Orchestrator { materials, observer, .. } = &*work.orchestrator;
    let mut job = first.clone();
    let mut total: Option<v1::Summary> = None;
    loop {
        let supply = Supply::begin(work, vec![job.clone()]);
        let decoding = Decoding::window(work, Prompt::Speech(task.clone()), supply);
        let (mut summary, held) = decoding.run().await?;
        let next = summary.next.take().map(SpeechResume::from);
        for mut delta in held {
            if next.is_some() {
                // The answer ends with its last window.
                delta.finish_reason = v1::FinishReason::Unspecified.into();
            }
            if total.is_none() && !delta.text.is_empty() {
                observer.first_token(&work.route.served.name, work.elapsed());
            }
            work.send(delta).await?;
        }
        if task.language.is_none() && !summary.language.is_empty() {
            // Found once, as a whole clip has one language.
            task.language = Some(summary.language.clone());
        }
        total = Some(match total {
            None => summary,
            Some(before) => add(before, summary),
        });
        let Some(next) = next else { break };
        if u64::from(next.start_ms) <= job.options.start_ms.unwrap_or(0) {
            return Err(Failure::internal(format!(
                "the window after {:?} starts at {} ms",
                job.options, next.start_ms
            )));
        }
        let options = ItemOptions { start_ms: Some(next.start_ms.into()), ..first.options.clone() };
        job = materials.with_options(&work.request, &first, options).await?;
        task.resume = Some(next);
    }
    total.ok_or_else(|| Failure::internal("an audio clip without windows"))
}

/// Two summaries as one: counts and stages together, first and last things as they are.
fn add(before: v1::Summary, after: v1::Summary) -> v1::Summary {
    let (u, v) = (before.usage.unwrap_or_default(), after.usage.unwrap_or_default());
    let (s, t) = (before.times.unwrap_or_default(), after.times.unwrap_or_default());
    v1::Summary {
        usage: Some(v1::Usage {
            prompt_tokens: u.prompt_tokens.saturating_add(v.prompt_tokens),
            completion_tokens: u.completion_tokens.saturating_add(v.completion_tokens),
            cached_tokens: u.cached_tokens.saturating_add(v.cached_tokens),
            drafted_tokens: u.drafted_tokens.saturating_add(v.drafted_tokens),
            accepted_tokens: u.accepted_tokens.saturating_add(v.accepted_tokens),
        }),
        times: Some(v1::StageTimes {
            queue_us: s.queue_us.saturating_add(t.queue_us),
            encode_us: s.encode_us.saturating_add(t.encode_us),
            publish_us: s.publish_us.saturating_add(t.publish_us),
            load_us: s.load_us.saturating_add(t.load_us),
            prefill_us: s.prefill_us.saturating_add(t.prefill_us),
            ..s
        }),
        ..before
    }
}
