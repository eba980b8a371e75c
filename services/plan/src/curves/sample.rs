//! Curves made by hand, of a machine whose costs are round numbers: for tests, and for trying the simulator without
//! measuring anything.

use super::{
    ColocationSlowdown, CostCurves, EncodePoint, FrontCost, ItemPoint, KvSizes, Point, PromptSpec,
    Provenance, ProxyCost, StepPoint, TowerCurves, VERSION,
};

/// Costs of the machine, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// An encoder forward, beside its tokens.
    pub encode_fixed: f64,
    /// An output token of the encoder.
    pub encode_token: f64,
    /// An engine step, beside its tokens.
    pub step_fixed: f64,
    /// A prompt token.
    pub prefill_token: f64,
    /// A sequence that writes a token.
    pub decode: f64,
    /// A key that a token attends to.
    pub key: f64,
}

impl Default for Costs {
    fn default() -> Self {
        Self {
            encode_fixed: 1000.0,
            encode_token: 200.0,
            step_fixed: 2000.0,
            prefill_token: 50.0,
            decode: 100.0,
            key: 0.05,
        }
    }
}

/// A tenth more, in whole microseconds: such a number reads back from text as it was.
fn p95(us: f64) -> f64 {
    (us * 1.1).ceil()
}

/// Curves of the default machine for a model with the towers `low` and `high`: the second makes as many rows of a quarter of the
/// width, in a third of the time, and they are cross-attended to.
pub fn two_towers() -> CostCurves {
    let low = curves();
    let third = low.slowed(1.0 / 3.0);
    let high = TowerCurves {
        name: "high".into(),
        encode: third.encode,
        encode_parts: low.encode_parts,
        preprocess: low.preprocess.clone(),
        items: low.items.clone(),
        row_bytes: low.row_bytes / 4,
        is_cross_attended: true,
    };
    let kv = KvSizes { cross_row_bytes: 1024, ..low.kv };
    let rows = |projected_rows, us: f64| {
        let one = |p: &StepPoint| p.decodes == 0;
        let step = low.step.iter().find(|p| one(p)).copied();
        step.map(|step| StepPoint {
            projected_rows,
            p50_us: step.p50_us + us,
            p95_us: p95(step.p50_us + us),
            ..step
        })
    };
    let step = low.step.iter().copied().chain(rows(64, 640.0)).chain(rows(1024, 10_240.0)).collect();
    CostCurves { tower: "low".into(), more_towers: vec![high], kv, step, ..low }
}

/// Curves of the default machine.
pub fn curves() -> CostCurves {
    curves_of(&Costs::default())
}

/// Prompt tokens, their context each, answers, and theirs.
const STEPS: [(u32, u64, u32, u64); 13] = [
    (0, 0, 1, 64),
    (0, 0, 1, 1024),
    (0, 0, 8, 64),
    (0, 0, 8, 1024),
    (0, 0, 64, 64),
    (0, 0, 64, 1024),
    (16, 0, 0, 0),
    (128, 0, 0, 0),
    (512, 0, 0, 0),
    (16, 1024, 0, 0),
    (512, 1024, 0, 0),
    (128, 0, 8, 512),
    (448, 0, 64, 512),
];

/// Straight lines; the 95th percentile is a tenth above the median.
pub fn curves_of(costs: &Costs) -> CostCurves {
    let point = |of: f64, us: f64| Point { of, p50_us: us, p95_us: p95(us) };
    let step = |(prefill, before, decodes, context): (u32, u64, u32, u64)| {
        let n = u64::from(prefill);
        let prefill_context = n * before + n * (n + 1) / 2;
        let decode_context = u64::from(decodes) * context;
        let us = costs.step_fixed
            + costs.prefill_token * f64::from(prefill)
            + costs.decode * f64::from(decodes)
            + costs.key * (prefill_context + decode_context) as f64;
        StepPoint {
            prefill_tokens: prefill,
            prefill_context,
            decodes,
            decode_context,
            projected_rows: 0,
            p50_us: us,
            p95_us: p95(us),
        }
    };
    let encode = |(items, each): (u32, u64)| {
        let tokens = u64::from(items) * each;
        let us = costs.encode_fixed + costs.encode_token * tokens as f64;
        EncodePoint { items, tokens, squares: tokens * each, p50_us: us, p95_us: p95(us) }
    };
    CostCurves {
        version: VERSION,
        model: "made by hand".into(),
        precision: "f32".into(),
        kv_dtype: None,
        threads: 1,
        on_device: false,
        measured: Provenance::default(),
        encode: [(1, 16), (1, 64), (1, 256), (1, 1024), (2, 64), (4, 64), (2, 256), (4, 256)]
            .map(encode)
            .to_vec(),
        encode_parts: 12,
        preprocess: vec![point(12_544.0, 200.0), point(200_704.0, 2000.0), point(802_816.0, 8000.0)],
        items: [112_u32, 224, 448, 640, 896]
            .map(|side| ItemPoint {
                size: f64::from(side * side),
                tokens: (side / 28) * (side / 28),
                bytes: (side * side * 3) as usize,
            })
            .to_vec(),
        step: STEPS.map(step).to_vec(),
        publish: vec![point(16_384.0, 300.0), point(4_194_304.0, 4000.0)],
        load: vec![point(16_384.0, 300.0), point(4_194_304.0, 2000.0)],
        row_bytes: 4096,
        tower: String::new(),
        more_towers: Vec::new(),
        kv: KvSizes { token_bytes: 4096, max_context: 8192, cross_rows_per_token: 1, ..KvSizes::default() },
        prompt: PromptSpec::default(),
        proxy: ProxyCost { request_us: 300.0, item_us: 200.0, item_byte_us: 0.001, token_us: 5.0 },
        front: FrontCost {
            request_us: 600.0,
            item_us: 400.0,
            item_byte_us: 0.002,
            wake_us: 5.0,
            write_us: 30.0,
            message_us: 20.0,
            misplaced: 0.0,
        },
        colocated: ColocationSlowdown::default(),
        interference: None,
        between_steps_us: 0.0,
        pipelining: None,
        in_service: None,
        api: None,
    }
}
