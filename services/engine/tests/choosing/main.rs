//! How tokens are chosen, held against transformers over random logits: `tests/golden/logits`.

mod answers;
mod beams;
mod constraints;
mod drafts;
mod golden;
mod logits;
