//! The prefill/decode engine: block pools, state slots, scheduler, plan, runner, sampler, and the events that drive them.
//!
//! Synchronous, without threads or I/O of its own; time is an argument. It knows no network. Its unit is the
//! *sequence*: one prepared prompt with its completions. The driver maps completions to client requests. One
//! thread owns an [`Engine`] and loops:
//!
//! ```text
//! loop {
//!     let event = match engine.next_step() {
//!         NextStep::Now          => events.try_recv(),                       // never wait: there is work
//!         NextStep::At(deadline) => events.recv_timeout(deadline - now),     // a sequence may run out of time
//!         NextStep::OnEvent      => events.recv(),                           // nothing lives here
//!     };
//!     for event in event.into_iter().chain(events.try_iter()) {
//!         send(engine.handle(event, clock.now()));
//!     }
//!     send(engine.step(&clock));
//! }
//! ```
//!
//! While a pipelined step computes, events are taken until [`Engine::next_plan`] before the next one.
//!
//! For every item of every request the driver delivers, sooner or later, [`Event::ItemReady`] or
//! [`Event::ItemFailed`]; delivering one twice, early or late does no harm. Every sequence ends with exactly one
//! [`Output::Finished`] or [`Output::Failed`]; an aborted one ends without output. With [`RowRetention::UntilRead`] it tells
//! when it read its rows, and when it needs them again ([`Output::Rows`]).
//!
//! Read in this order:
#![forbid(unsafe_code)]

pub mod request;
pub mod config;
pub mod output;
pub mod error;
pub mod engine;
pub mod scheduler;
pub mod sequence;
pub mod plan;
pub mod blocks;
pub mod states;
pub mod cross;
pub mod prefix;
pub mod items;
pub mod step_rates;
pub mod runner;
pub mod align;
pub mod completion;
pub mod choosing;
pub mod in_flight;
pub mod sampler;
pub mod logits_pipeline;
pub mod logits_processors;
pub mod ngrams;
pub mod constraint;
pub mod detokenize;
pub mod beam_search;
pub mod beam_completions;
pub mod speculation;
pub mod stats;

pub use align::AlignJob;
pub use config::{
    EngineConfig, KvBudget, Pipelining, Preemption, PrefixCache, RowRetention, Speculation, StateBudget,
};
pub use engine::{Engine, Event, NextStep};
pub use error::EngineError;
pub use output::{ChosenToken, Delta, Finished, Output, RowUse, SequenceTimes};
pub use request::{Resumed, SequenceId, SequenceRequest};
pub use scheduler::AdapterLoad;
pub use stats::Stats;
