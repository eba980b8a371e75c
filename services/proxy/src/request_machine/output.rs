//! An encoder output as the proxy knows it: its description, where it is, and why it is believed to be there.

use std::time::Instant;
use triptych_core::lifetime::{ItemSource, StageTimes};
use triptych_core::{ContentKey, EncodedItem, EncoderId, Failure, Fingerprint, Modality, TowerIdx, WorkerId};

/// An encoder output that is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Its identity.
    pub key: ContentKey,
    /// The encoder that makes it.
    pub fingerprint: Fingerprint,
    /// The kind of item.
    pub modality: Modality,
    /// The tower that reads it.
    pub tower: TowerIdx,
}

impl Wanted {
    /// The encoder that makes it, among those of its model.
    pub fn encoder(&self) -> EncoderId {
        EncoderId { modality: self.modality, tower: self.tower }
    }
}

/// An item whose encoder output is READY.
#[derive(Clone, Debug)]
pub struct Encoded {
    /// The output.
    pub item: EncodedItem,
    /// Its origin, seen from one request.
    pub source: ItemSource,
    /// Queue, encode and publish.
    pub times: StageTimes,
    /// `host:port` of `EcObjects` services that hold it in memory, the best first.
    pub peers: Vec<String>,
    /// PD workers that hold it, if nobody else is known to: the request should go to one of them. Empty: to any.
    pub holders: Vec<WorkerId>,
    /// Evidence that it is there.
    pub belief: Belief,
    /// Time since when.
    pub at: Instant,
}

impl Encoded {
    /// An output that was not encoded now.
    pub fn found(item: EncodedItem, belief: Belief, at: Instant) -> Self {
        let (times, peers, holders) = (StageTimes::default(), Vec::new(), Vec::new());
        Self { item, source: ItemSource::Cached, times, peers, holders, belief, at }
    }

    /// An output in the store that somebody else had made a moment ago.
    pub fn made_elsewhere(item: EncodedItem, at: Instant) -> Self {
        Self { source: ItemSource::Shared, ..Self::found(item, Belief::Stored, at) }
    }

    /// The part of it that a PD worker is given.
    pub fn announced(&self) -> Announced {
        Announced { item: self.item.clone(), peers: self.peers.clone(), pending: false }
    }

    /// The same for a request that joined an encode which another one began.
    #[must_use]
    pub fn joined(mut self) -> Self {
        self.times = StageTimes::default();
        if self.source == ItemSource::Encoded {
            self.source = ItemSource::Shared;
        }
        self
    }
}

/// Evidence that an output is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Belief {
    /// It was READY a moment ago.
    Remembered,
    /// A PD worker reported that it holds it.
    Resident,
    /// The store has it.
    Stored,
    /// An encoder made it.
    Made,
}

/// Description of an output before it is READY, or when it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Announced {
    /// The output; while it is pending without its checksum.
    pub item: EncodedItem,
    /// `host:port` of `EcObjects` services that hold it in memory, or will.
    pub peers: Vec<String>,
    /// True if it is still being encoded.
    pub pending: bool,
}

/// The end of an encode.
pub type Outcome = Result<Encoded, Failure>;

/// Permission of the store to answer for the encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The store may have it.
    Any,
    /// Its object was found missing or corrupt: encode.
    Fresh,
    /// The store has it, or nobody: there is nothing to encode.
    Stored,
}
