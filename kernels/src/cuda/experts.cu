// Mixtures of experts: routing, the grouping of rows by expert, their products with the experts' weights, and the sums.
//
// A pair is a token and one of its experts, numbered `token · top_k + rank`, ranks ascending with the experts' numbers. Places are
// the pairs grouped by expert, within an expert ascending. Grids depend on shapes alone: a tile is up to eight places of one expert,
// and tiles that a batch does not need have none.
#include "activation.cuh"
#include "each.cuh"
#include "fragments.cuh"
#include "reduce.cuh"

constexpr int kRouteThreads = 128;

struct Routing {
  uint32_t n_tokens, n_experts, top_k, is_sigmoid, renormalize;
  float scale;
};

// `experts`, `weights`, `places: [n_tokens · top_k]` by pair; `order: [n_tokens · top_k]` by place, pairs;
// `counts: [n_experts]`; `tiles: [n_tiles, 3]`, an expert, its first place and their number.
struct Routes {
  uint32_t* experts;
  float* weights;
  uint32_t* places;
  uint32_t* order;
  uint32_t* counts;
  uint32_t* tiles;
};

constexpr uint32_t kNone = 0xffffffffu;

// The experts of each token and their weights, a warp for each. `logits: [n_tokens, n_experts]`, at most 1024 experts, at most 32
// of them a token's. Grid: n_tokens / 4, rounded up.
template <class T>
DEVICE void route(Routes routes, const T* logits, Routing r) {
  uint32_t lane = threadIdx.x % kWarp, token = blockIdx.x * (kRouteThreads / kWarp) + threadIdx.x / kWarp;
  if (token >= r.n_tokens) return;
  const T* row = logits + uint64_t{token} * r.n_experts;
  auto key = [&](uint32_t expert) {
    float logit = to_f32(row[expert]);
    return logit == logit ? logit : -INFINITY;
  };
  // Bit j: expert 32 j + lane is chosen.
  uint32_t chosen = 0, expert = kNone;
  float logit = -INFINITY;
  for (uint32_t rank = 0; rank < r.top_k; rank++) {
    float best = -INFINITY;
    uint32_t best_expert = kNone;
    for (uint32_t j = 0; j * kWarp + lane < r.n_experts; j++) {
      uint32_t e = j * kWarp + lane;
      float value = key(e);
      if (chosen >> j & 1 || (best_expert != kNone && value <= best)) continue;
      best = value;
      best_expert = e;
    }
    UNROLL
    for (int mask = kWarp / 2; mask > 0; mask /= 2) {
      float other = shuffle_xor(best, mask);
      uint32_t other_expert = shuffle_xor(best_expert, mask);
      bool is_better = other_expert != kNone && (best_expert == kNone || other > best || (other == best && other_expert < best_expert));
      if (is_better) {
        best = other;
        best_expert = other_expert;
      }
    }
    if (best_expert % kWarp == lane) chosen |= 1u << best_expert / kWarp;
    if (rank == lane) {
      logit = best;
      expert = best_expert;
    }
  }
  float highest = shuffle(logit, 0), all = 1;
  auto score = [&](float x) { return r.is_sigmoid ? 1.0f / (1.0f + expf(-x)) : expf(x - highest); };
  float own = lane < r.top_k ? score(logit) : 0.0f;
  if (r.renormalize) {
    all = warp_sum(own);
  } else if (!r.is_sigmoid) {
    float sum = 0;
    for (uint32_t e = lane; e < r.n_experts; e += kWarp) sum += score(key(e));
    all = warp_sum(sum);
  }
  uint32_t rank = 0;
  for (uint32_t other = 0; other < r.top_k; other++) rank += shuffle(expert, static_cast<int>(other)) < expert;
  if (lane >= r.top_k) return;
  routes.experts[token * r.top_k + rank] = expert;
  routes.weights[token * r.top_k + rank] = own / all * r.scale;
}

#define PARAMETERS(T) (Routes routes, const T* logits, Routing r)
KERNELS(kRouteThreads, route, route, PARAMETERS, (routes, logits, r))
#undef PARAMETERS

// Pairs of each expert. Grid: n_experts.
KERNEL(kRowThreads, count_routes, (Routes routes, Routing r)) {
  SHARED(float, scratch, kRowThreads / kWarp);
  uint32_t n = 0;
  for (uint32_t pair = threadIdx.x; pair < r.n_tokens * r.top_k; pair += kRowThreads) n += routes.experts[pair] == blockIdx.x;
  // Exact: a thread counts a part of less than 2^24 pairs.
  float sum = block_sum<kRowThreads>(static_cast<float>(n), scratch);
  if (threadIdx.x == 0) routes.counts[blockIdx.x] = static_cast<uint32_t>(sum);
}

// Places of the pairs, and the tiles, of each expert. Grid: n_experts.
KERNEL(kRowThreads, place_routes, (Routes routes, Routing r, uint32_t n_tiles)) {
  SHARED(uint32_t, in_warp, kRowThreads / kWarp);
  uint32_t expert = blockIdx.x, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  uint32_t first = 0, tile = 0, count = routes.counts[expert];
  for (uint32_t before = 0; before < expert; before++) {
    first += routes.counts[before];
    tile += div_up(routes.counts[before], kTokens);
  }
  uint32_t own = div_up(count, kTokens), end = expert + 1 == r.n_experts ? n_tiles : tile + own;
  for (uint32_t i = tile + threadIdx.x; i < end; i += kRowThreads) {
    uint32_t done = (i - tile) * kTokens;
    routes.tiles[3 * i] = expert;
    routes.tiles[3 * i + 1] = first + done;
    routes.tiles[3 * i + 2] = done >= count ? 0 : count - done < kTokens ? count - done : kTokens;
  }
  uint32_t n_pairs = r.n_tokens * r.top_k;
  for (uint32_t start = 0; start < n_pairs; start += kRowThreads) {
    uint32_t pair = start + threadIdx.x;
    bool is_own = pair < n_pairs && routes.experts[pair] == expert;
    uint32_t lanes = warp_ballot(is_own);
    if (lane == 0) in_warp[warp] = count_bits(lanes);
    sync_block();
    uint32_t place = first + count_bits(lanes & ((1u << lane) - 1));
    for (uint32_t w = 0; w < kRowThreads / kWarp; w++) {
      if (w < warp) place += in_warp[w];
      first += in_warp[w];
    }
    if (is_own) {
      routes.order[place] = pair;
      routes.places[pair] = place;
    }
    sync_block();
  }
}

// Products of each place with its expert's weights, `[n_places, n_out]`: bf16 into `rows`, or f32 into `sums`. `x` is
// `[n_tokens, n_in]` if `is_by_token`, or else `[n_places, n_in]`. `weights`, `scales: [n_experts]` are addresses.
struct Grouped {
  const void* x;
  void* rows;
  float* sums;
  const uint64_t* weights;
  const uint64_t* scales;
  const uint32_t* order;
  const uint32_t* tiles;
  uint32_t top_k, is_by_token, n_in, n_out;
};

// The tile of a block and the row of each place in it.
struct Tile {
  uint32_t expert, first, count;

  DEVICE explicit Tile(const Grouped& g)
      : expert(g.tiles[3 * blockIdx.y]), first(g.tiles[3 * blockIdx.y + 1]), count(g.tiles[3 * blockIdx.y + 2]) {}

  template <class T>
  DEVICE const T* row(const Grouped& g, uint32_t i) const {
    if (i >= count) return nullptr;
    uint32_t place = first + i;
    return static_cast<const T*>(g.x) + uint64_t{g.is_by_token ? g.order[place] / g.top_k : place} * g.n_in;
  }

  // Writes the sum of row `i` and the block's output `o`.
  template <class T>
  DEVICE void write(const Grouped& g, uint32_t i, uint32_t o, float sum) const {
    uint32_t out = blockIdx.x * kOutputs + o;
    if (i >= count || out >= g.n_out) return;
    uint64_t at = uint64_t{first + i} * g.n_out + out;
    if (g.sums) g.sums[at] = sum;
    else static_cast<T*>(g.rows)[at] = from_f32<T>(sum);
  }
};

// Grid of all four: (n_out / 16, rounded up, n_tiles).
KERNEL(kLinearThreads, experts_bf16, (Grouped g)) {
  Tile tile(g);
  if (tile.count == 0) return;
  float sums[4] = {};
  const bf16* row = tile.row<bf16>(g, threadIdx.x % kWarp / 4);
  multiply_bf16(sums, reinterpret_cast<const bf16*>(g.weights[tile.expert]), blockIdx.x, row, g.n_in);
  tile.write<bf16>(g, threadIdx.x / kOutputs, threadIdx.x % kOutputs, join_warps(sums));
}

KERNEL(kLinearThreads, experts_int8, (Grouped g)) {
  Tile tile(g);
  if (tile.count == 0) return;
  float sums[4] = {};
  const bf16* row = tile.row<bf16>(g, threadIdx.x % kWarp / 4);
  const auto* weight = reinterpret_cast<const int8_t*>(g.weights[tile.expert]);
  multiply_int8(sums, weight, reinterpret_cast<const float*>(g.scales[tile.expert]), blockIdx.x, row, g.n_in, g.n_out);
  tile.write<bf16>(g, threadIdx.x / kOutputs, threadIdx.x % kOutputs, join_warps(sums));
}

KERNEL(kLinearThreads, experts_int4, (Grouped g)) {
  Tile tile(g);
  if (tile.count == 0) return;
  float sums[4] = {};
  const bf16* row = tile.row<bf16>(g, threadIdx.x % kWarp / 4);
  const auto* weight = reinterpret_cast<const uint8_t*>(g.weights[tile.expert]);
  multiply_int4(sums, weight, reinterpret_cast<const bf16*>(g.scales[tile.expert]), blockIdx.x, row, g.n_in);
  tile.write<bf16>(g, threadIdx.x / kOutputs, threadIdx.x % kOutputs, join_warps(sums));
}

// Weights row by row, `[n_out, n_in]`; a thread for each row and output.
KERNEL(kLinearThreads, experts_f32, (Grouped g)) {
  Tile tile(g);
  uint32_t i = threadIdx.x / kOutputs, out = blockIdx.x * kOutputs + threadIdx.x % kOutputs;
  const float* row = tile.row<float>(g, i);
  if (!row || out >= g.n_out) return;
  const float* weight = reinterpret_cast<const float*>(g.weights[tile.expert]) + uint64_t{out} * g.n_in;
  float sum = 0;
  for (uint32_t k = 0; k < g.n_in; k++) sum += row[k] * weight[k];
  tile.write<float>(g, i, threadIdx.x % kOutputs, sum);
}

// y = residual + the weighted sum of each token's places, in the order of its pairs. `sums: [n_places, width]`; `residual` may be
// null. Grid: any.
template <class T, int N>
DEVICE void sum_vectors(T* y, const float* sums, const T* residual, Routes routes, Routing r, uint32_t width) {
  each_vector<N>(r.n_tokens, width, [&](uint32_t token, uint32_t column) {
    float total[N] = {};
    for (uint32_t pair = token * r.top_k; pair < (token + 1) * r.top_k; pair++) {
      const float* from = sums + uint64_t{routes.places[pair]} * width + column;
      float weight = routes.weights[pair];
      UNROLL
      for (int i = 0; i < N; i++) total[i] += weight * from[i];
    }
    uint64_t at = uint64_t{token} * width + column;
    Pack<T, N> sum, rest = {};
    if (residual) rest = load_pack<N>(residual + at);
    UNROLL
    for (int i = 0; i < N; i++) sum.value[i] = from_f32<T>(residual ? total[i] + to_f32(rest.value[i]) : total[i]);
    store_pack<N>(y + at, sum);
  });
}

template <class T>
DEVICE void sum_experts(T* y, const float* sums, const T* residual, Routes routes, Routing r, uint32_t width) {
  if (by_vectors<T>(width)) sum_vectors<T, kPack<T>>(y, sums, residual, routes, r, width);
  else sum_vectors<T, 1>(y, sums, residual, routes, r, width);
}

#define PARAMETERS(T) (T * y, const float* sums, const T* residual, Routes routes, Routing r, uint32_t width)
KERNELS(kRowThreads, sum_experts, sum_experts, PARAMETERS, (y, sums, residual, routes, r, width))
#undef PARAMETERS
