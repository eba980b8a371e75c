//! Source of curves that were measured at a server of another engine, through its API alone.

use super::CostCurves;
use serde::{Deserialize, Serialize};

/// A server that was measured through its API.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApiSource {
    /// Name and version of its engine, if it tells them.
    pub engine: Option<String>,
    /// Its URL.
    pub url: String,
    /// Place of the encoder that was measured.
    pub encoders: ApiEncoders,
    /// Tokens of a block of its KV cache, if it tells them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_block_tokens: Option<usize>,
    /// Most sequences that were seen to decode at once, if it did not run all that were sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_sequences: Option<usize>,
    /// Costs that an API does not show.
    pub unmeasured: Vec<Unmeasured>,
}

/// Place of the encoders of curves with an [`ApiSource`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ApiEncoders {
    /// In the server itself.
    Colocated,
    /// In another instance of the engine, which only encodes.
    Apart,
    /// Encoder workers of ours, whose curves were joined to the server's.
    Ours,
}

/// A cost that an API does not show.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unmeasured {
    /// Forwards of the encoder: the server reads no images.
    Encode,
    /// Preprocessing: it is within the encodes.
    Preprocess,
    /// Publishing encoder outputs.
    Publish,
    /// Loading encoder outputs.
    Load,
    /// Bytes of a row of encoder output.
    RowBytes,
    /// Bytes of a token in the KV cache: one byte stands for them.
    KvTokenBytes,
    /// Tokens that the KV cache holds: it counts as unlimited.
    KvTokens,
    /// Steps with prompts and decodes: the costs of both are added.
    MixedSteps,
    /// Core time of client, proxy and network.
    Frontend,
    /// Slowdown of encoder and engine on the same threads: fair halves.
    Colocated,
    /// Threads of the server, where they were not named: one.
    Threads,
}

impl Unmeasured {
    /// The cost in words, and its value in the curves.
    pub fn text(self) -> &'static str {
        match self {
            Self::Encode => "encodes (the server reads no images)",
            Self::Preprocess => "preprocessing (within encodes)",
            Self::Publish => "publishing encoder outputs (free)",
            Self::Load => "loading them (free)",
            Self::RowBytes => "bytes of their rows (1)",
            Self::KvTokenBytes => "bytes of a token's keys and values (1)",
            Self::KvTokens => "size of the KV cache (unlimited)",
            Self::MixedSteps => "steps that mix prompts and decodes (their costs are added)",
            Self::Frontend => "core time of client, proxy and network (none)",
            Self::Colocated => "encodes beside steps (fair halves)",
            Self::Threads => "the server's threads (1)",
        }
    }
}

impl ApiSource {
    /// The engine's name in a plan.
    pub fn name(&self) -> &str {
        self.engine.as_deref().unwrap_or("another engine")
    }
}

impl CostCurves {
    /// True if one worker encodes and decodes.
    pub fn allows_colocated(&self) -> bool {
        self.api.as_ref().is_none_or(|api| api.encoders == ApiEncoders::Colocated)
    }

    /// True if encoders are workers of their own.
    pub fn allows_split(&self) -> bool {
        self.api.as_ref().is_none_or(|api| api.encoders != ApiEncoders::Colocated)
    }

    /// Workers of the smallest cluster.
    pub fn least_workers(&self) -> usize {
        if self.allows_colocated() { 1 } else { 2 }
    }
}
