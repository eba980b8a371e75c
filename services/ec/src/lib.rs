//! The encoder-cache (EC) connector and its stores: how encoder outputs get from where they are computed to where
//! they are used.
//!
//! It moves framed, verified bytes under content keys, and knows nothing of models, tokens or devices. Read in
//! this order:
#![deny(unsafe_code)]

pub mod object;

pub mod error;
pub mod store;

pub mod settings;

pub mod breaker;
#[cfg(any(test, feature = "testing"))]
pub mod fault;
pub mod guarded;
pub mod limit;
pub mod metered;
pub mod read_only;
pub mod retry;
pub mod traced;

pub mod connector;
pub mod cache;
pub mod local;
mod policy;

pub mod server;
mod wire;

pub mod token_bucket;

#[cfg(any(test, feature = "testing"))]
pub mod conformance;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use error::EcError;
pub use settings::{EcSetting, OpenOptions, open, open_with};
pub use store::{Access, EcStore, PutOutcome, Scope, StoreKind};
