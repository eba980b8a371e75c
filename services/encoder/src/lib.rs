//! The encoder worker: item bytes in, a READY encoder output in the EC store out.
//!
//! A job passes three places, each with its own bound:
//!
//! ```text
//! Encode ──▶ admission ──▶ preprocess (CPU pool) ──▶ batcher (one thread a model) ──▶ publish (EC connector)
//! ```
//!
//! It loads encoder weights only, knows no decoder and no prompt, and never keeps an item's bytes past
//! preprocessing. Jobs are idempotent by content key: the same job twice publishes the same object.
#![forbid(unsafe_code)]

mod batcher;
mod meters;
mod pool;
mod service;
mod worker;

pub use batcher::BatchLimits;
pub use worker::{EncoderConfig, EncoderError, run};
