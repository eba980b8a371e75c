//! The vocabulary of Triptych: ids, keys, shapes, encoder outputs, failures and time, shared by every other crate.
//!
//! Plain data and pure functions. It knows no I/O, no async runtime and no device; a test in `tests/`
//! holds that. Read in this order:
#![forbid(unsafe_code)]

pub mod ids;
pub mod shape;
pub mod modality;
pub mod encoder_id;
pub mod key;
pub mod tower;
pub mod item;
pub mod options;
pub mod embeddings;
pub mod rows;
pub mod prompt;
pub mod sampling;
pub mod failure;
pub mod graph_stats;
pub mod lifetime;
pub mod clock;
pub mod backoff;
pub mod limits;
pub mod metrics;
pub mod timeline;

pub use backoff::Backoff;
pub use encoder_id::{EncoderId, TowerIdx};
pub use failure::{Failure, FailureClass};
pub use ids::{ItemIdx, ModelName, RequestId, WorkerId};
pub use item::{EncodedItem, EncodedRows, EncoderOutput, Extent, Seconds, WindowSpan};
pub use key::{AdapterId, ContentKey, Fingerprint, Owner, PrefixKey, TenantId};
pub use modality::Modality;
pub use options::{FrameSampling, ItemForm, ItemOptions};
pub use rows::{RowType, RowTypes};
pub use shape::DType;
pub use tower::Tower;
