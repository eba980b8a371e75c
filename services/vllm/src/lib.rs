//! A vLLM server as a worker of the cluster: the gRPC services of encoder and PD workers over vLLM's HTTP API.
//!
//! The proxy reaches it over a channel in its own memory, as it reaches any worker over the network: routing, retries, cancellation,
//! ejection and accounting know no vLLM. Forms of requests and answers are those of vLLM 0.32
//! (docs.vllm.ai, "OpenAI-Compatible Server"). A server is trusted with answers and not with this process: every length and every
//! wait is bounded, and nothing that it sends reaches a panic. It knows no model beside the table of [`items`].
#![forbid(unsafe_code)]

mod address;
mod metrics;
mod sse;
mod failure;
mod client;

mod items;
mod ask;
mod answer;
mod models;

mod server;
mod states;
mod stream;
mod pd;
mod encoder;
mod dialer;

pub use address::{AddressError, VllmAddress};
pub use dialer::{VllmSettings, dialer};
