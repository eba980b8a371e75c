// Attention inside sequences for heads wider than those of the tiled kernels: few queries and keys, as of channels that attend to
// channels, each a row over all positions of an image.
#include "keys.cuh"
#include "reduce.cuh"
#include "scores.cuh"

constexpr int kWideThreads = 256;

// One block has one query of one head. Its threads share the elements of each product, then those of the result. `weights: [Σ
// queries, n_heads, max_keys]` is scratch. A query that sees no key gives zeros. Grid: (longest n_queries, n_heads, n_seqs).
template <class T>
DEVICE void attention_wide(T* out, float* weights, const T* q, const RaggedKeys<T>& keys, const Heads& heads, const Bias& bias,
                           uint32_t q_stride, uint32_t out_stride, uint32_t max_keys) {
  SHARED(float, scratch, kWideThreads / kWarp);
  uint32_t seq = blockIdx.z, head = blockIdx.y, i = blockIdx.x;
  uint32_t first_row = keys.query_start[seq], n_queries = keys.query_start[seq + 1] - first_row;
  if (i >= n_queries) return;
  uint32_t kv_head = head / (heads.n_heads / heads.n_kv_heads), n_keys = keys.n_keys(seq);
  Scores<> scores(heads, bias, seq, head, first_row, n_queries, n_keys);
  const T* query = q + uint64_t{first_row + i} * q_stride + uint64_t{head} * heads.head_dim;
  float* row = weights + (uint64_t{first_row + i} * heads.n_heads + head) * max_keys;
  float largest = -INFINITY;
  for (uint32_t key = 0; key < n_keys; key++) {
    const T* k = keys.key(seq, kv_head, key);
    float part = 0;
    for (uint32_t d = threadIdx.x; d < heads.head_dim; d += kWideThreads) part += to_f32(query[d]) * to_f32(k[d]);
    float score = scores.of(block_sum<kWideThreads>(part, scratch), static_cast<int>(i), static_cast<int>(key));
    if (threadIdx.x == 0) row[key] = score;
    largest = fmaxf(largest, score);
  }
  sync_block();
  float base = base_of(largest), sum = 0;
  for (uint32_t key = 0; key < n_keys; key++) sum += exp2f(row[key] - base);
  float scale = sum > 0 || sum != sum ? 1.0f / sum : 0.0f;
  T* to = out + uint64_t{first_row + i} * out_stride + uint64_t{head} * heads.head_dim;
  for (uint32_t d = threadIdx.x; d < heads.head_dim; d += kWideThreads) {
    float value = 0;
    for (uint32_t key = 0; key < n_keys; key++) value += exp2f(row[key] - base) * to_f32(keys.value(seq, kv_head, key)[d]);
    to[d] = from_f32<T>(value * scale);
  }
}

#define PARAMETERS(T)                                                                                                          \
  (T * out, float* weights, const T* q, RaggedKeys<T> keys, Heads heads, Bias bias, uint32_t q_stride, uint32_t out_stride, \
   uint32_t max_keys)
KERNELS(kWideThreads, attention_wide, attention_wide, PARAMETERS, (out, weights, q, keys, heads, bias, q_stride, out_stride, max_keys))
#undef PARAMETERS
