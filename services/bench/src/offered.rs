//! One request as a workload offers it: when, how long, with what attached. No bytes: a client makes them from
//! `content`, the simulator never needs them.

use std::time::Duration;

/// A request to send.
#[derive(Clone, Debug, PartialEq)]
pub struct Offered {
    /// Its place in the run, from 0.
    pub index: u64,
    /// When it is sent, after the start of the run.
    pub at: Duration,
    /// Tokens of text in the prompt, without what the items become.
    pub text_tokens: u32,
    /// Tokens to write; the model's own end of text does not end it sooner.
    pub output_tokens: u32,
    /// Pictures and sounds, in the prompt's order.
    pub items: Vec<OfferedItem>,
    /// The conversation that it is a turn of.
    pub session: Option<Session>,
}

/// A picture or a sound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OfferedItem {
    /// The same number and shape are the same bytes, in the same run: what is repeated can be found in a cache.
    pub content: u64,
    /// What it is.
    pub shape: ItemShape,
}

/// What an item is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ItemShape {
    /// A picture, in pixels.
    Image {
        /// From left to right.
        width: u32,
        /// From top to bottom.
        height: u32,
    },
    /// A sound.
    Audio {
        /// How long.
        millis: u32,
    },
}

/// A place in a conversation. Its earlier text and items stand in this request's own again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// Which conversation.
    pub id: u64,
    /// Every turn from the first to this one, which has no answer yet. Their texts, their answers but the last, and
    /// their items are the request's own.
    pub turns: Vec<Turn>,
}

/// A turn of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Tokens of what was said.
    pub text_tokens: u32,
    /// Items that were shown with it.
    pub n_items: u32,
    /// Tokens of the answer.
    pub answer_tokens: u32,
}
