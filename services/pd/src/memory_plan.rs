//! The division of a stated amount of memory (`--memory-mib`) among weights, activations, caches and encoder outputs.
//!
//! Pure: it is told what models take, as their headers say before a weight is read. What is set by a flag of its own is kept; the
//! rest is shared out. A division that could not hold one request of each model's length is refused. Mapped files, the program
//! itself and what the allocator keeps are within a reserve.

use std::fmt;
use thiserror::Error;
use triptych_core::shape::KV_BLOCK_TOKENS;

/// Memory for what is not counted: the program, its threads, prompts and messages.
const RESERVE_BYTES: usize = 64 << 20;
/// Part of the budget that the reserve is at least, as a divisor: what the allocator keeps grows with what it gives.
const RESERVE_SHARE: usize = 16;

/// Bytes that one model takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelNeeds {
    /// Bytes of its weights, of colocated encoders too.
    pub weights: usize,
    /// Those of them that are loaded when a job needs them: their room is kept.
    pub lazy_weights: usize,
    /// Bytes of activations of the largest step, and of the largest batch of its encoders here.
    pub activations: usize,
    /// Of them those of that batch.
    pub encodes: usize,
    /// Bytes of a block of self-attention KV.
    pub self_block: usize,
    /// Bytes of a block of cross-attention KV; 0 without.
    pub cross_block: usize,
    /// Bytes of a slot of recurrent states; 0 without.
    pub state_slot: usize,
    /// Most blocks of self-attention KV that a sequence of the longest context holds.
    pub self_blocks: usize,
    /// Most tokens of a sequence.
    pub max_context: usize,
    /// Encoder rows of the largest input; 0 without an encoder.
    pub max_rows: usize,
    /// Bytes of an encoder row; 0 without an encoder.
    pub row: usize,
}

/// Sizes that are set, in bytes; `None`: to be divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetSizes {
    /// Self-attention KV of each model.
    pub self_kv: Option<usize>,
    /// Cross-attention KV of each model.
    pub cross_kv: Option<usize>,
    /// Recurrent states of each model.
    pub states: Option<usize>,
    /// Encoder outputs of the worker.
    pub rows: Option<usize>,
}

/// Bytes of each part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// The budget.
    pub total: usize,
    /// Bytes that are not counted.
    pub reserve: usize,
    /// Weights of all models.
    pub weights: usize,
    /// Those of them that are loaded when a job needs them.
    pub lazy_weights: usize,
    /// Activations of all models: each has an engine.
    pub activations: usize,
    /// Of them those of forwards of the encoders here.
    pub encodes: usize,
    /// Encoder outputs.
    pub rows: usize,
    /// Caches of each model, in order.
    pub models: Vec<ModelCaches>,
    /// Bytes of weights and activations of each model, in order.
    pub own: Vec<usize>,
}

/// Bytes of a model's caches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelCaches {
    /// Self-attention KV.
    pub self_kv: usize,
    /// Cross-attention KV.
    pub cross_kv: usize,
    /// Recurrent states.
    pub states: usize,
    /// Self-attention KV of preempted sequences.
    pub host_kv: usize,
}

impl ModelCaches {
    fn sum(self) -> usize {
        [self.self_kv, self.cross_kv, self.states, self.host_kv].into_iter().fold(0, usize::saturating_add)
    }
}

/// A budget that cannot hold one request.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "--memory-mib {}: weights take {}, activations {}, one request of each model's length {} and the rest {} MiB; {} or more are \
     needed, or a smaller --precision or --token-budget", mib(*total), mib(*weights), mib(*activations), mib(*request), mib(*reserve),
    mib(*needed)
)]
pub struct TooLittleMemory {
    /// The budget.
    pub total: usize,
    /// Bytes of the weights.
    pub weights: usize,
    /// Bytes of activations.
    pub activations: usize,
    /// Bytes of caches and rows of one request of each model.
    pub request: usize,
    /// Bytes that are not counted.
    pub reserve: usize,
    /// The least budget.
    pub needed: usize,
}

fn mib(bytes: usize) -> usize {
    bytes.div_ceil(1 << 20)
}

impl ModelNeeds {
    /// Caches that hold one sequence of the longest context over the largest input.
    fn least(&self, set: &SetSizes) -> ModelCaches {
        let blocks = |tokens: usize, block: usize| tokens.div_ceil(KV_BLOCK_TOKENS).saturating_mul(block);
        let if_any = |bytes: usize, set: Option<usize>| if bytes == 0 { 0 } else { set.unwrap_or(bytes) };
        ModelCaches {
            self_kv: if_any(self.self_blocks.saturating_mul(self.self_block), set.self_kv),
            cross_kv: if_any(blocks(self.max_rows, self.cross_block), set.cross_kv),
            states: if_any(self.state_slot, set.states),
            host_kv: 0,
        }
    }

    /// Bytes of the rows of one request: of the largest input, or among the tokens of a whole context.
    fn rows(&self) -> usize {
        self.max_rows
            .min(if self.cross_block > 0 { usize::MAX } else { self.max_context })
            .saturating_mul(self.row)
    }
}

impl MemoryPlan {
    /// Divides `total` bytes. Beside what one request of each model takes, an eighth of the rest is for rows and a sixteenth for
    /// preempted sequences; caches have the others, a model its equal part, and in it cross-attention a half, states a quarter.
    ///
    /// # Errors
    /// [`TooLittleMemory`] with the least that would do.
    pub fn divide(total: usize, models: &[ModelNeeds], set: SetSizes) -> Result<Self, TooLittleMemory> {
        let sum = |of: &dyn Fn(&ModelNeeds) -> usize| models.iter().map(of).fold(0, usize::saturating_add);
        let (weights, activations) = (sum(&|m| m.weights), sum(&|m| m.activations));
        let rows = models.iter().map(ModelNeeds::rows).max().unwrap_or(0).max(set.rows.unwrap_or(0));
        let request = sum(&|m| m.least(&set).sum()).saturating_add(rows);
        let fixed = weights.saturating_add(activations).saturating_add(request);
        // The least T with T - max(R, T / 16) >= fixed.
        let needed = fixed
            .saturating_add(RESERVE_BYTES)
            .max(fixed.saturating_add(fixed / (RESERVE_SHARE - 1)).saturating_add(RESERVE_SHARE));
        let reserve = RESERVE_BYTES.max(total / RESERVE_SHARE);
        if total < needed {
            return Err(TooLittleMemory { total, weights, activations, request, reserve, needed });
        }
        let rest = total - reserve - fixed;
        let n_models = models.len().max(1);
        let more_rows = if rows == 0 || set.rows.is_some() { 0 } else { rest / 8 };
        let host = rest / 16 / n_models;
        let part = (rest - more_rows - host * n_models) / n_models;
        let caches = models.iter().map(|model| {
            let least = model.least(&set);
            let free = |bytes: usize, set: Option<usize>| bytes > 0 && set.is_none();
            let states = if free(least.states, set.states) { part / 4 } else { 0 };
            let cross = if free(least.cross_kv, set.cross_kv) { (part - states) / 2 } else { 0 };
            let own = if free(least.self_kv, set.self_kv) { part - states - cross } else { 0 };
            ModelCaches {
                self_kv: least.self_kv + own,
                cross_kv: least.cross_kv + cross,
                states: least.states + states,
                host_kv: host,
            }
        });
        let encodes = sum(&|m| m.encodes);
        let own = models.iter().map(|model| model.weights.saturating_add(model.activations)).collect();
        let models = caches.collect();
        let lazy_weights = sum(&|m| m.lazy_weights);
        Ok(Self {
            total,
            reserve,
            weights,
            lazy_weights,
            activations,
            encodes,
            rows: rows + more_rows,
            models,
            own,
        })
    }

    /// Caches of each model, and the bytes of all that is its own: weights, activations, caches.
    pub fn caches(&self) -> Vec<(ModelCaches, usize)> {
        let all = self.models.iter().zip(&self.own);
        all.map(|(caches, own)| (*caches, own.saturating_add(caches.sum()))).collect()
    }

    /// Room for forwards of the encoders here; `None`: nothing is foretold of them.
    pub fn room_of_encodes(&self) -> Option<usize> {
        Some(self.encodes).filter(|n_bytes| *n_bytes > 0)
    }

    /// Bytes of all parts.
    pub fn sum(&self) -> usize {
        let caches = self.models.iter().map(|caches| caches.sum()).fold(0, usize::saturating_add);
        [self.reserve, self.weights, self.activations, self.rows]
            .into_iter()
            .fold(caches, usize::saturating_add)
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |part: fn(&ModelCaches) -> usize| mib(self.models.iter().map(part).sum());
        let lazy = match self.lazy_weights {
            0 => String::new(),
            bytes => format!(" (of encoders that come and go {})", mib(bytes)),
        };
        write!(
            f,
            "of {} MiB: weights {}{}, activations {}, KV {}, cross-attention KV {}, states {}, host KV {}, encoder outputs {}, reserve {}",
            mib(self.total),
            mib(self.weights),
            lazy,
            mib(self.activations),
            of(|m| m.self_kv),
            of(|m| m.cross_kv),
            of(|m| m.states),
            of(|m| m.host_kv),
            mib(self.rows),
            mib(self.reserve)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: usize = 1 << 20;

    /// 100 MiB of weights, 4 KiB a token.
    fn decoder() -> ModelNeeds {
        ModelNeeds {
            weights: 100 * MIB,
            lazy_weights: 0,
            activations: 20 * MIB,
            encodes: 5 * MIB,
            self_block: 4096 * KV_BLOCK_TOKENS,
            self_blocks: 2048 / KV_BLOCK_TOKENS,
            cross_block: 0,
            state_slot: 0,
            max_context: 2048,
            max_rows: 1024,
            row: 2048,
        }
    }

    #[test]
    fn every_part_holds_one_request_and_the_rest_is_shared_out() {
        let plan = MemoryPlan::divide(512 * MIB, &[decoder()], SetSizes::default()).unwrap();
        assert_eq!((plan.reserve, plan.weights, plan.activations), (64 * MIB, 100 * MIB, 20 * MIB));
        assert_eq!(plan.encodes, 5 * MIB, "within the activations");
        // 318 MiB are left beside 8 MiB of KV and 2 MiB of rows of one request.
        assert_eq!(plan.rows, 2 * MIB + 318 * MIB / 8);
        assert_eq!(plan.models[0].host_kv, 318 * MIB / 16);
        assert!(plan.models[0].self_kv > 250 * MIB && plan.models[0].cross_kv == 0);
        assert_eq!(
            plan.to_string(),
            "of 512 MiB: weights 100, activations 20, KV 267, cross-attention KV 0, states 0, host KV 20, encoder outputs 42, \
             reserve 64"
        );
    }

    #[test]
    fn room_is_kept_for_weights_that_come_and_go_and_told() {
        let lazy = ModelNeeds { lazy_weights: 30 * MIB, ..decoder() };
        let plan = MemoryPlan::divide(512 * MIB, &[lazy], SetSizes::default()).unwrap();
        let held = MemoryPlan::divide(512 * MIB, &[decoder()], SetSizes::default()).unwrap();
        assert_eq!((plan.lazy_weights, plan.sum()), (30 * MIB, held.sum()));
        assert_eq!(plan.models, held.models, "KV has none of their room");
        assert!(
            plan.to_string().contains("weights 100 (of encoders that come and go 30), activations"),
            "{plan}"
        );
    }

    #[test]
    fn what_is_set_is_kept_and_what_cannot_hold_a_request_is_refused_with_the_least_that_does() {
        let set = SetSizes { self_kv: Some(10 * MIB), ..SetSizes::default() };
        let plan = MemoryPlan::divide(512 * MIB, &[decoder()], set).unwrap();
        assert_eq!(plan.models[0].self_kv, 10 * MIB);
        let refused = MemoryPlan::divide(193 * MIB, &[decoder()], SetSizes::default()).unwrap_err();
        assert_eq!((refused.needed, refused.request), (194 * MIB, 10 * MIB));
        assert!(
            refused.to_string().starts_with("--memory-mib 193: weights take 100, activations 20"),
            "{refused}"
        );
        assert!(MemoryPlan::divide(refused.needed, &[decoder()], SetSizes::default()).is_ok());
    }

    fn needs() -> impl Strategy<Value = ModelNeeds> {
        let sizes = (0usize..4000 * MIB, 0usize..500 * MIB, 1usize..MIB);
        let others = (prop::option::of(1usize..MIB), prop::option::of(1usize..20 * MIB));
        (sizes, others, 1usize..100_000, 0usize..20_000, 1usize..10_000).prop_map(
            |((weights, activations, self_block), (cross, state), max_context, max_rows, row)| ModelNeeds {
                weights,
                lazy_weights: weights / 2,
                activations,
                encodes: activations / 3,
                self_block,
                self_blocks: max_context.div_ceil(KV_BLOCK_TOKENS),
                cross_block: cross.unwrap_or(0),
                state_slot: state.unwrap_or(0),
                max_context,
                max_rows,
                row,
            },
        )
    }

    proptest! {
        #[test]
        fn parts_never_exceed_the_budget_and_hold_one_request_of_each_model(
            models in prop::collection::vec(needs(), 0..4),
            total in 0usize..100_000 * MIB,
            self_kv in prop::option::of(0usize..1000 * MIB),
        ) {
            let set = SetSizes { self_kv, ..SetSizes::default() };
            match MemoryPlan::divide(total, &models, set) {
                Ok(plan) => {
                    prop_assert!(plan.sum() <= total, "{plan:?}");
                    for (model, caches) in models.iter().zip(&plan.models) {
                        let least = model.least(&set);
                        prop_assert!(caches.self_kv >= least.self_kv && caches.cross_kv >= least.cross_kv);
                        prop_assert!(caches.states >= least.states && plan.rows >= model.rows());
                        prop_assert!(self_kv.is_none_or(|set| caches.self_kv == set));
                    }
                }
                Err(refused) => {
                    prop_assert!(refused.needed > total);
                    prop_assert!(MemoryPlan::divide(refused.needed, &models, set).is_ok());
                }
            }
        }
    }
}
