//! The house rules that a reader can check without running anything: who imports whom, how long a file is, where
//! `unsafe` may stand, what the top level shows. Plain file reads; milliseconds.
//!
//! The lengths of functions and their parameter counts are clippy's part (`.clippy.toml`).
#![forbid(unsafe_code)]

mod files;
mod imports;
mod layout;
mod lock;
mod schema;
mod words;
