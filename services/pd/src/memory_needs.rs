//! Memory that the models of a worker take, from the headers of their files and their specs, for [`crate::memory_plan`].

use crate::engine_settings::EngineSettings;
use crate::error::PdError;
use crate::memory_plan::{MemoryPlan, ModelCaches, ModelNeeds, SetSizes};
use triptych_core::RowTypes;
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_models::compute::{ComputeConfig, Device};
use triptych_models::model::BytesByPrecision;
use triptych_models::spec::{ItemsSpec, StackSpec};
use triptych_models::{Model, ModelError, ModelSource};

/// Encoder rows that a step projects to keys and values at most (`engine::scheduler`).
const PROJECTED_ROWS: usize = 4096;
/// Rows of an encoder's stack in a batch: patches of the default batch of output tokens.
const ENCODED_ROWS: usize = 8192;

/// Settings of a worker that its memory depends on.
pub struct MemorySettings {
    /// Bytes for everything.
    pub total: usize,
    /// Computation.
    pub compute: ComputeConfig,
    /// Element types of encoder outputs.
    pub rows: RowTypes,
    /// Sizes of engines.
    pub engine: EngineSettings,
    /// Encoders in the process.
    pub encoders: ColocatedEncoders,
}

/// Encoders of a worker, as far as its memory depends on them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ColocatedEncoders {
    /// It has none.
    #[default]
    Absent,
    /// Their weights are in memory from the start.
    Held,
    /// Their weights come and go; their room is kept.
    Lazy,
}

impl MemorySettings {
    /// Divides the memory among models.
    ///
    /// # Errors
    /// [`PdError`] for a model that cannot be read, a device with memory of its own, or too little memory.
    pub fn plan(&self, sources: &[ModelSource]) -> Result<MemoryPlan, PdError> {
        self.plan_beside(0, None, sources)
    }

    /// The same beside models that have `taken` bytes, and encoder outputs whose room is given.
    ///
    /// # Errors
    /// As [`Self::plan`].
    pub fn plan_beside(
        &self,
        taken: usize,
        rows: Option<usize>,
        sources: &[ModelSource],
    ) -> Result<MemoryPlan, PdError> {
        if let Device::Cuda(_) = self.compute.device {
            let text = "--memory-mib divides the memory of the CPU; on a GPU caches take what weights leave of its own";
            return Err(PdError::Memory(text.into()));
        }
        let needs = |source: &ModelSource| {
            let failed = |e| PdError::Model { dir: source.dir.display().to_string(), source: e };
            self.needs(source).map_err(failed)
        };
        let needs = sources.iter().map(needs).collect::<Result<Vec<_>, _>>()?;
        let EngineSettings { self_kv_bytes, cross_kv_bytes, state_bytes, .. } = self.engine;
        let set = SetSizes { self_kv: self_kv_bytes, cross_kv: cross_kv_bytes, states: state_bytes, rows };
        MemoryPlan::divide(self.total.saturating_sub(taken), &needs, set)
            .map_err(|e| PdError::Memory(e.to_string()))
    }

    fn needs(&self, source: &ModelSource) -> Result<ModelNeeds, ModelError> {
        let model = Model::open(source)?;
        let inventory = model.inventory()?;
        let ComputeConfig { precision, kv, .. } = self.compute;
        // The CPU has no KV in int4.
        let kv = kv.unwrap_or(precision).of_encoders();
        let block = |bytes: BytesByPrecision| bytes.in_precision(kv).saturating_mul(KV_BLOCK_TOKENS);
        let encoder = inventory.encoder.as_ref();
        let encoder_weights = encoder
            .filter(|_| self.encoders != ColocatedEncoders::Absent)
            .map_or(0, |e| e.stage.loaded.in_precision(precision));
        let max_rows = model.max_cross_rows().or_else(|| model.preprocess().max_rows());
        let dtype = self.rows.of(model.name().as_str());
        let groups = model.spec().decoder.kv_groups().groups;
        // A span whose rows attend to each other is one chunk, however long.
        let chunk = self.engine.token_budget.max(max_rows.unwrap_or(0));
        // A row of f32 has four bytes a value.
        let row = encoder.map_or(0, |e| (e.row.f32 / size_of::<f32>()).saturating_mul(dtype.size()) + 4);
        let encodes = self.encodes(&model)?;
        Ok(ModelNeeds {
            lazy_weights: if self.encoders == ColocatedEncoders::Lazy { encoder_weights } else { 0 },
            weights: inventory.decoder.loaded.in_precision(precision).saturating_add(encoder_weights),
            activations: self.step(&model).saturating_add(encodes),
            encodes,
            self_block: block(inventory.kv.per_token) / groups.n_groups(),
            self_blocks: groups.n_blocks(model.max_context(), chunk),
            cross_block: inventory.kv.cross_per_row.map_or(0, block),
            state_slot: inventory.state_bytes.unwrap_or(0),
            max_context: model.max_context(),
            max_rows: encoder.map_or(0, |e| max_rows.unwrap_or(model.max_context()).max(e.example.n_rows)),
            row,
        })
    }

    /// Bytes of the activations of the largest step.
    fn step(&self, model: &Model) -> usize {
        let decoder = &model.spec().decoder;
        let logits = self.engine.max_sequences.saturating_mul(decoder.vocab).saturating_mul(2);
        let step = self.engine.token_budget.saturating_mul(values_of_a_row(&decoder.stack));
        let projected = match &decoder.items {
            ItemsSpec::CrossAttention(cross) => {
                let shape = cross.attention.shape;
                cross.encoder_hidden + 2 * shape.n_kv_heads * shape.head_dim
            }
            ItemsSpec::Embedded { .. } => 0,
        };
        let projected = PROJECTED_ROWS.saturating_mul(projected);
        let values = [logits, step, projected].into_iter().fold(0, usize::saturating_add);
        values.saturating_mul(size_of::<f32>())
    }

    /// Bytes of the activations of the largest batch of an encoder here; forwards of several wait for each other.
    fn encodes(&self, model: &Model) -> Result<usize, ModelError> {
        match self.encoders {
            ColocatedEncoders::Absent => Ok(0),
            ColocatedEncoders::Held | ColocatedEncoders::Lazy => {
                Ok(model.encoder_activations(ENCODED_ROWS)?.in_precision(self.compute.precision))
            }
        }
    }
}

/// Values that a layer has of a row at once: the residual stream and its norm, queries, keys, values and the attended, and the
/// inner rows of the feed-forward block.
fn values_of_a_row(stack: &StackSpec) -> usize {
    let shape = stack.attention.shape;
    let attention = 2 * (shape.n_heads + shape.n_kv_heads) * shape.head_dim;
    4 * stack.hidden + attention + 3 * stack.feed_forward.width
}

impl EngineSettings {
    /// The same with the caches of a division.
    pub fn with_caches(self, caches: ModelCaches) -> Self {
        Self {
            self_kv_bytes: Some(caches.self_kv),
            cross_kv_bytes: Some(caches.cross_kv),
            state_bytes: Some(caches.states),
            host_kv_bytes: caches.host_kv,
            ..self
        }
    }
}
