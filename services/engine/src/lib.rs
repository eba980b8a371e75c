//! The prefill/decode engine: block pools, scheduler, plan, runner, sampler, and the events that drive them.
//!
//! Synchronous, without threads or I/O of its own; time is an argument. It knows no network and no request:
//! its unit is the *answer* to a prepared prompt, and whoever drives it maps answers to requests. One thread owns an
//! [`Engine`] and loops:
//!
//! ```text
//! loop {
//!     let event = match engine.readiness() {
//!         Readiness::Now          => events.try_recv(),                       // never wait: there is work
//!         Readiness::At(deadline) => events.recv_timeout(deadline - now),     // a sequence may run out of time
//!         Readiness::OnEvent      => events.recv(),                           // nothing lives here
//!     };
//!     for event in event.into_iter().chain(events.try_iter()) {
//!         send(engine.handle(event, clock.now()));
//!     }
//!     send(engine.step(&clock));
//! }
//! ```
//!
//! For every item of every arrival the driver delivers, sooner or later, [`Event::ItemReady`] or
//! [`Event::ItemFailed`]; delivering one twice, early or late does no harm. Every sequence ends with exactly
//! one [`Output::Finished`] or [`Output::Failed`], except that an aborted one ends in silence.
//!
//! Read in this order:
#![forbid(unsafe_code)]

pub mod align;
pub mod answer;
pub mod beam;
pub mod beams;
pub mod blocks;
pub mod config;
pub mod constraint;
pub mod cross;
pub mod draft;
pub mod drafting;
pub mod engine;
pub mod error;
pub mod items;
pub mod output;
pub mod plan;
pub mod prefix;
pub mod processors;
pub mod rates;
pub mod request;
pub mod runner;
pub mod sampler;
pub mod scheduler;
pub mod sequence;
pub mod shaping;
pub mod stats;
pub mod writer;

pub use align::AlignJob;
pub use config::{EngineConfig, KvBudget, Preemption, PrefixCache, Speculation};
pub use engine::{Engine, Event, Readiness};
pub use error::EngineError;
pub use output::{ChosenToken, Delta, Finished, Output, SequenceTimes};
pub use request::{Arrival, Resumed, SequenceId};
pub use stats::Stats;
