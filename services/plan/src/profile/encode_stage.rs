//! An encoder of a model, and what is measured of it: of the only one, or of each tower that reads the same item.

use super::encode;
use super::error::ProfileError;
use super::items::{self, Sample};
use super::progress::Progress;
use super::settings::ProfileSettings;
use crate::curves::{EncodePoint, ItemPoint, Point};
use std::sync::Arc;
use triptych_core::{EncodedItem, EncoderId, Modality};
use triptych_models::Model;
use triptych_models::compute::Compute;
use triptych_models::encoder::Encoder;
use triptych_models::preprocess::Preprocess;

/// An encoder and what is measured of it.
pub struct EncodeStage {
    /// Kind of its items.
    pub modality: Modality,
    /// The encoder.
    pub encoder: Box<dyn Encoder>,
    /// Items of several sizes.
    pub samples: Vec<Sample>,
    /// Its processor.
    pub preprocess: Arc<dyn Preprocess>,
    /// Name of its tower; empty: no other reads the item.
    name: &'static str,
    /// Its place among the model's encoders.
    pub id: EncoderId,
    points: Vec<EncodePoint>,
    n_parts: usize,
}

impl EncodeStage {
    /// Measures the encoder of a model's first kind of items, or each of its towers.
    pub fn measure_all(
        model: &Model,
        compute: &Compute,
        settings: &ProfileSettings,
        progress: Progress<'_>,
    ) -> Result<Vec<Self>, ProfileError> {
        let Some(&modality) = model.modalities().first() else { return Ok(Vec::new()) };
        let of_kind = model.encoders().filter(|(id, _)| id.modality == modality);
        let named = of_kind.zip(model.towers().map(|(_, name)| name));
        let one = |((id, preprocess), name): ((EncoderId, &Arc<dyn Preprocess>), &'static str)| {
            let samples = items::samples(preprocess.as_ref(), modality, settings, progress)?;
            let mut encoder = compute.load_encoder(model, id)?;
            let points = encode::points(encoder.as_mut(), &samples, settings, progress)?;
            let n_parts = encode::n_parts(encoder.as_mut(), &samples)?;
            let preprocess = Arc::clone(preprocess);
            Ok(Self { modality, encoder, samples, preprocess, name, id, points, n_parts })
        };
        named.map(one).collect()
    }

    /// The output of its smallest item, as it would be published.
    pub fn described(&self) -> Option<EncodedItem> {
        self.samples.first().map(|sample| sample.described(self.id, self.encoder.hidden()))
    }

    /// Its curves.
    pub fn profiled(self, is_cross_attended: bool) -> ProfiledTower {
        ProfiledTower {
            name: self.name.to_owned(),
            items: self.samples.iter().map(Sample::point).collect(),
            preprocess: self.samples.iter().map(Sample::preprocess).collect(),
            encode: self.points,
            encode_parts: self.n_parts,
            hidden: self.encoder.hidden(),
            is_cross_attended,
        }
    }
}

/// Compute curves of a tower beside the first.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfiledTower {
    /// Its name.
    pub name: String,
    /// Output tokens of items by size.
    pub items: Vec<ItemPoint>,
    /// Preprocessing.
    pub preprocess: Vec<Point>,
    /// Forwards.
    pub encode: Vec<EncodePoint>,
    /// Parts of a forward.
    pub encode_parts: usize,
    /// Width of its rows.
    pub hidden: usize,
    /// True if its rows are cross-attended to.
    pub is_cross_attended: bool,
}
