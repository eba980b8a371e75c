//! Bounds of one proxy: on what a request may ask for, below those that every process holds, and on its connections.

use crate::request::Request;
use std::time::Duration;
use triptych_core::Failure;
use triptych_core::prompt::{Chat, Prompt};
use triptych_core::sampling::{MAX_BEAMS, MAX_N, MAX_STOPS};

/// Bounds on a request's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestBounds {
    /// Most answers, `n`. Default 16, the most that there may be.
    pub n: u32,
    /// Most beams. Default 32, the most that there may be.
    pub beams: u32,
    /// Most stop strings. Default 16, the most that there may be.
    pub stops: usize,
    /// True if a conversation may bring a chat template of its own, whose memory is not bounded. Default false.
    pub chat_templates: bool,
}

impl Default for RequestBounds {
    fn default() -> Self {
        Self { n: MAX_N, beams: MAX_BEAMS, stops: MAX_STOPS, chat_templates: false }
    }
}

impl RequestBounds {
    /// Refuses a request that asks for more.
    ///
    /// # Errors
    /// InvalidArgument, with the setting, its value and its bound.
    pub fn check(&self, request: &Request) -> Result<(), Failure> {
        self.check_template(&request.prompt)?;
        let sampling = &request.sampling;
        let beams = sampling.beams.as_ref().map_or(0, |beams| beams.width);
        let counts = [
            ("n", request.n_choices() as usize, self.n as usize),
            ("num_beams", beams as usize, self.beams as usize),
            ("stop", sampling.stop.len(), self.stops),
        ];
        match counts.into_iter().find(|(_, asked, bound)| asked > bound) {
            Some((name, asked, bound)) => {
                let message = format!("{name}: {asked} are asked for, this server allows {bound}");
                Err(Failure::invalid(message).with_param(name))
            }
            None => Ok(()),
        }
    }
}

/// Longest chat template of a request, in bytes.
const MAX_TEMPLATE_BYTES: usize = 64 << 10;

impl RequestBounds {
    fn check_template(&self, prompt: &Prompt) -> Result<(), Failure> {
        let Prompt::Chat(Chat { template: Some(template), .. }) = prompt else { return Ok(()) };
        let message = match template.len() {
            _ if !self.chat_templates => {
                "chat_template is not taken: the server runs without --trust-request-chat-template".to_owned()
            }
            n_bytes if n_bytes > MAX_TEMPLATE_BYTES => {
                format!("chat_template has {n_bytes} bytes, allowed are up to {MAX_TEMPLATE_BYTES}")
            }
            _ => return Ok(()),
        };
        Err(Failure::invalid(message).with_param("chat_template"))
    }
}

/// Bounds on live transcriptions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionBounds {
    /// Sessions of a tenant at once. Default 16.
    pub per_tenant: usize,
    /// Longest time of a session. Default 30 minutes.
    pub longest: Duration,
}

impl Default for SessionBounds {
    fn default() -> Self {
        Self { per_tenant: 16, longest: Duration::from_secs(30 * 60) }
    }
}

/// Bounds on connections of the HTTP API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionBounds {
    /// Open connections; further ones wait to be accepted. Default 4096.
    pub connections: usize,
    /// Bytes of a request's head, which are read at once. Default 64 KiB, at least 8 KiB.
    pub head_bytes: usize,
}

/// Least bytes of a head, those of the HTTP library.
const MIN_HEAD_BYTES: usize = 8 << 10;

impl Default for ConnectionBounds {
    fn default() -> Self {
        Self { connections: 4096, head_bytes: 64 << 10 }
    }
}

impl ConnectionBounds {
    /// With both numbers within what works.
    pub fn checked(self) -> Self {
        Self { connections: self.connections.max(1), head_bytes: self.head_bytes.max(MIN_HEAD_BYTES) }
    }
}
