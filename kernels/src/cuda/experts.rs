//! Mixtures of experts: their weights, and the launches of one layer.
//!
//! Rows are grouped by expert on the device: nothing comes to the host, and every grid follows from shapes, so that a layer can be
//! captured.

use super::arguments::{Grouped, RouteArrays, Router};
use super::linear::CudaLinear;
use super::memory::{Fixed, Piece};
use super::queue::{Launch, Queue, as_bytes};
use super::rows::{activation_number, shared_work};
use super::tensor::CudaTensor;
use crate::check;
use crate::ops::{ExpertLayers, KernelError, Result, Routed, RouterScores, Routing};

/// Rows of one expert that a block multiplies.
const TILE_ROWS: usize = 8;

/// Most experts of a layer: a lane keeps a bit for each 32nd.
const MAX_EXPERTS: usize = 1024;

/// The experts of a layer on a device.
#[derive(Debug)]
pub struct CudaExperts {
    /// `[n_experts]`.
    layers: Vec<ExpertLayers<CudaLinear>>,
    gate_up: Side,
    down: Side,
}

/// One of the two layers of every expert.
#[derive(Debug)]
struct Side {
    n_in: usize,
    n_out: usize,
    /// Addresses of weights, then of scales: u64, `[2, n_experts]`.
    table: Fixed,
}

/// The routes of a batch.
struct Routes {
    // Behind the addresses of `arrays`.
    _words: Piece,
    arrays: RouteArrays,
    router: Router,
    n_pairs: usize,
    n_tiles: usize,
}

impl CudaExperts {
    /// Puts the layers of experts together.
    pub(super) fn new(queue: &Queue, layers: Vec<ExpertLayers<CudaLinear>>) -> Result<Self> {
        let op = "load_experts";
        let [up, down] = check::experts(layers.iter().map(|e| [e.gate_up.dims(), e.down.dims()]))?;
        if layers.len() > MAX_EXPERTS {
            return Err(KernelError::Index {
                op,
                what: "experts",
                index: layers.len(),
                len: MAX_EXPERTS + 1,
            });
        }
        let side = |layer: fn(&ExpertLayers<CudaLinear>) -> &CudaLinear, (n_in, n_out)| {
            let addresses = layers.iter().map(|expert| layer(expert).expert_addresses(op));
            let addresses: Vec<[u64; 2]> = addresses.collect::<Result<_>>()?;
            let [weights, scales] = [0, 1].map(|i| addresses.iter().map(move |pair| pair[i]));
            let table: Vec<u64> = weights.chain(scales).collect();
            Ok::<_, KernelError>(Side { n_in, n_out, table: queue.fixed(op, as_bytes(&table))? })
        };
        let [gate_up, down] = [side(|e| &e.gate_up, up)?, side(|e| &e.down, down)?];
        Ok(Self { gate_up, down, layers })
    }

    /// [`fused_experts`](crate::ops::Backend::fused_experts).
    pub(super) fn apply(&self, queue: &Queue, routed: Routed<'_, CudaTensor>) -> Result<CudaTensor> {
        let op = "fused_experts";
        let Routed { x, logits, routing, activation, residual } = routed;
        let (n_tokens, hidden) = x.dims();
        let top_k = [routing.top_k, Routing::MAX_TOP_K];
        check::fused_experts(x.dims(), logits.dims(), self.layers.len(), top_k)?;
        check::linear(x.dims(), (self.gate_up.n_in, hidden), residual.map(CudaTensor::dims))?;
        let y = CudaTensor::new(op, queue, x.dims())?;
        if y.n_values() == 0 {
            return Ok(y);
        }
        let kernels = &queue.device().kernels;
        let routes = Routes::new(queue, logits, routing)?;
        let inner = CudaTensor::new(op, queue, (routes.n_pairs, self.gate_up.n_out))?;
        self.multiply(queue, &self.gate_up, &routes, Rows { x, is_by_token: true, y: inner.address() })?;
        let gated = CudaTensor::new(op, queue, (routes.n_pairs, self.down.n_in))?;
        let (act, width) = (activation_number(activation), gated.dims().1 as u32);
        let n_rows = gated.dims().0 as u32;
        let gate = queue.kernel(kernels.gate);
        let launch = shared_work(gated.n_values());
        queue.launch(op, gate, launch, [&gated.address(), &inner.address(), &act, &n_rows, &width])?;
        let sums = CudaTensor::of(op, queue, super::element::Element::F32, (routes.n_pairs, hidden))?;
        self.multiply(queue, &self.down, &routes, Rows { x: &gated, is_by_token: false, y: sums.address() })?;
        let residual = residual.map_or(0, CudaTensor::address);
        let launch = shared_work(n_tokens * hidden);
        let arguments: [&dyn super::queue::Argument; 6] =
            [&y.address(), &sums.address(), &residual, &routes.arrays, &routes.router, &(hidden as u32)];
        queue.launch(op, queue.kernel(kernels.sum_experts), launch, arguments)?;
        Ok(y)
    }

    /// The rows of each place times its expert's weights.
    fn multiply(&self, queue: &Queue, side: &Side, routes: &Routes, rows: Rows<'_>) -> Result<()> {
        let kernels = &queue.device().kernels;
        let table = side.table.address();
        // Rows of tokens give values that are rounded, those of places sums.
        let [to_rows, to_sums] = if rows.is_by_token { [rows.y, 0] } else { [0, rows.y] };
        let grouped = Grouped {
            x: rows.x.address(),
            rows: to_rows,
            sums: to_sums,
            weights: table,
            scales: table + (self.layers.len() * size_of::<u64>()) as u64,
            order: routes.arrays.order,
            tiles: routes.arrays.tiles,
            top_k: routes.router.top_k,
            is_by_token: u32::from(rows.is_by_token),
            n_in: side.n_in as u32,
            n_out: side.n_out as u32,
        };
        let function = match self.layers.first() {
            Some(expert) => expert.gate_up.expert_kernel(kernels),
            None => return Ok(()),
        };
        let grid = [side.n_out.div_ceil(16), routes.n_tiles, 1];
        queue.launch("fused_experts", function, Launch { grid, threads: 128, shared_bytes: 0 }, [&grouped])
    }
}

/// Rows of a product, and where it goes.
struct Rows<'a> {
    x: &'a CudaTensor,
    is_by_token: bool,
    y: u64,
}

impl Routes {
    fn new(queue: &Queue, logits: &CudaTensor, routing: Routing) -> Result<Self> {
        let op = "fused_experts";
        let (n_tokens, n_experts) = logits.dims();
        let n_pairs = n_tokens * routing.top_k;
        // Every expert may have a tile that is not full.
        let n_tiles = n_pairs.min(n_pairs / TILE_ROWS + n_experts);
        let words = queue.take(op, (4 * n_pairs + n_experts + 3 * n_tiles) * size_of::<u32>())?;
        let at = |words_before: usize| words.address() + (words_before * size_of::<u32>()) as u64;
        let arrays = RouteArrays {
            experts: at(0),
            weights: at(n_pairs),
            places: at(2 * n_pairs),
            order: at(3 * n_pairs),
            counts: at(4 * n_pairs),
            tiles: at(4 * n_pairs + n_experts),
        };
        let router = Router {
            n_tokens: n_tokens as u32,
            n_experts: n_experts as u32,
            top_k: routing.top_k as u32,
            is_sigmoid: u32::from(routing.scores == RouterScores::Sigmoid),
            renormalize: u32::from(routing.renormalize),
            scale: routing.scale,
        };
        let kernels = &queue.device().kernels;
        let launch = |blocks, threads| Launch { grid: [blocks, 1, 1], threads, shared_bytes: 0 };
        let (route, from) = (queue.kernel(kernels.route), logits.address());
        queue.launch(op, route, launch(n_tokens.div_ceil(4), 128), [&arrays, &from, &router])?;
        queue.launch(op, kernels.count_routes, launch(n_experts, 256), [&arrays, &router])?;
        let tiles = n_tiles as u32;
        queue.launch(op, kernels.place_routes, launch(n_experts, 256), [&arrays, &router, &tiles])?;
        Ok(Self { _words: words, arrays, router, n_pairs, n_tiles })
    }
}
