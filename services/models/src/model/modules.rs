//! Names of the layers of a model's encoder that adapters can be added to, from headers alone.

use super::{FootprintBackend, Model};
use crate::encoder::TransformerEncoder;
use crate::error::ModelError;
use crate::lora::EncoderModules;
use crate::spec::{EncoderSpec, StemSpec};
use crate::weights::Weights;
use triptych_kernels::{Backend, Precision};

impl Model {
    /// The layers of its encoder that adapters can be added to; none of a model without an encoder, or with a tower in tiles,
    /// one of two sizes or two towers, which take no adapters. Reads headers of weight files only.
    ///
    /// # Errors
    /// As [`Model::load_encoder`].
    pub fn encoder_modules(&self) -> Result<EncoderModules, ModelError> {
        let spec = self.spec.encoder.as_ref();
        let takes = |spec: &&EncoderSpec| {
            !matches!(spec.stem, StemSpec::Tiles(_) | StemSpec::Sam(_) | StemSpec::SquareViews(_))
                && spec.extras.tower.is_none()
        };
        let Some(spec) = spec.filter(takes) else {
            return Ok(EncoderModules::default());
        };
        let weights = Weights::open(&self.source.dir, self.source.format)?;
        let backend = FootprintBackend::new(Precision::F32)?.for_encoders();
        // Not behind `dyn`, whose table would have the code of a forward pass compiled for this back end too.
        let encoder = TransformerEncoder::load(spec, &weights, &backend)?;
        let parts = encoder.sites().iter().flat_map(|site| &site.parts);
        Ok(parts.flat_map(|part| part.modules.iter().cloned()).collect())
    }
}
