//! Made-up curves, clusters and workloads.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::sync::Arc;
use std::time::Duration;
use triptych_bench::offered::{ItemShape, Offered, OfferedItem};
use triptych_plan::curves::{
    ColocationSlowdown, CostCurves, EncodePoint, FrontCost, ItemPoint, KvSizes, Point, PromptSpec,
    Provenance, ProxyCost, StepPoint, VERSION,
};
use triptych_plan::simulator::spec::{ClusterSpec, EncoderSpec, PdSpec, PoolRole, PoolSpec};

/// Costs in [`curves`], in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Prices {
    pub encode_token: f64,
    pub step: f64,
    pub prefill_token: f64,
    pub decode: f64,
    /// 95th percentile over median.
    pub spread: f64,
}

/// An image of 500 tokens takes half a second, a prompt token a millisecond, a step at least ten.
pub const SLOW: Prices =
    Prices { encode_token: 1000.0, step: 10_000.0, prefill_token: 1000.0, decode: 2000.0, spread: 1.0 };
/// The same, ten times as fast and with noise.
pub const FAST: Prices =
    Prices { encode_token: 100.0, step: 1000.0, prefill_token: 100.0, decode: 200.0, spread: 1.3 };

/// Curves of a machine with one core, on which costs are sums.
pub fn curves(prices: Prices) -> CostCurves {
    let spread = prices.spread;
    let point = |of: f64, p50_us: f64| Point { of, p50_us, p95_us: p50_us * spread };
    let encode = |items: u32, each: u64| {
        let tokens = u64::from(items) * each;
        let p50_us = prices.encode_token * tokens as f64;
        EncodePoint { items, tokens, squares: tokens * each, p50_us, p95_us: p50_us * spread }
    };
    let step = |(prefill_tokens, decodes, context): (u32, u32, u64)| {
        let p50_us = prices.step
            + prices.prefill_token * f64::from(prefill_tokens)
            + prices.decode * f64::from(decodes);
        StepPoint {
            prefill_tokens,
            prefill_context: u64::from(prefill_tokens) * (u64::from(prefill_tokens) + 1) / 2,
            decodes,
            decode_context: u64::from(decodes) * context,
            projected_rows: 0,
            p50_us,
            p95_us: p50_us * spread,
        }
    };
    let steps = [
        (0, 1, 100),
        (0, 1, 4000),
        (0, 8, 500),
        (0, 64, 100),
        (0, 64, 2000),
        (64, 0, 0),
        (512, 0, 0),
        (64, 8, 300),
        (448, 64, 500),
    ];
    CostCurves {
        version: VERSION,
        model: "made-up".into(),
        precision: "f32".into(),
        kv_dtype: None,
        threads: 1,
        on_device: false,
        measured: Provenance::default(),
        encode: [(1, 10), (1, 100), (1, 1000), (4, 100), (4, 1000), (16, 500)]
            .map(|(n, t)| encode(n, t))
            .to_vec(),
        encode_parts: 10,
        preprocess: vec![point(1e4, 1.0), point(1e6, 2.0)],
        items: vec![
            ItemPoint { size: 1e4, tokens: 10, bytes: 10_000 },
            ItemPoint { size: 1e6, tokens: 1000, bytes: 1_000_000 },
        ],
        step: steps.map(step).to_vec(),
        publish: vec![point(1e3, 1.0), point(1e7, 1000.0)],
        load: vec![point(1e3, 1.0), point(1e7, 1000.0)],
        row_bytes: 1000,
        tower: String::new(),
        more_towers: Vec::new(),
        kv: KvSizes { token_bytes: 10_000, max_context: 8192, cross_rows_per_token: 1, ..KvSizes::default() },
        prompt: PromptSpec::default(),
        proxy: ProxyCost::default(),
        front: FrontCost::default(),
        colocated: ColocationSlowdown::default(),
        interference: None,
        between_steps_us: 0.0,
        pipelining: None,
        in_service: None,
        api: None,
    }
}

/// A pool.
pub fn pool(name: &str, workers: usize, role: PoolRole, prices: Prices) -> PoolSpec {
    PoolSpec { name: name.into(), workers, role, curves: Arc::new(curves(prices)), lent: None }
}

/// So many encoders and so many PD workers.
pub fn apart(encoders: usize, pds: usize, prices: Prices) -> ClusterSpec {
    ClusterSpec::new(vec![
        pool("encoder", encoders, PoolRole::Encoder(EncoderSpec::default()), prices),
        pool("pd", pds, PoolRole::Pd(PdSpec::default()), prices),
    ])
}

/// Requests at a rate, as they come when nobody knows of the others: each of a text, with so many new images of so many
/// tokens.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    pub rate: f64,
    pub n: u64,
    pub text: u32,
    pub output: u32,
    pub images: u64,
    pub image_tokens: u32,
    /// Different images there are; none: each is new.
    pub pool: Option<u64>,
}

impl Load {
    pub fn requests(self, seed: u64) -> impl Iterator<Item = Offered> {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut at = 0.0;
        (0..self.n).map(move |index| {
            let u: f64 = rng.random();
            at -= (1.0 - u).ln() / self.rate;
            let content = |i: u64| match self.pool {
                Some(n) => (index * 7919 + i) % n,
                None => index * self.images + i,
            };
            Offered {
                index,
                at: Duration::from_secs_f64(at),
                text_tokens: self.text,
                output_tokens: self.output,
                items: (0..self.images).map(|i| image(content(i), self.image_tokens)).collect(),
                session: None,
                blocks: None,
                slo: None,
            }
        })
    }
}

/// A image that becomes so many tokens.
pub fn image(content: u64, tokens: u32) -> OfferedItem {
    OfferedItem { content, shape: ItemShape::Image { width: tokens * 10, height: 100 } }
}

/// One request at a moment.
pub fn one(index: u64, at_ms: u64, text: u32, items: Vec<OfferedItem>) -> Offered {
    Offered {
        index,
        at: Duration::from_millis(at_ms),
        text_tokens: text,
        output_tokens: 4,
        items,
        session: None,
        blocks: None,
        slo: None,
    }
}
