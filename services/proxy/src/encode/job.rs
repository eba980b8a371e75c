//! An item to be encoded, as a request has it.

use crate::auth::Account;
use crate::fleet::catalog::Want;
use crate::fleet::placement::Placement;
use crate::request_machine::deaths::RequestFingerprint;
use crate::request_machine::output::{Origin, Wanted};
use bytes::Bytes;
use std::sync::Arc;
use tokio::time::Instant;
use triptych_core::{ItemIdx, ItemOptions, ModelName, RequestId};

/// An item to be encoded, by one of its model's towers.
#[derive(Clone, Debug)]
pub struct EncodeJob {
    /// The request that asks.
    pub request_id: RequestId,
    /// Its model.
    pub model: ModelName,
    /// The item, by its place in the request.
    pub item: ItemIdx,
    /// The output.
    pub wanted: Wanted,
    /// Name of the tower that makes it; empty: no other reads the item.
    pub tower_name: Arc<str>,
    /// The item's bytes.
    pub bytes: Bytes,
    /// Of them those that the encode is charged for: of several towers each pays its part, so that an item is paid for once.
    pub charged_bytes: usize,
    /// Options of its processing; in the key.
    pub options: ItemOptions,
    /// Time at which the request's answer is due.
    pub deadline: Instant,
    /// The request's priority: smaller is more urgent.
    pub priority: i32,
    /// The tenant's account, to which the encode is charged.
    pub account: Arc<Account>,
    /// The PD worker that should encode it, if PD workers do.
    pub placement: Option<Arc<Placement>>,
    /// True if there is no item: its output is in the store, or nowhere.
    pub is_stored: bool,
}

impl EncodeJob {
    /// The encoder that it needs.
    pub fn encoder(&self) -> Want {
        let Self { model, wanted, .. } = self;
        Want::Encoder { model: model.clone(), encoder: wanted.encoder(), fingerprint: wanted.fingerprint }
    }

    /// Fingerprint by which it is known again if encoders die of it: its key.
    pub fn death_fingerprint(&self) -> RequestFingerprint {
        RequestFingerprint::from_bytes(*self.wanted.key.as_bytes())
    }

    /// Permission of the store to answer for the encoder, where that may be `origin`.
    pub fn origin(&self, origin: Origin) -> Origin {
        if self.is_stored { Origin::Stored } else { origin }
    }

    /// Length of the item.
    pub fn n_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }
}
