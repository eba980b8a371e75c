//! The parts of a back end that its ops run on.

use std::sync::Arc;

use super::packed::PackedWeights;
use super::pool::Pool;
use super::simd::FoundIsa;
use crate::precision::Precision;

/// Threads, instruction set and settings of a back end. Clones share the threads.
#[derive(Clone, Debug)]
pub(super) struct Context {
    pub(super) pool: Pool,
    pub(super) isa: FoundIsa,
    /// Precision of weights.
    pub(super) precision: Precision,
    /// Bytes of a core's L2 cache.
    pub(super) l2_bytes: usize,
    /// Files of packed weights, to load from and to save to.
    pub(super) packed: Option<Arc<PackedWeights>>,
}
