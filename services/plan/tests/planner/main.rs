//! A profile of real models.
#![forbid(unsafe_code)]

mod profile;
