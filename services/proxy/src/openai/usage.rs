//! Token counts in OpenAI's shape, the same in every answer.

use serde::Serialize;
use triptych_proto::v1;

/// Counts of one answer, or the sum of several.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Usage {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u64,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
struct PromptDetails {
    cached_tokens: u32,
}

/// Counts of speculative decoding.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct CompletionDetails {
    accepted_prediction_tokens: u32,
    rejected_prediction_tokens: u32,
}

impl From<v1::Usage> for Usage {
    fn from(u: v1::Usage) -> Self {
        let mut usage = Self::default();
        usage.add(&u);
        usage
    }
}

impl Usage {
    /// Adds the counts of another answer.
    pub(super) fn add(&mut self, u: &v1::Usage) {
        self.prompt_tokens = self.prompt_tokens.saturating_add(u.prompt_tokens);
        self.completion_tokens = self.completion_tokens.saturating_add(u.completion_tokens);
        self.total_tokens = u64::from(self.prompt_tokens) + u64::from(self.completion_tokens);
        let cached = &mut self.prompt_tokens_details.cached_tokens;
        *cached = cached.saturating_add(u.cached_tokens);
        let details = &mut self.completion_tokens_details;
        details.accepted_prediction_tokens =
            details.accepted_prediction_tokens.saturating_add(u.accepted_tokens);
        let rejected = u.drafted_tokens.saturating_sub(u.accepted_tokens);
        details.rejected_prediction_tokens = details.rejected_prediction_tokens.saturating_add(rejected);
    }
}
