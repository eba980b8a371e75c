//! The engine through its public interface, on a decoder that checks what it is handed.

mod answers;
mod bench;
mod fake;
mod items;
mod rules;
mod schedules;
