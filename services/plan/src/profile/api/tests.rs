//! A modelled server under a paused clock: its costs are known, and the measurement has to find them through its streams.

use super::*;
use crate::curves::{BatchShape, Costs, Provenance, StepShape, Unmeasured};
use crate::profile::settings::Extent;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::sleep;
use triptych_bench::client::{Clock, ContentSource, PreparedRequest, Reply, Target};
use triptych_bench::offered::{ItemShape, Offered};
use triptych_bench::outcome::End;
use triptych_core::TowerIdx;

/// Tokens that the chat's template adds.
const TEMPLATE: u32 = 20;
/// Time of a request beside its steps.
const REQUEST: Duration = Duration::from_millis(400);
/// Prompt tokens of a step.
const BUDGET: u32 = 8192;

/// A sequence of the engine: its tokens become times.
struct Sequence {
    left_to_read: u32,
    keys: u64,
    left_to_write: u32,
    encode: Duration,
    tokens: mpsc::UnboundedSender<tokio::time::Instant>,
}

/// Milliseconds of a step: 200, 2 for each prompt token, 10 for each decode, 0.01 for each key.
fn step_ms((prefill, prefill_keys): (u32, u64), (decodes, keys): (u32, u64)) -> f64 {
    200.0 + 2.0 * f64::from(prefill) + 10.0 * f64::from(decodes) + 0.01 * (prefill_keys + keys) as f64
}

/// Milliseconds of an encode: 300, and 5 for each token.
fn encode_ms(tokens: u32) -> f64 {
    if tokens == 0 { 0.0 } else { 300.0 + 5.0 * f64::from(tokens) }
}

/// Engine steps one after the other, in which all sequences up to `most` take part.
async fn engine(mut arrivals: mpsc::UnboundedReceiver<Sequence>, most: usize) {
    let mut all: Vec<Sequence> = Vec::new();
    loop {
        if all.is_empty() {
            let Some(first) = arrivals.recv().await else { return };
            all.push(first);
        }
        while let Ok(next) = arrivals.try_recv() {
            all.push(next);
        }
        let (mut budget, mut read, mut read_keys, mut decodes, mut keys) = (BUDGET, 0, 0, 0, 0);
        let mut encode = Duration::ZERO;
        for one in all.iter_mut().take(most) {
            let n = one.left_to_read.min(budget);
            if n > 0 {
                encode += std::mem::take(&mut one.encode);
                (budget, read) = (budget - n, read + n);
                read_keys += u64::from(n) * one.keys + u64::from(n) * (u64::from(n) + 1) / 2;
                one.keys += u64::from(n);
                one.left_to_read -= n;
            } else if one.left_to_read == 0 {
                decodes += 1;
                one.keys += 1;
                keys += one.keys;
            }
        }
        let step = step_ms((read, read_keys), (decodes, keys));
        sleep(encode + Duration::from_secs_f64(step / 1e3)).await;
        for one in all.iter_mut().take(most).filter(|one| one.left_to_read == 0) {
            let _ = one.tokens.send(tokio::time::Instant::now());
            one.left_to_write -= 1;
        }
        all.retain(|one| one.left_to_write > 0);
    }
}

struct Modelled {
    arrivals: mpsc::UnboundedSender<Sequence>,
    template: u32,
    has_images: bool,
}

/// Tokens of an image of so many pixels each way.
fn image_tokens(side: u32) -> u32 {
    (side / 28) * (side / 28)
}

impl Target for Modelled {
    fn prepare(&self, offered: &Offered, _: &ContentSource) -> PreparedRequest {
        let of = |item: &triptych_bench::offered::OfferedItem| match item.shape {
            ItemShape::Image { width, .. } => image_tokens(width),
            ItemShape::Audio { .. } => 0,
        };
        let images: u32 = offered.items.iter().map(of).sum();
        let prompt = offered.text_tokens + images + self.template;
        let (tokens, mut arrived) = mpsc::unbounded_channel();
        let sequence = Sequence {
            left_to_read: prompt,
            keys: 0,
            left_to_write: offered.output_tokens,
            encode: Duration::from_secs_f64(encode_ms(images) / 1e3),
            tokens,
        };
        let arrivals = self.arrivals.clone();
        let is_refused = images > 0 && !self.has_images;
        Box::new(move |clock: Clock| {
            Box::pin(async move {
                if is_refused {
                    return Reply::without_tokens(End::Failed("400: no images".into()), clock.now());
                }
                sleep(REQUEST).await;
                let _ = arrivals.send(sequence);
                let mut times = Vec::new();
                while let Some(at) = arrived.recv().await {
                    times.push(at.duration_since(clock.start));
                }
                Reply {
                    tokens: times,
                    prompt_tokens: Some(prompt),
                    ..Reply::without_tokens(End::Whole, clock.now())
                }
            })
        })
    }

    fn name(&self) -> String {
        "modelled".to_owned()
    }

    fn model(&self) -> String {
        "m".to_owned()
    }
}

/// The curves of a modelled server that runs at most so many sequences at once.
async fn measured(extent: Extent, most: usize, has_images: bool) -> CostCurves {
    let (arrivals, queue) = mpsc::unbounded_channel();
    tokio::spawn(engine(queue, most));
    let target = |template| -> Arc<dyn Target> {
        Arc::new(Modelled { arrivals: arrivals.clone(), template, has_images })
    };
    let info = ServerInfo {
        engine: Some("vLLM 0.32".into()),
        max_context: Some(6000),
        kv_tokens: Some(100_000),
        kv_block_tokens: Some(16),
        ..ServerInfo::default()
    };
    let server = ApiServer { text: target(0), chat: target(TEMPLATE), encoder: None, info };
    let settings = ApiSettings {
        rounds: 1,
        extent,
        salt: 3,
        threads: None,
        model: "m".into(),
        measured: Provenance::default(),
    };
    measure(&server, &settings, &|_, _, _| {}).await.expect("curves")
}

fn is_near(found_us: f64, expect_ms: f64) -> bool {
    (found_us / 1e3 / expect_ms - 1.0).abs() < 0.03
}

#[tokio::test(start_paused = true)]
async fn costs_of_a_known_engine_are_found_through_its_streams() {
    let curves = measured(Extent::Full, 256, true).await;
    assert_eq!(curves.mistakes(), Vec::<String>::new());
    assert!(is_near(curves.proxy.request_us, 400.0), "{:?}", curves.proxy);
    let costs = Costs::new(&curves);
    let encoder = costs.encoder(TowerIdx::default());
    for (decodes, context) in [(1, 100), (8, 4000), (24, 12_000), (48, 30_000)] {
        let shape = StepShape { decodes, decode_context: context, ..StepShape::default() };
        let (found, expect) = (costs.step(shape).p50_us, step_ms((0, 0), (decodes, context)));
        assert!(is_near(found, expect), "{decodes} with {context} keys: {found} us, {expect} ms");
    }
    for n in [100_u32, 700, 3000] {
        let keys = u64::from(n) * (u64::from(n) + 1) / 2;
        let shape = StepShape { prefill_tokens: n, prefill_context: keys, ..StepShape::default() };
        let (found, expect) = (costs.step(shape).p50_us, step_ms((n, keys), (0, 0)));
        assert!(is_near(found, expect), "{n} prompt tokens: {found} us, {expect} ms");
    }
    for n in [64, 256, 1024] {
        let (found, expect) = (encoder.encode(BatchShape::of([n])).p50_us, encode_ms(n));
        assert!(is_near(found, expect), "an image of {n} tokens: {found} us, {expect} ms");
    }
    let items: Vec<u32> = curves.items.iter().map(|item| item.tokens).collect();
    assert_eq!(items, [112, 224, 336, 448, 640, 896, 1280].map(image_tokens));
    assert_eq!((curves.prompt.before, curves.kv.capacity_tokens), (TEMPLATE, Some(100_000)));
    let api = curves.api.expect("measured through an API");
    assert!(
        api.unmeasured.contains(&Unmeasured::MixedSteps) && !api.unmeasured.contains(&Unmeasured::KvTokens)
    );
    assert_eq!(api.max_sequences, None);
}

#[tokio::test(start_paused = true)]
async fn streams_that_wait_for_others_and_images_that_are_refused_are_left_out() {
    let curves = measured(Extent::Quick, 2, false).await;
    assert_eq!(curves.mistakes(), Vec::<String>::new());
    assert!(curves.step.iter().all(|p| p.decodes <= 1), "four never decode at once: {:?}", curves.step);
    let api = curves.api.expect("measured through an API");
    assert_eq!(api.max_sequences, Some(1));
    assert!(curves.encode.is_empty() && api.unmeasured.contains(&Unmeasured::Encode));
}
