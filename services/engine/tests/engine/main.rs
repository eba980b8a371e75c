//! The engine through its public interface, on a decoder that checks what it is handed.

mod completions;
mod bench;
mod fake;
mod pipelined;
mod preemption;
mod speculation;
mod images;
mod items;
mod kv_groups;
mod projections;
mod prompt_scores;
mod adapters;
mod alignments;
mod resumed;
mod row_uses;
mod queue;
mod rules;
mod schedules;
mod states;
mod sharing;
