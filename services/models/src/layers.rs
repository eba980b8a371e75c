//! Building blocks of encoders and decoders, each over any back end.
//!
//! A part is loaded from named tensors by a [`Loader`] and then maps rows to rows; it keeps no state between
//! calls, and is handed that of sequences. All activations are `[n_tokens, width]` as in [`triptych_kernels::ops`].

mod adapted;
mod attention;
mod experts;
mod feed_forward;
mod gated_delta;
mod input;
mod loader;
mod resampled;
mod residual;
mod rotary;
mod site;

pub use adapted::{Adapted, AdaptedLinear, AdapterGroup, LoadedAdapter, LowRank};
pub(crate) use attention::norm_parts;
pub use attention::{AttentionRows, CachedRows, CrossAttention, SelfAttention};
pub use experts::FeedForwardLayer;
pub use feed_forward::FeedForward;
pub use gated_delta::{GatedDelta, LayerStates};
pub use input::{InputLayer, StackAndNames, StagedPositions};
pub use loader::{LinearShape, Loader, StackedLinear, StoredLinear};
pub use residual::Residual;
pub use rotary::Rotary;
pub use site::{LinearSite, SitePart};
