//! The product end to end: real processes of the real binary, the sample models, real servers.
//!
//! Each test starts a cluster of its own and ends it. Time matters only for timeouts.

mod accuracy;
mod answers;
mod ask;
mod attacks;
mod bad_input;
mod bench;
mod cache;
mod collector;
mod crashes;
mod cuda;
mod drain;
mod families;
mod embeddings;
mod faults;
mod lazy_weights;
mod lora;
mod observability;
mod one_encode;
mod openai;
mod operations;
mod planned_roles;
mod privacy;
mod responses;
mod text_decoders;
mod tls;
mod towers;
mod tools;
mod role_flips;
mod rolling;
mod traces;
mod side_by_side;
mod whisper;
mod with_encoder;
