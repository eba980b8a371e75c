//! The division of a stated amount of memory (`--memory-mib`) of an encoder worker among weights, activations, jobs and cached
//! outputs, from headers of the models' files, before a weight is read.
//!
//! Forwards share the room for activations ([`crate::bound`]); jobs share the room for items that are preprocessed and for rows
//! that are not published yet ([`crate::pool`]). Mapped files, the program itself, adapters and what the allocator keeps are within a
//! reserve.

use crate::error::EncoderError;
use crate::room::ByteRoom;
use crate::towers::TowerChoice;
use std::fmt;
use std::sync::Arc;
use thiserror::Error;
use triptych_core::{DType, RowTypes};
use triptych_models::compute::{ComputeConfig, KEPT_BYTES};
use triptych_models::preprocess::EncoderInput;
use triptych_models::{Model, ModelError, ModelSource};

/// Memory for what is not counted: the program, its threads and messages.
const RESERVE_BYTES: usize = 64 << 20;
/// Part of the budget that the reserve is at least, as a divisor: what the allocator keeps grows with what it gives.
const RESERVE_SHARE: usize = 16;
/// Part of what is left beside one item that jobs have, as a divisor; activations have the others.
const JOBS_SHARE: usize = 4;

/// Settings of a worker that its memory depends on.
#[derive(Clone)]
pub struct MemorySettings {
    /// Bytes for everything.
    pub total: usize,
    /// Bytes of outputs that are cached after they were published.
    pub rows: usize,
    /// Computation.
    pub compute: ComputeConfig,
    /// Element types of published rows.
    pub dtype: RowTypes,
    /// Towers to hold, of models in which several read the same item.
    pub towers: TowerChoice,
}

/// Bound on the memory of encoders.
#[derive(Clone)]
pub enum EncoderMemory {
    /// Each part takes what it takes.
    Unbounded,
    /// A worker's memory, which is divided.
    Divided(MemorySettings),
    /// Bytes for activations of all forwards that run at once: the process divides its memory itself.
    Forwards(usize),
}

/// Rooms that encoders share; `None`: without a bound.
#[derive(Default)]
pub struct Rooms {
    /// Room for activations.
    pub forwards: Option<ByteRoom>,
    /// Room for jobs.
    pub jobs: Option<ByteRoom>,
    /// Their division, where it is the encoders' own.
    pub divided: Option<WorkerMemory>,
}

/// Bytes that one model takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EncoderNeeds {
    /// Bytes of the weights of the towers that are held.
    pub weights: usize,
    /// Those towers: each has a thread, which keeps some memory for its next forward.
    pub n_towers: usize,
    /// Description of a plain item; empty where no tower reads one.
    pub example: String,
    /// Most bytes of activations of a plain item in one of them.
    pub activations: usize,
    /// Most bytes of that item's job.
    pub job: usize,
}

/// Bytes of each part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// The budget.
    pub total: usize,
    /// Bytes that are not counted.
    pub reserve: usize,
    /// Weights of all models.
    pub weights: usize,
    /// Memory that threads keep between two forwards.
    pub kept: usize,
    /// Cached outputs.
    pub rows: usize,
    /// Items that are preprocessed, and rows that are not published yet.
    pub jobs: usize,
    /// Activations of all forwards that run at once.
    pub activations: usize,
}

/// A budget that cannot hold a plain item of each model.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "--memory-mib {}: weights take {}, activations of {example} {}, its job {}, what {n_threads} threads keep {}, cached outputs \
     (--rows-mib) {} and the rest {} MiB; {} or more are needed, or a smaller --precision or --rows-mib, or fewer --towers",
    mib(*total), mib(*weights), mib(*activations), mib(*job), mib(*kept), mib(*rows), mib(*reserve), mib(*needed)
)]
pub struct TooLittleMemory {
    /// The budget.
    pub total: usize,
    /// Bytes of the weights.
    pub weights: usize,
    /// Description of the item with most activations.
    pub example: String,
    /// Bytes of its activations.
    pub activations: usize,
    /// Bytes of a plain item's job.
    pub job: usize,
    /// Threads that compute.
    pub n_threads: usize,
    /// Bytes that they keep.
    pub kept: usize,
    /// Bytes of cached outputs.
    pub rows: usize,
    /// Bytes that are not counted.
    pub reserve: usize,
    /// The least budget.
    pub needed: usize,
}

/// Rooms of a worker whose memory is stated, and what they are divided by.
#[derive(Clone)]
pub struct WorkerMemory {
    settings: Arc<MemorySettings>,
    /// Room for activations.
    pub forwards: ByteRoom,
    /// Room for jobs.
    pub jobs: ByteRoom,
}

fn mib(bytes: usize) -> usize {
    bytes.div_ceil(1 << 20)
}

/// Most bytes of a job whose item is preprocessed: its input, then its rows as they are computed and as they are published.
pub fn job_bytes(input: &EncoderInput, hidden: usize, dtype: DType) -> usize {
    let n_values = (input.n_tokens as usize).saturating_mul(hidden);
    input.features.n_bytes().max(rows_bytes(n_values, dtype))
}

/// Bytes of so many values of rows as they are computed and as they are published.
pub fn rows_bytes(n_values: usize, dtype: DType) -> usize {
    n_values.saturating_mul(size_of::<f32>() + dtype.size())
}

impl EncoderMemory {
    /// Rooms for models.
    ///
    /// # Errors
    /// As [`MemorySettings::plan`].
    pub fn rooms(self, sources: &[ModelSource]) -> Result<Rooms, EncoderError> {
        Ok(match self {
            Self::Unbounded => Rooms::default(),
            Self::Forwards(n_bytes) => Rooms { forwards: Some(ByteRoom::new(n_bytes)), ..Rooms::default() },
            Self::Divided(settings) => {
                let memory = WorkerMemory::new(settings, sources)?;
                let (forwards, jobs) = (Some(memory.forwards.clone()), Some(memory.jobs.clone()));
                Rooms { forwards, jobs, divided: Some(memory) }
            }
        })
    }
}

impl MemorySettings {
    /// Divides the memory among models.
    ///
    /// # Errors
    /// [`EncoderError`] for a model that cannot be read, a device with memory of its own, or too little memory.
    pub fn plan(&self, sources: &[ModelSource]) -> Result<MemoryPlan, EncoderError> {
        if !self.compute.device.is_cpu() {
            let text = "--memory-mib divides the memory of the CPU, and a GPU has its own";
            return Err(EncoderError::Memory(text.into()));
        }
        let needs = |source: &ModelSource| {
            let failed = |e| EncoderError::Model { dir: source.dir.display().to_string(), source: e };
            self.needs(source).map_err(failed)
        };
        let needs = sources.iter().map(needs).collect::<Result<Vec<_>, _>>()?;
        MemoryPlan::divide(self.total, self.rows, &needs).map_err(|e| EncoderError::Memory(e.to_string()))
    }

    fn needs(&self, source: &ModelSource) -> Result<EncoderNeeds, ModelError> {
        let model = Model::open(source)?;
        let dtype = self.dtype.of(model.name().as_str());
        let mut needs = EncoderNeeds::default();
        for (tower, _) in self.towers.of(&model)? {
            let Some(mut forecast) = model.memory_forecast(tower, self.compute.precision)? else { continue };
            needs.n_towers += 1;
            needs.weights = needs.weights.saturating_add(forecast.weight_bytes());
            let Some((example, input)) = model.example_input(tower) else { continue };
            needs.example = example;
            needs.activations = needs.activations.max(forecast.item_bytes(&input)?);
            needs.job = needs.job.max(job_bytes(&input, forecast.hidden(), dtype));
        }
        Ok(needs)
    }
}

impl MemoryPlan {
    /// Divides `total` bytes. Beside the cached outputs and what one plain item takes, a quarter of the rest is for jobs, and
    /// activations have the others.
    ///
    /// # Errors
    /// [`TooLittleMemory`] with the least that would do.
    pub fn divide(total: usize, rows: usize, models: &[EncoderNeeds]) -> Result<Self, TooLittleMemory> {
        let sum = |of: fn(&EncoderNeeds) -> usize| models.iter().map(of).fold(0, usize::saturating_add);
        let (weights, n_threads) = (sum(|m| m.weights), sum(|m| m.n_towers));
        let kept = n_threads.saturating_mul(KEPT_BYTES);
        let largest = models.iter().max_by_key(|m| m.activations);
        let activations = largest.map_or(0, |m| m.activations);
        let job = models.iter().map(|m| m.job).max().unwrap_or(0);
        let fixed = [weights, kept, rows, activations, job].into_iter().fold(0, usize::saturating_add);
        // The least T with T - max(R, T / 16) >= fixed.
        let needed = fixed
            .saturating_add(RESERVE_BYTES)
            .max(fixed.saturating_add(fixed / (RESERVE_SHARE - 1)).saturating_add(RESERVE_SHARE));
        let reserve = RESERVE_BYTES.max(total / RESERVE_SHARE);
        if total < needed {
            let example = largest.map(|m| m.example.clone()).unwrap_or_default();
            return Err(TooLittleMemory {
                total,
                weights,
                example,
                activations,
                job,
                n_threads,
                kept,
                rows,
                reserve,
                needed,
            });
        }
        let rest = total - reserve - fixed;
        let jobs = job + rest / JOBS_SHARE;
        let activations = activations + rest - rest / JOBS_SHARE;
        Ok(Self { total, reserve, weights, kept, rows, jobs, activations })
    }

    /// Bytes of all parts.
    pub fn sum(&self) -> usize {
        let parts = [self.reserve, self.weights, self.kept, self.rows, self.jobs, self.activations];
        parts.into_iter().fold(0, usize::saturating_add)
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "of {} MiB: weights {}, activations {}, jobs {}, kept by threads {}, cached outputs {}, reserve {}",
            mib(self.total),
            mib(self.weights),
            mib(self.activations),
            mib(self.jobs),
            mib(self.kept),
            mib(self.rows),
            mib(self.reserve)
        )
    }
}

impl WorkerMemory {
    /// Divides the memory among the models of the start, which the log has.
    ///
    /// # Errors
    /// As [`MemorySettings::plan`].
    pub fn new(settings: MemorySettings, sources: &[ModelSource]) -> Result<Self, EncoderError> {
        let plan = settings.plan(sources)?;
        tracing::info!("memory {plan}");
        let (forwards, jobs) = (ByteRoom::new(plan.activations), ByteRoom::new(plan.jobs));
        Ok(Self { settings: Arc::new(settings), forwards, jobs })
    }

    /// Divides it anew, among models that change.
    ///
    /// # Errors
    /// As [`MemorySettings::plan`]; the division stays as it was.
    pub fn divide(&self, sources: &[ModelSource]) -> Result<(), EncoderError> {
        let plan = self.settings.plan(sources)?;
        tracing::info!("memory {plan}");
        self.forwards.resize(plan.activations);
        self.jobs.resize(plan.jobs);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: usize = 1 << 20;

    /// 100 MiB of weights in two towers, and an image.
    fn towers() -> EncoderNeeds {
        EncoderNeeds {
            weights: 100 * MIB,
            n_towers: 2,
            example: "an image".into(),
            activations: 40 * MIB,
            job: 10 * MIB,
        }
    }

    #[test]
    fn one_item_fits_and_the_rest_is_shared_out() {
        let plan = MemoryPlan::divide(512 * MIB, 32 * MIB, &[towers()]).unwrap();
        // 138 MiB are left.
        assert_eq!((plan.activations, plan.jobs), ((40 + 103) * MIB + MIB / 2, 44 * MIB + MIB / 2));
        assert_eq!(
            plan.to_string(),
            "of 512 MiB: weights 100, activations 144, jobs 45, kept by threads 128, cached outputs 32, reserve 64"
        );
    }

    #[test]
    fn what_cannot_hold_an_item_is_refused_with_every_number_and_the_least_that_does() {
        let refused = MemoryPlan::divide(300 * MIB, 32 * MIB, &[towers()]).unwrap_err();
        assert_eq!(refused.needed, (100 + 128 + 32 + 40 + 10 + 64) * MIB);
        assert_eq!(
            refused.to_string(),
            "--memory-mib 300: weights take 100, activations of an image 40, its job 10, what 2 threads keep 128, cached outputs \
             (--rows-mib) 32 and the rest 64 MiB; 374 or more are needed, or a smaller --precision or --rows-mib, or fewer --towers"
        );
        assert!(MemoryPlan::divide(refused.needed, 32 * MIB, &[towers()]).is_ok());
    }

    fn needs() -> impl Strategy<Value = EncoderNeeds> {
        let sizes = (0usize..4000 * MIB, 0usize..9, 0usize..500 * MIB, 0usize..100 * MIB);
        sizes.prop_map(|(weights, n_towers, activations, job)| EncoderNeeds {
            weights,
            n_towers,
            example: String::new(),
            activations,
            job,
        })
    }

    proptest! {
        #[test]
        fn parts_never_exceed_the_budget_and_hold_an_item_of_each_model(
            models in prop::collection::vec(needs(), 0..4),
            total in 0usize..100_000 * MIB,
            rows in 0usize..1000 * MIB,
        ) {
            match MemoryPlan::divide(total, rows, &models) {
                Ok(plan) => {
                    prop_assert!(plan.sum() <= total, "{plan:?}");
                    for model in &models {
                        prop_assert!(plan.activations >= model.activations && plan.jobs >= model.job);
                    }
                }
                Err(refused) => {
                    prop_assert!(refused.needed > total);
                    prop_assert!(MemoryPlan::divide(refused.needed, rows, &models).is_ok());
                }
            }
        }
    }
}
