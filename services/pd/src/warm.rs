//! A warm-up request before the worker is ready: the first step of a process pays for pages and caches, and a
//! model that cannot run a step should fail before READY.

use triptych_core::clock::{Clock, SystemClock};
use triptych_core::sampling::SamplingParams;
use triptych_core::{
    ContentKey, DType, EncodedItem, EncoderOutput, Extent, Failure, Fingerprint, ItemIdx, Modality, TenantId,
};
use triptych_engine::{Engine, Event, Output, SequenceId, SequenceRequest};
use triptych_models::decoder::DecoderInfo;
use triptych_models::prompt::{CrossInput, OutputKind, PreparedSequence};
use triptych_models::rules::LogitRules;

/// Tokens of the prompt.
const N_TOKENS: usize = 16;
const N_ROWS: u32 = 16;
/// Tokens to generate.
const N_WRITTEN: u32 = 2;
/// Limit on steps, more than the request can need.
const MAX_STEPS: usize = 64;

/// Runs a small request through the engine, then resets its caches.
///
/// # Errors
/// The request's failure, or Internal if it does not end.
pub fn warm_up(engine: &mut Engine, info: &DecoderInfo) -> Result<(), Failure> {
    let outcome = run_request(engine, info);
    engine.reset();
    outcome
}

fn run_request(engine: &mut Engine, info: &DecoderInfo) -> Result<(), Failure> {
    let clock = SystemClock;
    let n_tokens = N_TOKENS.min(info.max_context.saturating_sub(N_WRITTEN as usize)).max(1);
    let rows = if info.cross_attention { Some(rows(info)?) } else { None };
    let arrival = arrival(n_tokens, info, rows.as_ref(), &clock);
    let mut outputs = engine.handle(Event::Add(Box::new(arrival)), clock.now());
    if let Some(output) = rows {
        outputs.extend(engine.handle(Event::ItemReady { key: output.item().key, output }, clock.now()));
    }
    for _ in 0..MAX_STEPS {
        for output in outputs.drain(..) {
            match output {
                Output::Failed(_, failure) => return Err(failure),
                Output::Finished(..) => return Ok(()),
                Output::Delta(..) | Output::Aligned(..) | Output::Rows(..) => {}
            }
        }
        outputs = engine.step(&clock);
    }
    engine.handle(Event::Abort(ID), clock.now());
    Err(Failure::internal("the first request of an engine does not end"))
}

/// Unused by drivers, which count from 0.
const ID: SequenceId = SequenceId(u64::MAX);

fn arrival(
    n_tokens: usize,
    info: &DecoderInfo,
    rows: Option<&EncoderOutput>,
    clock: &dyn Clock,
) -> SequenceRequest {
    let last = u32::try_from(info.n_readable.saturating_sub(1)).unwrap_or(u32::MAX);
    let positions = (0..).take(n_tokens).map(|p| [p; 3]).collect();
    SequenceRequest {
        ids: vec![ID],
        prepared: PreparedSequence {
            tokens: (0..).take(n_tokens).map(|token: u32| token.min(last)).collect(),
            positions,
            next_position: u32::try_from(n_tokens).unwrap_or(u32::MAX),
            spans: Vec::new(),
            cross: rows
                .map(|_| CrossInput { item: ItemIdx(0), first_row: 0, n_rows: N_ROWS, first_token: 0 })
                .into_iter()
                .collect(),
            rules: LogitRules::default(),
            end_tokens: Vec::new(),
            output: OutputKind::Text,
        },
        encoder_tokens: [].into(),
        items: rows.map(|output| output.item().clone()).into_iter().collect(),
        sampling: SamplingParams {
            temperature: 0.0,
            max_tokens: Some(N_WRITTEN),
            ignore_eos: true,
            ..SamplingParams::default()
        },
        constraint: None,
        priority: 0,
        adapter: None,
        tenant: TenantId::SHARED,
        deadline: clock.now() + std::time::Duration::from_secs(600),
        resumed: None,
    }
}

/// Rows of zeros, `[N_ROWS, encoder_hidden]`.
fn rows(info: &DecoderInfo) -> Result<EncoderOutput, Failure> {
    let item = EncodedItem {
        key: ContentKey::from_bytes([0; 32]),
        fingerprint: Fingerprint::from_bytes([0; 32]),
        modality: Modality::Image,
        n_tokens: N_ROWS,
        hidden: u32::try_from(info.encoder_hidden).map_err(Failure::internal)?,
        dtype: DType::F32,
        extent: Extent::Tokens,
        checksum: [0; 32],
    };
    let n_bytes = N_ROWS as usize * info.encoder_hidden * size_of::<f32>();
    EncoderOutput::seal(item, vec![0; n_bytes].into()).map_err(Failure::internal)
}
