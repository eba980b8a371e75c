//! PD workers of other engines: whose encoder outputs they read, and which items need their bytes beside them.
//!
//! Such a worker holds no encoder that could announce a fingerprint of ours. It reads the outputs of the one encoder that is
//! announced under its model's name, for they are found by key; that their shape and type fit is checked by the engine's EC
//! connector when it loads them. Where there is no encoder, or encoders disagree, it has its items' bytes and encodes them
//! itself. Pure data: the fleet is looked at in [`super::pairing`].

use std::collections::{BTreeMap, BTreeSet};
use triptych_core::{EncoderId, Fingerprint, Modality};
use triptych_proto::convert::{self, WireError};
use triptych_proto::v1::worker_model::ForeignEncoders;

/// An encoder as its workers announce it: its fingerprint, and `model_type` of its model.
pub type Announced = (Fingerprint, String);

/// Encoders of a worker of another engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Foreign {
    /// Families and items that are read by metadata.
    by_metadata: BTreeSet<(String, Modality)>,
    /// Items that are read by metadata of the encoder that is there.
    without_bytes: BTreeSet<Modality>,
}

impl Foreign {
    /// Reads what a worker announces beside its own encoders.
    ///
    /// # Errors
    /// [`WireError`] of a kind of item that is none.
    pub fn read(announced: ForeignEncoders) -> Result<Self, WireError> {
        let by_metadata = announced.by_metadata.into_iter();
        let by_metadata = by_metadata.map(|of| Ok((of.family, convert::modality(of.modality)?)));
        Ok(Self {
            by_metadata: by_metadata.collect::<Result<_, WireError>>()?,
            without_bytes: BTreeSet::new(),
        })
    }

    /// True if the worker is sent items of this kind with their bytes.
    pub fn reads_bytes(&self, modality: Modality) -> bool {
        !self.without_bytes.contains(&modality)
    }

    /// Pairs it with the encoders of its model's name; returns the encoder of each kind of item, `own` where it is the worker
    /// itself: items that are named so are encoded where they are read.
    pub fn pair(
        &mut self,
        own: &BTreeMap<EncoderId, Fingerprint>,
        encoders: &BTreeMap<Modality, BTreeSet<Announced>>,
    ) -> BTreeMap<EncoderId, Fingerprint> {
        self.without_bytes.clear();
        let mut edition = own.clone();
        for (modality, announced) in encoders {
            let fingerprints: BTreeSet<_> = announced.iter().map(|(fingerprint, _)| fingerprint).collect();
            let (Some(fingerprint), 1) = (fingerprints.first(), fingerprints.len()) else { continue };
            edition.insert((*modality).into(), **fingerprint);
            let families = announced.iter().map(|(_, family)| family);
            if families.into_iter().all(|family| self.by_metadata.contains(&(family.clone(), *modality))) {
                self.without_bytes.insert(*modality);
            }
        }
        edition
    }
}
