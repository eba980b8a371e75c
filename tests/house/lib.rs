//! The rules of the repository that a reader can check without running anything: who imports whom, how long a file is,
//! where `unsafe` may stand, which words are used, what the top level shows. Plain file reads; a second or two.
//!
//! It depends on no crate, so it says which rule is broken even while something does not compile. The lengths of
//! functions and their parameter counts are clippy's part (`.clippy.toml`).
#![forbid(unsafe_code)]
#![cfg(test)]

mod calls;
mod circles;
mod docs;
mod files;
mod imports;
mod layout;
mod lock;
mod schema;
mod vocabulary;
mod words;
