//! Contents of a model directory and the memory that serving takes, from headers alone.
//!
//! Each stage is loaded on a back end that only adds up ([`FootprintBackend`]). So the numbers are those of the loader
//! itself, and a missing tensor is the same error as in serving. No weight is read.

use super::activations::activation_bytes;
use super::example::{example_inputs, example_text};
use super::{CONFIG, FootprintBackend, Model};
use crate::decoder::{Decoder, TransformerDecoder};
use crate::encoder::{Encoder, TransformerEncoder};
use crate::error::ModelError;
use crate::files::JsonFile;
use crate::preprocess::EncoderInput;
use crate::quantization::Quantization;
use crate::spec::EncoderSpec;
use crate::weights::{StoredWeights, WeightFormat, Weights};
use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_kernels::{Backend, Precision};

/// Precisions that footprints are taken in, in the order of [`BytesByPrecision`].
const PRECISIONS: [Precision; 4] = [Precision::F32, Precision::Bf16, Precision::Int8, Precision::Int4];

/// A number of bytes for each precision of the CPU back end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BytesByPrecision {
    /// With `--precision f32`.
    pub f32: usize,
    /// With `--precision bf16`.
    pub bf16: usize,
    /// With `--precision int8`.
    pub int8: usize,
    /// With `--precision int4`.
    pub int4: usize,
}

impl BytesByPrecision {
    /// `n` times as much.
    #[must_use]
    pub fn times(self, n: usize) -> Self {
        self.map(|bytes| bytes.saturating_mul(n))
    }

    /// The sum of both.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        let sum = |of: fn(&Self) -> usize| of(&self).saturating_add(of(&other));
        Self::of([sum(|s| s.f32), sum(|s| s.bf16), sum(|s| s.int8), sum(|s| s.int4)])
    }

    /// The larger of both.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        let larger = |of: fn(&Self) -> usize| of(&self).max(of(&other));
        Self::of([larger(|s| s.f32), larger(|s| s.bf16), larger(|s| s.int8), larger(|s| s.int4)])
    }

    /// The number of a precision.
    pub fn in_precision(self, precision: Precision) -> usize {
        match precision {
            Precision::F32 => self.f32,
            Precision::Bf16 => self.bf16,
            Precision::Int8 => self.int8,
            Precision::Int4 => self.int4,
        }
    }

    /// From one number for each precision, in the order of [`PRECISIONS`].
    fn of([f32, bf16, int8, int4]: [usize; PRECISIONS.len()]) -> Self {
        Self { f32, bf16, int8, int4 }
    }

    fn map(self, f: impl Fn(usize) -> usize) -> Self {
        Self::of([self.f32, self.bf16, self.int8, self.int4].map(f))
    }
}

/// The tensors of a stage, and their bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageInventory {
    /// Stored tensors it reads.
    pub n_tensors: usize,
    /// Parameters that they stand for: the elements of these tensors, if they are not quantized.
    pub n_parameters: usize,
    /// Bytes of these tensors in the files.
    pub stored_bytes: usize,
    /// Bytes of these tensors in memory. A table that is also the head is held twice; panels are padded.
    pub loaded: BytesByPrecision,
}

/// Bytes of KV cache of tokens and encoder rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvBytes {
    /// Bytes of a token of a sequence, all layers.
    pub per_token: BytesByPrecision,
    /// Bytes of a token that is behind a window, which layers without one hold; `None` where none has a window.
    pub behind_window: Option<KvBehindWindow>,
    /// Bytes of an encoder row that is cross-attended to, all layers; `None` where rows replace token embeddings.
    pub cross_per_row: Option<BytesByPrecision>,
}

/// KV of a token that layers with a sliding window see no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvBehindWindow {
    /// Keys of the longest window.
    pub window: usize,
    /// Bytes of the token.
    pub per_token: BytesByPrecision,
}

/// An item that illustrates sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExampleItem {
    /// Description of the item, such as `30 s of audio`.
    pub item: String,
    /// Encoder rows of the item.
    pub n_rows: usize,
    /// Those that are cross-attended to, where any are.
    pub n_cross_rows: usize,
}

/// Contents of a model directory, and the memory that serving takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inventory {
    /// The first of the configuration's `architectures`.
    pub architecture: Option<String>,
    /// File format of the weights.
    pub weights: WeightFormat,
    /// Method by which they are quantized; `None`: they are not.
    pub quantization: Option<Quantization>,
    /// The encoder stage, where the model has one.
    pub encoder: Option<EncoderInventory>,
    /// The prefill and decode stages.
    pub decoder: StageInventory,
    /// Tensors that both read, in the order of their names.
    pub shared: Vec<String>,
    /// Tensors that neither reads, in the order of their names.
    pub unused: Vec<String>,
    /// Bytes of KV cache.
    pub kv: KvBytes,
    /// Bytes of the recurrent states of a sequence, all layers, in every precision; `None`: no layer has one.
    pub state_bytes: Option<usize>,
    /// Experts, where layers have some.
    pub experts: Option<ExpertsInventory>,
}

/// The mixtures of experts of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsInventory {
    /// Layers that have experts.
    pub n_layers: usize,
    /// Experts of such a layer.
    pub n_experts: usize,
    /// Those that a token goes to.
    pub top_k: usize,
    /// Parameters of the decoder that a token meets.
    pub n_active: usize,
}

/// The encoder stage, and what leaves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncoderInventory {
    /// Its tensors, of all towers.
    pub stage: StageInventory,
    /// Most bytes of activations that a forward of the example has at once, its output included; of several towers, which take
    /// turns, the one with most. 0 for an encoder without an example.
    pub activations: BytesByPrecision,
    /// Bytes of an encoder row in transfer; of several towers the widest row's.
    pub row: BytesByPrecision,
    /// An item of the model's kind.
    pub example: ExampleItem,
    /// Towers that can be on workers of their own; empty: there is one.
    pub towers: Vec<TowerInventory>,
}

/// A tower of an encoder in which several read the same item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TowerInventory {
    /// Its name.
    pub name: &'static str,
    /// Its tensors.
    pub stage: StageInventory,
    /// Bytes of a row of its output in transfer.
    pub row: BytesByPrecision,
    /// Most bytes of activations that a forward of the example has at once, as [`EncoderInventory::activations`].
    pub activations: BytesByPrecision,
    /// Rows of the example.
    pub n_rows: usize,
}

impl Model {
    /// Takes the inventory. Reads headers of weight files only.
    ///
    /// # Errors
    /// As [`Model::load_encoder`] and [`Model::load_decoder`].
    pub fn inventory(&self) -> Result<Inventory, ModelError> {
        let (encoder, encoder_names) = match &self.spec.encoder {
            Some(spec) => {
                let (encoder, names) = self.encoder_inventory(spec)?;
                (Some(encoder), names)
            }
            None => (None, BTreeSet::new()),
        };
        let mut blocks = Vec::new();
        let mut state_bytes = None;
        let (decoder, decoder_names) = self.stage(|weights, backend| {
            // Not behind `dyn`, whose table would have the code of a forward pass compiled for this back end too.
            let info = TransformerDecoder::load(&self.spec.decoder, weights, backend)?.info();
            state_bytes = info.state_slot_bytes.map(NonZeroUsize::get);
            let own = info.self_block_bytes.saturating_mul(info.kv_groups.n_groups());
            blocks.push((own, info.cross_attention.then_some(info.cross_block_bytes)));
            Ok(())
        })?;
        let Ok(blocks) = <[(usize, Option<usize>); PRECISIONS.len()]>::try_from(blocks) else {
            unreachable!("a stage is loaded once for each precision")
        };
        let per_row = |blocks| BytesByPrecision::of(blocks).map(|bytes| bytes / KV_BLOCK_TOKENS);
        let has_cross = blocks.iter().all(|(_, cross)| cross.is_some());
        let groups = self.spec.decoder.kv_groups().groups;
        let n_whole = groups.windows().iter().filter(|window| window.is_none()).count();
        let behind_window = groups.windows().iter().flatten().max().map(|window| KvBehindWindow {
            window: window.get() as usize,
            per_token: per_row(blocks.map(|(own, _)| own / groups.n_groups() * n_whole)),
        });
        let kv = KvBytes {
            per_token: per_row(blocks.map(|(own, _)| own)),
            behind_window,
            cross_per_row: has_cross.then(|| per_row(blocks.map(|(_, cross)| cross.unwrap_or(0)))),
        };
        let stored = Weights::survey(&self.source.dir)?;
        let used = |name: &str| encoder_names.contains(name) || decoder_names.contains(name);
        let unused = surveyed(&stored).stored().map(|(name, ..)| name).filter(|name| !used(name));
        let config = JsonFile::read(&self.source.dir, CONFIG)?;
        let experts = self.experts_inventory(decoder.n_parameters);
        Ok(Inventory {
            architecture: config.get("architectures").and_then(|a| Some(a.get(0)?.as_str()?.to_owned())),
            weights: surveyed(&stored).format(),
            quantization: surveyed(&stored).quantization().copied(),
            encoder,
            decoder,
            shared: encoder_names.intersection(&decoder_names).cloned().collect(),
            unused: unused.map(str::to_owned).collect(),
            kv,
            state_bytes,
            experts,
        })
    }

    /// The experts of a decoder of so many parameters.
    fn experts_inventory(&self, n_parameters: usize) -> Option<ExpertsInventory> {
        let stack = &self.spec.decoder.stack;
        let layers: Vec<_> = stack.layers.iter().filter_map(|layer| layer.experts.as_ref()).collect();
        let idle: usize = layers.iter().map(|experts| experts.n_idle_weights(stack.hidden)).sum();
        layers.first().map(|experts| ExpertsInventory {
            n_layers: layers.len(),
            n_experts: experts.n_experts,
            top_k: experts.routing.top_k,
            n_active: n_parameters.saturating_sub(idle),
        })
    }

    /// The inventory of an encoder and the names of its tensors.
    fn encoder_inventory(
        &self,
        spec: &EncoderSpec,
    ) -> Result<(EncoderInventory, BTreeSet<String>), ModelError> {
        let load = |spec: &EncoderSpec, weights: &Weights, backend: &FootprintBackend| {
            // Not behind `dyn` either.
            TransformerEncoder::load(spec, weights, &backend.for_encoders()).map(|loaded| loaded.hidden())
        };
        let mut hidden = 0;
        let (stage, names) = self.stage(|weights, backend| {
            for tower in spec.towers() {
                hidden = hidden.max(load(tower, weights, backend)?);
            }
            Ok(())
        })?;
        let row_of = |hidden| BytesByPrecision::of([4, 2, 2, 2]).times(hidden);
        let inputs = example_inputs(spec, &self.processors);
        let (example, n_rows) = example(spec, &inputs);
        let of_towers = self.activations_of(spec, &inputs, 0)?;
        let activations = largest(&of_towers);
        let tower = |((tower, n_rows), activations): ((&EncoderSpec, usize), BytesByPrecision)| {
            let mut hidden = 0;
            let (stage, _) = self.stage(|weights, backend| {
                hidden = load(tower, weights, backend)?;
                Ok(())
            })?;
            Ok(TowerInventory { name: tower.tower_name(), stage, row: row_of(hidden), activations, n_rows })
        };
        let several = spec.towers().zip(n_rows).zip(of_towers);
        let several = several.filter(|((tower, _), _)| tower.extras.tower.is_some());
        let towers = several.map(tower).collect::<Result<_, ModelError>>()?;
        Ok((EncoderInventory { stage, activations, row: row_of(hidden), example, towers }, names))
    }

    /// Loads a stage on a [`FootprintBackend`], once for each precision. Returns its inventory and the names of its tensors.
    fn stage(
        &self,
        mut load: impl FnMut(&Weights, &FootprintBackend) -> Result<(), ModelError>,
    ) -> Result<(StageInventory, BTreeSet<String>), ModelError> {
        let weights = Weights::survey(&self.source.dir)?;
        let mut loaded = [0; PRECISIONS.len()];
        for (n_bytes, precision) in loaded.iter_mut().zip(PRECISIONS) {
            let backend = FootprintBackend::new(precision)?;
            load(&weights, &backend)?;
            *n_bytes = backend.footprint().n_bytes;
        }
        let stored = surveyed(&weights);
        let names = stored.taken();
        let mut stage = StageInventory {
            n_tensors: names.len(),
            n_parameters: 0,
            stored_bytes: 0,
            loaded: BytesByPrecision::of(loaded),
        };
        for (_, n_elements, n_bytes) in stored.stored().filter(|(name, ..)| names.contains(*name)) {
            stage.n_parameters += n_elements;
            stage.stored_bytes += n_bytes;
        }
        Ok((stage, names))
    }

    /// Most bytes of activations that a forward of an encoder has at once, over as many of the example as have `n_rows` rows in
    /// its layers, and at least one; of several towers the most. Nothing is read or computed.
    ///
    /// # Errors
    /// As [`Model::load_encoder`].
    pub fn encoder_activations(&self, n_rows: usize) -> Result<BytesByPrecision, ModelError> {
        match &self.spec.encoder {
            Some(spec) => {
                let inputs = example_inputs(spec, &self.processors);
                Ok(largest(&self.activations_of(spec, &inputs, n_rows)?))
            }
            None => Ok(BytesByPrecision::default()),
        }
    }

    /// Those of each tower; 0 of one whose processor refuses a plain item.
    fn activations_of(
        &self,
        spec: &EncoderSpec,
        inputs: &[Option<EncoderInput>],
        n_rows: usize,
    ) -> Result<Vec<BytesByPrecision>, ModelError> {
        let weights = Weights::survey(&self.source.dir)?;
        let of_tower = |(tower, input): (&EncoderSpec, &Option<EncoderInput>)| {
            let Some(input) = input else { return Ok(BytesByPrecision::default()) };
            let of_item = (input.n_tokens as usize).saturating_mul(tower.merged_rows()).max(1);
            let batch = vec![input; (n_rows / of_item).max(1)];
            let mut most = [0; PRECISIONS.len()];
            for (most, precision) in most.iter_mut().zip(PRECISIONS) {
                *most = activation_bytes(tower, &weights, precision, &batch)?;
            }
            Ok(BytesByPrecision::of(most))
        };
        spec.towers().zip(inputs).map(of_tower).collect()
    }
}

/// The most of several towers.
fn largest(of_towers: &[BytesByPrecision]) -> BytesByPrecision {
    of_towers.iter().copied().fold(BytesByPrecision::default(), BytesByPrecision::max)
}

/// Sizes of a plain item, and the rows of each tower.
fn example(spec: &EncoderSpec, inputs: &[Option<EncoderInput>]) -> (ExampleItem, Vec<usize>) {
    let item = example_text(spec);
    let n_rows: Vec<usize> =
        inputs.iter().map(|input| input.as_ref().map_or(0, |input| input.n_tokens as usize)).collect();
    // Of several towers only the last one's.
    let n_cross_rows = n_rows.last().copied().unwrap_or_default();
    (ExampleItem { item, n_rows: n_rows.iter().sum(), n_cross_rows }, n_rows)
}

fn surveyed(weights: &Weights) -> &StoredWeights {
    match weights {
        Weights::Stored(stored) => stored,
        Weights::Dummy { .. } => unreachable!("a survey is of stored weights"),
    }
}
