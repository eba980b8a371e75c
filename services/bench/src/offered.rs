//! One request as a workload offers it: when, how long, with what attached. No bytes: a client makes them from
//! `content`, the simulator never needs them.

use crate::slo::Slo;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

/// A request to send.
#[derive(Clone, Debug, PartialEq)]
pub struct Offered {
    /// Index in the run, from 0.
    pub index: u64,
    /// Time at which it is due, after the start of the run.
    pub at: Duration,
    /// Tokens of text in the prompt, without what the items become.
    pub text_tokens: u32,
    /// Output tokens; the model's end of text is ignored.
    pub output_tokens: u32,
    /// Images and audio clips, in the prompt's order.
    pub items: Vec<OfferedItem>,
    /// The conversation that it is a turn of.
    pub session: Option<Session>,
    /// Blocks of its text that other requests may have too; `None`: no other request has any of it.
    pub blocks: Option<TextBlocks>,
    /// Latency limits of its own; `None`: those of the run.
    pub slo: Option<Slo>,
}

/// A text from its start by blocks, as published traces describe it: blocks of one id are the same text. Text behind the last
/// block is the request's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextBlocks {
    /// Tokens of a block.
    pub tokens: NonZeroU32,
    /// Blocks in order; the text may end within the last one.
    pub ids: Arc<[u64]>,
}

impl TextBlocks {
    /// Blocks of the first `n_tokens` tokens, each with the number of its tokens that are within, and the tokens behind them.
    pub fn within(&self, n_tokens: u32) -> (Vec<(u64, u32)>, u32) {
        let mut left = n_tokens;
        let mut parts = Vec::new();
        for id in self.ids.iter() {
            let n = left.min(self.tokens.get());
            if n == 0 {
                break;
            }
            parts.push((*id, n));
            left -= n;
        }
        (parts, left)
    }
}

/// An image or an audio clip.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OfferedItem {
    /// Content number: equal numbers and shapes have equal bytes in a run, so caches can hit.
    pub content: u64,
    /// Its shape.
    pub shape: ItemShape,
}

/// Shape of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ItemShape {
    /// An image, in pixels.
    Image {
        /// Width.
        width: u32,
        /// Height.
        height: u32,
    },
    /// An audio clip.
    Audio {
        /// Length in milliseconds.
        millis: u32,
    },
}

/// A turn of a conversation. The request repeats the text and items of all earlier turns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// Number of the conversation.
    pub id: u64,
    /// Every turn from the first to this one, which has no answer yet. Their texts, their answers but the last, and
    /// their items are the request's own.
    pub turns: Vec<ConversationTurn>,
}

/// A turn of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConversationTurn {
    /// Tokens of the user's text.
    pub text_tokens: u32,
    /// Items attached to it.
    pub n_items: u32,
    /// Tokens of the answer.
    pub answer_tokens: u32,
}
