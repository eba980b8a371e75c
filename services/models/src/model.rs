//! A Hugging Face directory, opened: configuration, tokenizer and processor read and checked, weights not yet.

mod activations;
mod example;
mod footprint;
mod inventory;
mod modules;
mod tower;

pub use activations::{MemoryForecast, activation_bytes};
pub use footprint::{Footprint, FootprintBackend};
pub use inventory::{
    BytesByPrecision, EncoderInventory, ExampleItem, ExpertsInventory, Inventory, KvBehindWindow, KvBytes,
    StageInventory, TowerInventory,
};

use crate::checkpoint;
use crate::decoder::{Decoder, TransformerDecoder};
use crate::encoder::{Encoder, TransformerEncoder};
use crate::error::ModelError;
use crate::family::{Config, Family};
use crate::files::{ItemProcessor, JsonFile};
use crate::packed;
use crate::preprocess::{NoItems, Preprocess};
use crate::prompt::PromptBuilder;
use crate::source::{LoadFormat, ModelSource};
use crate::spec::{EncoderSpec, ItemsSpec, ModelSpec, StemSpec};
use crate::tokenization::{MoreTokens, Tokenizer};
use crate::weights::{self, StoredWeights, Weights};
use std::path::Path;
use std::sync::Arc;
use triptych_core::{DType, EncoderId, Fingerprint, Modality, ModelName, TowerIdx};
use triptych_kernels::{Backend, Precision};

const CONFIG: &str = "config.json";

/// The arithmetic that images are resized in, as part of what an encoder's output depends on: another one, another text.
const RESAMPLING: &str = "resampled in 22 bits, across first";

/// The arithmetic that frames of videos are decoded and sampled in, as part of what an encoder's output depends on.
const SAMPLING: &str = "frames in BT.601, 2 a second unless said, pixels shared among them";

/// A model that can be served: everything of it but the weights, which each stage loads for itself.
pub struct Model {
    source: ModelSource,
    name: ModelName,
    family: Family,
    spec: ModelSpec,
    modalities: Vec<Modality>,
    // Configuration that the encoder's output depends on beside its weights, as text, for each modality.
    encoder_settings: Vec<(Modality, String)>,
    tokenizer: Arc<Tokenizer>,
    // Of each tower.
    processors: Vec<Arc<dyn Preprocess>>,
    prompts: Arc<dyn PromptBuilder>,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model")
            .field("source", &self.source)
            .field("spec", &self.spec)
            .finish_non_exhaustive()
    }
}

impl Model {
    /// Reads and checks everything but the weights.
    ///
    /// # Errors
    /// [`ModelError`] for a file or key that is missing, wrong or not supported.
    pub fn open(source: &ModelSource) -> Result<Self, ModelError> {
        let dir = &source.dir;
        checkpoint::check(dir)?;
        let file = JsonFile::read(dir, CONFIG)?;
        let config = Config::new(CONFIG, file.value());
        let family = Family::of(&config)?;
        let spec = family.resized(dir, family.spec(&config)?)?;
        let more = MoreTokens { contents: family.processor_tokens(&config), vocab: spec.decoder.vocab };
        let tokenizer = Arc::new(Tokenizer::with_more(dir, &more)?);
        let of_tower = |encoder| family.preprocess(dir, encoder, &tokenizer);
        let towers = spec.encoder.iter().flat_map(EncoderSpec::towers);
        let mut processors = towers.map(of_tower).collect::<Result<Vec<_>, _>>()?;
        if processors.is_empty() {
            processors.push(Arc::new(NoItems));
        }
        let modalities = processors[0].modalities().to_vec();
        let settings = |m: &Modality| {
            let encoder = spec.encoder.as_ref();
            encoder.map(|encoder| Ok((*m, encoder_settings(dir, &file, (encoder, *m), &tokenizer)?)))
        };
        let encoder_settings = modalities.iter().filter_map(settings).collect::<Result<_, ModelError>>()?;
        Ok(Self {
            name: source.name.clone().unwrap_or_else(|| directory_name(source)),
            family,
            modalities,
            encoder_settings,
            processors,
            prompts: family.prompts(dir, &spec, &tokenizer)?,
            tokenizer,
            spec,
            source: source.clone(),
        })
    }

    /// Refuses weights that are missing, in a format that is not read, or Git LFS pointers. Reads no tensor.
    ///
    /// # Errors
    /// As [`weights::files`].
    pub fn check_weights(&self) -> Result<(), ModelError> {
        match self.source.format {
            LoadFormat::Safetensors => weights::files(&self.source.dir).map(drop),
            LoadFormat::Dummy { .. } => Ok(()),
        }
    }

    /// The source it was opened from.
    pub fn source(&self) -> &ModelSource {
        &self.source
    }

    /// The name it is served under.
    pub fn name(&self) -> &ModelName {
        &self.name
    }

    /// The `model_type` of its configuration.
    pub fn family(&self) -> &'static str {
        self.family.model_type()
    }

    /// Its shapes.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Tokens the decoder's context holds.
    pub fn max_context(&self) -> usize {
        self.spec.decoder.max_context
    }

    /// Most encoder rows that a sequence cross-attends to; `None` without cross-attention, or if only the limits on items
    /// bound them.
    pub fn max_cross_rows(&self) -> Option<usize> {
        match self.spec.decoder.items {
            ItemsSpec::Embedded { .. } => None,
            // Of several towers the last one's.
            ItemsSpec::CrossAttention(_) => self.processors.last().and_then(|last| last.max_rows()),
        }
    }

    /// The kinds of items it reads; none of a model without an encoder. All are read by one encoder, or by each tower.
    pub fn modalities(&self) -> &[Modality] {
        &self.modalities
    }

    /// Its tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Its processor; of several towers the first one's.
    pub fn preprocess(&self) -> Arc<dyn Preprocess> {
        Arc::clone(&self.processors[0])
    }

    /// Its encoders, with the processor of each, in their order.
    pub fn encoders(&self) -> impl Iterator<Item = (EncoderId, &Arc<dyn Preprocess>)> {
        let of_kind = |modality: &Modality| {
            let modality = *modality;
            let towers = self.processors.iter().zip(0..);
            towers.map(move |(processor, n)| (EncoderId { modality, tower: TowerIdx(n) }, processor))
        };
        self.modalities.iter().flat_map(of_kind)
    }

    /// The towers that read its items, by number, with their names; one without a name where there are no others.
    pub fn towers(&self) -> impl Iterator<Item = (TowerIdx, &'static str)> {
        let towers = self.spec.encoder.iter().flat_map(EncoderSpec::towers);
        towers.zip(0..).map(|(tower, n)| (TowerIdx(n), tower.tower_name()))
    }

    /// Its prompt layout.
    pub fn prompts(&self) -> Arc<dyn PromptBuilder> {
        self.prompts.clone()
    }

    /// Identity of the encoder of a modality, or of a tower, that computes in f32 and whose rows leave as `dtype`: that of
    /// [`Self::fingerprint_in`] with [`Precision::F32`].
    ///
    /// # Errors
    /// As [`Self::fingerprint_in`].
    pub fn fingerprint(
        &self,
        encoder: impl Into<EncoderId>,
        dtype: DType,
    ) -> Result<Fingerprint, ModelError> {
        self.fingerprint_in(encoder, dtype, Precision::F32)
    }

    /// Identity of the encoder of a modality, or of a tower, that computes in [`Precision::of_encoders`] of `precision` and whose rows
    /// leave as `dtype`. Reads all bytes of its weights, unless an earlier start did
    /// and kept what it found with its packed weights; of random ones only the seed.
    ///
    /// # Errors
    /// [`ModelError::Config`] for a modality without an encoder; else as opening the weights.
    pub fn fingerprint_in(
        &self,
        encoder: impl Into<EncoderId>,
        dtype: DType,
        precision: Precision,
    ) -> Result<Fingerprint, ModelError> {
        let id = encoder.into();
        let modality = id.modality;
        let encoder = self.encoder_of(id)?;
        let settings = self.encoder_settings.iter().find(|(of, _)| *of == modality);
        let settings = settings.map_or("", |(_, settings)| settings.as_str());
        let mut parts: Vec<Vec<u8>> = vec![modality.as_str().into(), dtype.as_str().into(), settings.into()];
        if encoder.extras.tower.is_some() {
            parts.push(format!("tower {}", encoder.tower_name()).into());
        }
        let precision = precision.of_encoders();
        if precision != Precision::F32 {
            parts.push(format!("computed in {}", precision.as_str()).into());
        }
        match Weights::open(&self.source.dir, self.source.format)? {
            Weights::Dummy { seed } => parts.push(format!("dummy {seed}").into()),
            Weights::Stored(stored) => {
                if let Some(quantization) = stored.quantization() {
                    // The values that stored codes stand for depend on it.
                    parts.push(format!("quantized: {quantization}").into());
                }
                for (described, hash) in self.tensor_hashes(encoder, &stored)? {
                    parts.extend([described.into(), hash.to_vec()]);
                }
            }
        }
        Ok(Fingerprint::of(parts.iter().map(Vec::as_slice)))
    }

    /// Name, type and shape of each tensor of an encoder, and the hash of its bytes.
    fn tensor_hashes(
        &self,
        encoder: &EncoderSpec,
        stored: &StoredWeights,
    ) -> Result<Vec<(String, [u8; 32])>, ModelError> {
        let names = encoder.names;
        let shared = names.tokens.iter().map(|name| format!("{name}.weight")).collect::<Vec<_>>();
        let mut tensors = stored.under(names.prefixes)?;
        tensors.extend(stored.first(&shared));
        for prefixes in encoder.further_prefixes() {
            tensors.extend(stored.under(prefixes)?);
        }
        let described: Vec<String> =
            tensors.iter().map(|t| format!("{} {:?} {:?}", t.name, t.dtype, t.shape)).collect();
        let hash = || tensors.iter().map(|tensor| *tensor.hash().as_bytes()).collect();
        let hashes = packed::hashes(&self.source, &described, hash);
        Ok(described.into_iter().zip(hashes).collect())
    }

    /// Loads the encoder of a modality, or a tower of it, and nothing of the decoder.
    ///
    /// # Errors
    /// [`ModelError::Config`] for a modality without an encoder; else as loading the weights.
    pub fn load_encoder<B: Backend>(
        &self,
        encoder: impl Into<EncoderId>,
        backend: &B,
    ) -> Result<Box<dyn Encoder>, ModelError> {
        let spec = self.encoder_of(encoder.into())?;
        let weights = &Weights::open(&self.source.dir, self.source.format)?;
        Ok(Box::new(TransformerEncoder::load(spec, weights, &backend.for_encoders())?))
    }

    /// Loads the decoder, and nothing of the encoder.
    ///
    /// # Errors
    /// As loading the weights.
    pub fn load_decoder<B: Backend>(&self, backend: &B) -> Result<Box<dyn Decoder>, ModelError> {
        let weights = Weights::open(&self.source.dir, self.source.format)?;
        Ok(Box::new(TransformerDecoder::load(&self.spec.decoder, &weights, backend)?))
    }

    /// An encoder of a modality, which may be that of another one, too.
    fn encoder_of(&self, id: EncoderId) -> Result<&EncoderSpec, ModelError> {
        let found = self.spec.encoder.as_ref().filter(|_| self.modalities.contains(&id.modality));
        found.and_then(|first| first.towers().nth(id.tower.0.into())).ok_or_else(|| ModelError::Config {
            file: CONFIG,
            key: "model_type".into(),
            actual: format!("{}, without an encoder for {id}", self.family()),
            expected: format!("an encoder for {id}"),
        })
    }
}

/// Configuration that an encoder's output depends on beside its weights, as text.
fn encoder_settings(
    dir: &Path,
    file: &JsonFile,
    (encoder, modality): (&EncoderSpec, Modality),
    tokenizer: &Tokenizer,
) -> Result<String, ModelError> {
    // An encoder that reads text, alone or with an image, is the text model's as well; of several towers some have keys outside
    // the first one's.
    let reads_text = matches!(encoder.stem, StemSpec::Tokens { .. } | StemSpec::Captioned(_));
    let is_whole = reads_text || encoder.extras.tower.is_some();
    let tower_config = file.get("vision_config").or_else(|| file.get("audio_config")).filter(|_| !is_whole);
    let encoder_config = tower_config.unwrap_or(file.value());
    let mut processor = match modality {
        Modality::Text => String::new(),
        // The sizes are in the configuration.
        Modality::Image
            if encoder.extras.tower.is_some() || matches!(encoder.stem, StemSpec::SquareViews(_)) =>
        {
            RESAMPLING.to_owned()
        }
        Modality::Image => {
            format!("{}\n{RESAMPLING}", JsonFile::processor(dir, ItemProcessor::Image)?.value())
        }
        Modality::Audio => JsonFile::processor(dir, ItemProcessor::Audio)?.value().to_string(),
        Modality::Video => {
            format!("{}\n{RESAMPLING}\n{SAMPLING}", JsonFile::processor(dir, ItemProcessor::Video)?.value())
        }
    };
    if reads_text {
        // The tokens of a text depend on the tokenizer.
        processor.push_str(&tokenizer.digest().to_string());
    }
    Ok(format!("{encoder_config}\n{processor}"))
}

fn directory_name(source: &ModelSource) -> ModelName {
    let dir = source.dir.canonicalize().unwrap_or_else(|_| source.dir.clone());
    ModelName::new(dir.file_name().map_or_else(|| "model".into(), |n| n.to_string_lossy().into_owned()))
}
