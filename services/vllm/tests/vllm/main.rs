//! The proxy in front of vLLM: real HTTP to fake servers that answer in vLLM's published forms, or misbehave.

mod cluster;
mod connector;
mod decoder;
mod encoder;
mod fake;
mod faults;
mod items;
mod published;
mod text;
