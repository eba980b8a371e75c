//! Token choice, held against transformers over random logits: `tests/golden/logits`.

mod completions;
mod beams;
mod constraints;
mod drafts;
mod golden;
mod limits;
mod logits;
