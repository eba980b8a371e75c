//! Curves from what was measured through an API.
//!
//! The time to the first token of a prompt is that of its step and of everything else that a request takes: HTTP, tokenization,
//! queues. The constant part of the times to the first token beyond the constant part of a step is taken to be the latter, which
//! adds to latency and takes nothing from the engine.

use super::decodes::Decodes;
use super::images::Images;
use super::prompts::Prefill;
use super::server::{ApiServer, ApiSettings};
use crate::curves::{
    ApiEncoders, ApiSource, ColocationSlowdown, CostCurves, FitPoint, FrontCost, ItemsAt, KvSizes,
    PromptSpec, ProxyCost, StepPoint, Unmeasured, VERSION, least_squares,
};

/// Measured times and sizes.
pub(super) struct Samples {
    /// Prompts.
    pub(super) prefills: Vec<Prefill>,
    /// Steps of streams.
    pub(super) decoded: Decodes,
    /// Images; `None`: the server reads none.
    pub(super) images: Option<Images>,
    /// Place of their encoder.
    pub(super) encoders: ApiEncoders,
}

/// The curves.
pub(super) fn curves(server: &ApiServer, settings: &ApiSettings, samples: &Samples) -> CostCurves {
    let info = &server.info;
    let images = samples.images.clone().unwrap_or_default();
    let request_us = request_us(samples);
    let longest = samples.prefills.iter().map(|p| p.tokens as usize).max().unwrap_or(1);
    CostCurves {
        version: VERSION,
        model: settings.model.clone(),
        precision: "unknown".to_owned(),
        kv_dtype: info.kv_dtype.clone(),
        threads: settings.threads.unwrap_or(1),
        on_device: false,
        measured: settings.measured.clone(),
        encode: images.encodes,
        encode_parts: 1,
        preprocess: Vec::new(),
        items: images.items,
        step: steps(samples, request_us),
        publish: Vec::new(),
        load: Vec::new(),
        row_bytes: 1,
        tower: String::new(),
        more_towers: Vec::new(),
        kv: KvSizes {
            token_bytes: info.kv_token_bytes.unwrap_or(1),
            max_context: info.max_context.unwrap_or(longest),
            cross_rows_per_token: 1,
            capacity_tokens: info.kv_tokens,
            ..KvSizes::default()
        },
        prompt: PromptSpec { before: images.template, around_item: 0, after: 0, items: ItemsAt::Front },
        proxy: ProxyCost { request_us, ..ProxyCost::default() },
        front: FrontCost::default(),
        colocated: ColocationSlowdown::default(),
        interference: None,
        between_steps_us: 0.0,
        pipelining: None,
        in_service: None,
        api: Some(source(server, settings, samples)),
    }
}

/// Time of a request beside its steps, in microseconds.
fn request_us(samples: &Samples) -> f64 {
    let prompt = |p: &Prefill| FitPoint {
        terms: [1.0, f64::from(p.tokens), own_keys(p.tokens) as f64],
        p50_us: p.ttft.p50_us.max(1.0),
        p95_us: p.ttft.p95_us.max(1.0),
    };
    let prompts: Vec<FitPoint<3>> = samples.prefills.iter().map(prompt).collect();
    (least_squares(&prompts)[0] - step_us(&samples.decoded)).max(0.0)
}

/// Constant part of a step with decodes, in microseconds.
fn step_us(decoded: &Decodes) -> f64 {
    let points = decoded.points.iter().map(|p| FitPoint {
        terms: [1.0, f64::from(p.n), p.context as f64],
        p50_us: p.step.p50_us,
        p95_us: p.step.p95_us,
    });
    least_squares(&points.collect::<Vec<_>>())[0]
}

/// Keys that the tokens of a fresh prompt attend to.
fn own_keys(n: u32) -> u64 {
    u64::from(n) * (u64::from(n) + 1) / 2
}

fn steps(samples: &Samples, request_us: f64) -> Vec<StepPoint> {
    let least_us = step_us(&samples.decoded).max(1.0);
    let none = StepPoint {
        prefill_tokens: 0,
        prefill_context: 0,
        decodes: 0,
        decode_context: 0,
        projected_rows: 0,
        p50_us: 0.0,
        p95_us: 0.0,
    };
    let prefills = samples.prefills.iter().map(|p| {
        let p50_us = (p.ttft.p50_us - request_us).max(least_us);
        StepPoint {
            prefill_tokens: p.tokens,
            prefill_context: own_keys(p.tokens),
            p50_us,
            p95_us: (p.ttft.p95_us - request_us).max(p50_us),
            ..none
        }
    });
    let decodes = samples.decoded.points.iter().map(|p| StepPoint {
        decodes: p.n,
        decode_context: p.context,
        p50_us: p.step.p50_us,
        p95_us: p.step.p95_us,
        ..none
    });
    decodes.chain(prefills).collect()
}

fn source(server: &ApiServer, settings: &ApiSettings, samples: &Samples) -> ApiSource {
    let info = &server.info;
    let has_images = samples.images.as_ref().is_some_and(|images| !images.encodes.is_empty());
    let unknown = [
        (Unmeasured::Encode, !has_images),
        (Unmeasured::Preprocess, has_images),
        (Unmeasured::Publish, true),
        (Unmeasured::Load, true),
        (Unmeasured::RowBytes, true),
        (Unmeasured::KvTokenBytes, info.kv_token_bytes.is_none()),
        (Unmeasured::KvTokens, info.kv_tokens.is_none()),
        (Unmeasured::MixedSteps, true),
        (Unmeasured::Frontend, true),
        (Unmeasured::Colocated, has_images),
        (Unmeasured::Threads, settings.threads.is_none()),
    ];
    ApiSource {
        engine: info.engine.clone(),
        url: info.url.clone(),
        encoders: samples.encoders,
        kv_block_tokens: info.kv_block_tokens,
        max_sequences: samples.decoded.most.map(|n| n as usize),
        unmeasured: unknown.into_iter().filter(|(_, is_unknown)| *is_unknown).map(|(one, _)| one).collect(),
    }
}
