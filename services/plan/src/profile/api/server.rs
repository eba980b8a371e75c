//! A server that is measured, and the settings of its measurement.

use super::info::ServerInfo;
use crate::curves::Provenance;
use crate::profile::settings::Extent;
use std::sync::Arc;
use triptych_bench::client::Target;

/// A server that is measured.
pub struct ApiServer {
    /// Target of prompts of text: completions, which have no template.
    pub text: Arc<dyn Target>,
    /// Target of prompts with images, and of texts like them: chats.
    pub chat: Arc<dyn Target>,
    /// Another instance of the engine, which only encodes, if images are to be measured there.
    pub encoder: Option<Arc<dyn Target>>,
    /// Its own description.
    pub info: ServerInfo,
}

/// Settings of a measurement.
#[derive(Clone, Debug)]
pub struct ApiSettings {
    /// Repeats of each point.
    pub rounds: u32,
    /// Number of points.
    pub extent: Extent,
    /// Seed of the texts and images: another one has no byte in common.
    pub salt: u64,
    /// Threads of the server; `None`: not known.
    pub threads: Option<usize>,
    /// The model's name in the curves.
    pub model: String,
    /// Provenance of the curves.
    pub measured: Provenance,
}
