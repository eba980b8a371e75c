// Attention of f32 rows, in f32 throughout: for the precision that is to agree with the CPU's. No tensor cores.
#include "keys.cuh"
#include "reduce.cuh"
#include "scores.cuh"

constexpr int kF32Threads = 256;
constexpr uint32_t kF32Queries = kF32Threads / kWarp;
constexpr uint32_t kF32Keys = 32;
constexpr uint32_t kMaxHead = 256;
// Elements between two rows of a tile: one more than the widest head, so that the 32 lanes find 32 keys in different banks.
constexpr uint32_t kF32Pitch = kMaxHead + 1;

// A warp has one query of one head: each lane one key of a tile for the scores, then every 32nd column for the sum of values.
// Grid: (groups of 8 queries of the longest sequence, n_heads, n_seqs).
template <class Keys>
DEVICE void attention(float* out, const float* q, const Keys& keys, const Heads& heads, const Bias& bias, uint32_t q_stride, uint32_t out_stride) {
  SHARED_DYNAMIC(shared);
  auto* k = reinterpret_cast<float*>(shared);
  float* v = k + kF32Keys * kF32Pitch;
  uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  float* query = v + kF32Keys * kF32Pitch + warp * (kMaxHead + kF32Keys);
  float* weights = query + kMaxHead;
  uint32_t seq = blockIdx.z, head = blockIdx.y;
  uint32_t first_row = keys.query_start[seq], n_queries = keys.query_start[seq + 1] - first_row;
  uint32_t first = blockIdx.x * kF32Queries;
  if (first >= n_queries || !keys.takes(n_queries)) return;
  uint32_t row = first + warp, kv_head = head / (heads.n_heads / heads.n_kv_heads), n_keys = keys.n_keys(seq);
  bool is_there = row < n_queries;
  Scores<> scores(heads, bias, seq, head, first_row, n_queries, n_keys);
  uint32_t last = first + kF32Queries < n_queries ? first + kF32Queries - 1 : n_queries - 1;
  int end = scores.end(static_cast<int>(last)), begin = scores.begin(static_cast<int>(first)) / static_cast<int>(kF32Keys);
  int n_tiles = end <= 0 ? 0 : static_cast<int>(div_up(static_cast<uint32_t>(end), kF32Keys));

  for (uint32_t d = lane; d < heads.head_dim; d += kWarp) {
    query[d] = is_there ? q[uint64_t{first_row + row} * q_stride + head * heads.head_dim + d] : 0.0f;
  }
  float largest = -INFINITY, sum = 0, sums[kMaxHead / kWarp] = {};
  for (int tile = begin; tile < n_tiles; tile++) {
    sync_block();
    for (uint32_t i = threadIdx.x; i < kF32Keys * heads.head_dim; i += kF32Threads) {
      uint32_t r = i / heads.head_dim, d = i % heads.head_dim, key = tile * kF32Keys + r;
      k[r * kF32Pitch + d] = key < n_keys ? keys.key(seq, kv_head, key)[d] : 0.0f;
      v[r * kF32Pitch + d] = key < n_keys ? keys.value(seq, kv_head, key)[d] : 0.0f;
    }
    sync_block();
    float product = 0;
    for (uint32_t d = 0; d < heads.head_dim; d++) product += query[d] * k[lane * kF32Pitch + d];
    float score = scores.of(product, static_cast<int>(row), tile * static_cast<int>(kF32Keys) + static_cast<int>(lane));
    float top = fmaxf(largest, warp_max(score)), base = base_of(top);
    float factor = exp2f(largest - base), weight = exp2f(score - base);
    largest = top;
    sum = sum * factor + warp_sum(weight);
    weights[lane] = weight;
    sync_warp();
    UNROLL
    for (uint32_t i = 0; i < kMaxHead / kWarp; i++) {
      uint32_t d = i * kWarp + lane;
      if (i * kWarp >= heads.head_dim) break;
      sums[i] *= factor;
      if (d < heads.head_dim) {
        for (uint32_t j = 0; j < kF32Keys; j++) sums[i] += weights[j] * v[j * kF32Pitch + d];
      }
    }
    // All lanes are done with the weights before they are written again.
    sync_warp();
  }
  float scale = sum > 0 || sum != sum ? 1.0f / sum : 0.0f;
  UNROLL
  for (uint32_t i = 0; i < kMaxHead / kWarp; i++) {
    uint32_t d = i * kWarp + lane;
    if (is_there && d < heads.head_dim) out[uint64_t{first_row + row} * out_stride + head * heads.head_dim + d] = sums[i] * scale;
  }
}

KERNEL(kF32Threads, attention_f32,
       (float* out, const float* q, RaggedKeys<float> keys, Heads heads, Bias bias, uint32_t q_stride, uint32_t out_stride)) {
  attention(out, q, keys, heads, bias, q_stride, out_stride);
}

KERNEL(kF32Threads, paged_attention_f32,
       (float* out, const float* q, PagedKeys<float> keys, Heads heads, Bias bias, uint32_t q_stride, uint32_t out_stride)) {
  attention(out, q, keys, heads, bias, q_stride, out_stride);
}
