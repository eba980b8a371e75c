//! Mixtures of experts: routing, grouping, products and sums, as one layer launches them.

use cudarc::driver::CudaSlice;
use triptych_kernels::ops::Activation;

use crate::cache::address;
use crate::device::{Device, Plain};
use crate::element::{Bf16, Element, close, elements, values, widened};
use crate::linear::{Kind, Weights, packed};
use crate::{launch, oracle};

/// `Routing` of `experts.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Router {
    n_tokens: u32,
    n_experts: u32,
    top_k: u32,
    is_sigmoid: u32,
    renormalize: u32,
    scale: f32,
}

impl Plain for Router {}

/// `Routes` of `experts.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct RouteArrays {
    experts: u64,
    weights: u64,
    places: u64,
    order: u64,
    counts: u64,
    tiles: u64,
}

impl Plain for RouteArrays {}

/// `Grouped` of `experts.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Grouped {
    x: u64,
    rows: u64,
    sums: u64,
    weights: u64,
    scales: u64,
    order: u64,
    tiles: u64,
    top_k: u32,
    is_by_token: u32,
    n_in: u32,
    n_out: u32,
}

impl Plain for Grouped {}

/// The routes of a batch on a device, and copies of them.
struct Routes {
    arrays: RouteArrays,
    router: Router,
    n_tiles: usize,
    experts: Vec<u32>,
    weights: Vec<f32>,
    order: Vec<u32>,
    places: Vec<u32>,
    _kept: (Vec<CudaSlice<u32>>, CudaSlice<f32>),
}

impl Routes {
    fn new<T: Element>(device: &Device, logits: &[T], router: Router) -> Self {
        let n_pairs = (router.n_tokens * router.top_k) as usize;
        let n_experts = router.n_experts as usize;
        let n_tiles = n_pairs.min(n_pairs / 8 + n_experts);
        let words: Vec<CudaSlice<u32>> =
            [n_pairs, n_pairs, n_pairs, n_experts, 3 * n_tiles].map(|n| device.poisoned(n)).into();
        let weights = device.poisoned::<f32>(n_pairs);
        let [experts, places, order, counts, tiles] = [0, 1, 2, 3, 4].map(|i| address(device, &words[i]));
        let arrays =
            RouteArrays { experts, weights: address(device, &weights), places, order, counts, tiles };
        let from = device.upload(logits);
        let n = router.n_tokens.div_ceil(4);
        launch!(device, format!("route_{}", T::NAME), [n, 1, 1], 128, 0; arrays, from, router);
        launch!(device, "count_routes", [router.n_experts, 1, 1], 256, 0; arrays, router);
        launch!(device, "place_routes", [router.n_experts, 1, 1], 256, 0; arrays, router, n_tiles as u32);
        Self {
            arrays,
            router,
            n_tiles,
            experts: device.download(&words[0], n_pairs),
            places: device.download(&words[1], n_pairs),
            order: device.download(&words[2], n_pairs),
            weights: device.download(&weights, n_pairs),
            _kept: (words, weights),
        }
    }
}

/// Experts of each token ascending, with their weights.
fn chosen(logits: &[f32], router: Router) -> Vec<(u32, f32)> {
    let score = |l: f32| if router.is_sigmoid == 1 { 1.0 / (1.0 + (-l).exp()) } else { l.exp() };
    let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().map(|l| score(*l))).collect();
    let whole: f32 = all.iter().map(|(_, s)| s).sum();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all.truncate(router.top_k as usize);
    all.sort_by_key(|(expert, _)| *expert);
    let sum = match (router.renormalize, router.is_sigmoid) {
        (1, _) => all.iter().map(|(_, s)| s).sum(),
        (_, 1) => 1.0,
        _ => whole,
    };
    all.iter().map(|(expert, s)| (*expert, s / sum * router.scale)).collect()
}

/// Routings around the sizes of a warp, a block and a tile: tokens, experts, experts of a token.
const ROUTINGS: [(u32, u32, u32); 6] =
    [(1, 2, 1), (3, 8, 2), (5, 33, 4), (40, 70, 9), (150, 5, 2), (2, 200, 32)];

fn rows_are_routed_and_grouped_by_expert<T: Element>() {
    let device = Device::new(1);
    for (n_tokens, n_experts, top_k) in ROUTINGS {
        for (is_sigmoid, renormalize) in [(0, 1), (0, 0), (1, 1), (1, 0)] {
            let router = Router { n_tokens, n_experts, top_k, is_sigmoid, renormalize, scale: 1.5 };
            let logits = elements::<T>(7, (n_tokens * n_experts) as usize);
            let routes = Routes::new(&device, &logits, router);
            let wide = widened(&logits);
            for (token, row) in wide.chunks(n_experts as usize).enumerate() {
                let at = token * top_k as usize..(token + 1) * top_k as usize;
                let expect = chosen(row, router);
                let experts: Vec<u32> = expect.iter().map(|(expert, _)| *expert).collect();
                assert_eq!(routes.experts[at.clone()], experts, "{router:?}");
                for (a, (_, e)) in routes.weights[at].iter().zip(&expect) {
                    assert!((a - e).abs() < 1e-5, "{router:?}: {a} for {e}");
                }
            }
            // Pairs by expert, ascending within one, and each at its place.
            let mut order: Vec<u32> = (0..n_tokens * top_k).collect();
            order.sort_by_key(|pair| routes.experts[*pair as usize]);
            assert_eq!(routes.order, order, "{router:?}");
            for (place, pair) in (0..).zip(&order) {
                assert_eq!(routes.places[*pair as usize], place, "{router:?}");
            }
        }
    }
    device.finish();
}

fn equal_logits_choose_the_first_experts<T: Element>() {
    let device = Device::new(2);
    let router = Router { n_tokens: 2, n_experts: 70, top_k: 3, is_sigmoid: 0, renormalize: 1, scale: 1.0 };
    let mut logits = vec![T::from_f32(0.5); 140];
    logits[70..].fill(T::poison());
    logits[70 + 69] = T::from_f32(-3.0);
    assert_eq!(Routes::new(&device, &logits, router).experts, [0, 1, 2, 0, 1, 69]);
    device.finish();
}

for_each_element!(rows_are_routed_and_grouped_by_expert, equal_logits_choose_the_first_experts);

/// The addresses of each expert's weights and scales, and what must be kept for them.
struct Table {
    addresses: [CudaSlice<u64>; 2],
    _kept: Vec<CudaSlice<u8>>,
}

impl Table {
    fn new(device: &Device, experts: &[Weights]) -> Self {
        let bytes = |values: &[Bf16]| -> Vec<u8> { values.iter().flat_map(|v| v.0.to_le_bytes()).collect() };
        let mut kept = Vec::new();
        let mut keep = |bytes: Vec<u8>| {
            kept.push(device.upload(&bytes));
            address(device, &kept[kept.len() - 1])
        };
        let each = experts.iter().map(|weights| match weights {
            Weights::Bf16(w) => [keep(bytes(w)), 0],
            Weights::Int8(w, s) => [keep(w.clone()), keep(s.iter().flat_map(|v| v.to_le_bytes()).collect())],
            Weights::Int4(w, s) => [keep(w.clone()), keep(bytes(s))],
        });
        let each: Vec<[u64; 2]> = each.collect();
        let addresses = [0, 1].map(|i| device.upload(&each.iter().map(|pair| pair[i]).collect::<Vec<u64>>()));
        Self { addresses, _kept: kept }
    }
}

/// A layer whose experts have one matrix: sums over a token's experts of `weight · W x`, plus a residual.
fn sums_are_the_oracles(kind: Kind, name: &str) {
    let device = Device::new(3);
    for (n_tokens, n_experts, top_k, n_in, n_out) in
        [(1, 3, 2, 40, 20), (21, 5, 3, 33, 48), (9, 2, 1, 70, 17)]
    {
        let router = Router { n_tokens, n_experts, top_k, is_sigmoid: 0, renormalize: 1, scale: 1.0 };
        let (tokens, n_pairs) = (n_tokens as usize, (n_tokens * top_k) as usize);
        let logits = elements::<Bf16>(7, (n_tokens * n_experts) as usize);
        let routes = Routes::new(&device, &logits, router);
        let x = elements::<Bf16>(1, tokens * n_in);
        let residual = elements::<Bf16>(5, tokens * n_out);
        let (weights, read): (Vec<Weights>, Vec<Vec<f32>>) = (0..n_experts)
            .map(|e| packed(kind, &values(20 + u64::from(e), n_out * n_in), n_out, n_in))
            .unzip();
        let table = Table::new(&device, &weights);
        let [w, scales] = [0, 1].map(|i| address(&device, &table.addresses[i]));
        let (from, add) = (device.upload(&x), device.upload(&residual));
        let (sums, y) = (device.poisoned::<f32>(n_pairs * n_out), device.poisoned::<Bf16>(tokens * n_out));
        let rows = device.poisoned::<Bf16>(n_pairs * n_out);
        let grouped = Grouped {
            x: address(&device, &from),
            rows: 0,
            sums: address(&device, &sums),
            weights: w,
            scales,
            order: routes.arrays.order,
            tiles: routes.arrays.tiles,
            top_k,
            is_by_token: 1,
            n_in: n_in as u32,
            n_out: n_out as u32,
        };
        let grid = [n_out.div_ceil(16) as u32, routes.n_tiles as u32, 1];
        launch!(device, name, grid, 128, 0; grouped);
        // The same of rows that are by place already, as the second product of an expert is.
        let by_place: Vec<Bf16> = routes
            .order
            .iter()
            .flat_map(|pair| x[(pair / top_k) as usize * n_in..][..n_in].to_vec())
            .collect();
        let by_place = device.upload(&by_place);
        let second = Grouped {
            x: address(&device, &by_place),
            rows: address(&device, &rows),
            sums: 0,
            is_by_token: 0,
            ..grouped
        };
        launch!(device, name, grid, 128, 0; second);
        launch!(device, "sum_experts_bf16", [2, 1, 1], 256, 0; y, sums, add, routes.arrays, routes.router, n_out as u32);
        let rounded: Vec<Bf16> =
            device.download(&sums, n_pairs * n_out).into_iter().map(Bf16::from_f32).collect();
        assert_eq!(device.download(&rows, n_pairs * n_out), rounded, "{name}");
        let zeros = vec![0.0; n_out];
        let mut expect = widened(&residual);
        for (pair, (expert, weight)) in routes.experts.iter().zip(&routes.weights).enumerate() {
            let token = pair / top_k as usize;
            let row = widened(&x[token * n_in..][..n_in]);
            let product = oracle::linear(&row, &read[*expert as usize], Some(&zeros), n_in, Activation::None);
            expect[token * n_out..][..n_out].iter_mut().zip(product).for_each(|(e, p)| *e += weight * p);
        }
        close(name, &device.download(&y, tokens * n_out), &expect, 1e-2);
    }
    device.finish();
}

#[test]
fn sums_of_experts_in_bf16_are_the_oracles() {
    sums_are_the_oracles(Kind::Bf16, "experts_bf16");
}

#[test]
fn sums_of_experts_in_int8_are_the_oracles() {
    sums_are_the_oracles(Kind::Int8, "experts_int8");
}

#[test]
fn sums_of_experts_in_int4_are_the_oracles() {
    sums_are_the_oracles(Kind::Int4, "experts_int4");
}
