//! The place of an encoder on its thread: held from the start, or loaded when it is needed.

use crate::weights::LazyWeights;
use std::sync::Arc;
use triptych_core::Failure;
use triptych_models::ModelError;
use triptych_models::encoder::Encoder;
use triptych_models::lora::LoraAdapter;

/// Loads an encoder, as often as it is asked to.
pub type LoadEncoder = Box<dyn FnMut() -> Result<Box<dyn Encoder>, ModelError> + Send>;

/// An encoder, or the means to load it.
pub enum EncoderSlot {
    /// Held as long as the thread lives.
    Held(Box<dyn Encoder>),
    /// Loaded and dropped.
    Lazy(LazyEncoder),
}

/// An encoder that comes and goes.
pub struct LazyEncoder {
    /// Width of its rows.
    pub hidden: usize,
    /// Its load.
    pub load: LoadEncoder,
    /// State that its jobs share.
    pub weights: Arc<LazyWeights>,
    /// The encoder while it is loaded.
    pub encoder: Option<Box<dyn Encoder>>,
}

/// Result of a look at the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotChange {
    /// The encoder is as it was.
    Same,
    /// It is another, or gone.
    Changed,
}

impl EncoderSlot {
    /// Width of the rows.
    pub fn hidden(&self) -> usize {
        match self {
            Self::Held(encoder) => encoder.hidden(),
            Self::Lazy(lazy) => lazy.hidden,
        }
    }

    /// State of weights that come and go.
    pub fn weights(&self) -> Option<&Arc<LazyWeights>> {
        match self {
            Self::Held(_) => None,
            Self::Lazy(lazy) => Some(&lazy.weights),
        }
    }

    /// The encoder, if it is loaded.
    pub fn loaded(&mut self) -> Option<&mut dyn Encoder> {
        match self {
            Self::Held(encoder) => Some(&mut **encoder),
            Self::Lazy(lazy) => lazy.encoder.as_mut().map(|encoder| &mut **encoder as &mut dyn Encoder),
        }
    }

    /// Loads the encoder with these adapters unless it is there.
    ///
    /// # Errors
    /// As [`LazyWeights::load`].
    pub fn make_ready<'a>(
        &mut self,
        adapters: impl Iterator<Item = &'a LoraAdapter>,
    ) -> Result<SlotChange, Failure> {
        let Self::Lazy(LazyEncoder { load, weights, encoder, .. }) = self else {
            return Ok(SlotChange::Same);
        };
        if encoder.is_some() {
            return Ok(SlotChange::Same);
        }
        *encoder = Some(weights.load(|| {
            let mut loaded = load()?;
            for adapter in adapters {
                loaded.load_adapter(adapter)?;
            }
            Ok(loaded)
        })?);
        Ok(SlotChange::Changed)
    }

    /// Drops the encoder if it comes and goes, nobody needs it, and it is time.
    pub fn drop_if_due(&mut self) -> SlotChange {
        let Self::Lazy(LazyEncoder { weights, encoder, .. }) = self else { return SlotChange::Same };
        let mut change = SlotChange::Same;
        weights.drop_if_due(|| {
            *encoder = None;
            change = SlotChange::Changed;
        });
        change
    }
}
