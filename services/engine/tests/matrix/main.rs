//! Families × features: every golden model through the real engine and the real decoder, held against
//! transformers' completions and against itself.
//!
//! Every golden model takes part in every feature that it can have; a case that lacks what a feature needs fails.
//! Cheap as it is on small models, it is the place where a model, a kernel and the
//! engine's bookkeeping meet.

mod bench;
mod case;
mod narrow;
mod pipelined;
mod preempted;
mod projected;
mod sampled;
mod beams;
mod prefix_sharing;
mod generated;
mod windowed;
