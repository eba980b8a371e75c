//! Layout of a prompt by the model's template.

use serde::{Deserialize, Serialize};

/// Layout of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromptSpec {
    /// Tokens of the template that all prompts begin with.
    pub before: u32,
    /// Tokens of the template around each item.
    pub around_item: u32,
    /// Tokens of the template at the end.
    pub after: u32,
    /// Position of the items.
    pub items: ItemsAt,
}

/// Position of the items in a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ItemsAt {
    /// Before the text.
    #[default]
    Front,
    /// After the text.
    Back,
    /// Not in the prompt: the decoder cross-attends to the first one.
    Cross,
}

impl Default for PromptSpec {
    fn default() -> Self {
        Self { before: 14, around_item: 2, after: 5, items: ItemsAt::Front }
    }
}
