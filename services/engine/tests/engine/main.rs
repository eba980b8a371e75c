//! The engine through its public interface, on a decoder that checks what it is handed.

mod answers;
mod bench;
mod fake;
mod giving_way;
mod guesses;
mod items;
mod resumed;
mod line;
mod rules;
mod schedules;
mod sharing;
