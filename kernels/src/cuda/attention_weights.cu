// Softmax weights of some heads of attention inside sequences, for the alignment of tokens with encoder rows.
#include "keys.cuh"
#include "reduce.cuh"
#include "scores.cuh"

constexpr int kWeightThreads = 256;
constexpr uint32_t kMaxHead = 256;

// One block has one query of one chosen head: its threads take every 256th key each. `out`: from `starts[seq]` on
// `[n_chosen, n_q, n_k]` of a sequence; a query that sees no key gives zeros. Grid: (longest n_queries, n_chosen, n_seqs).
template <class T>
DEVICE void attention_weights(float* out, const T* q, const RaggedKeys<T>& keys, const Heads& heads, const Bias& bias, const uint32_t* chosen,
                              const uint64_t* starts, uint32_t q_stride) {
  SHARED(float, query, kMaxHead);
  SHARED(float, scratch, kWeightThreads / kWarp);
  uint32_t seq = blockIdx.z, head = chosen[blockIdx.y], i = blockIdx.x;
  uint32_t first_row = keys.query_start[seq], n_queries = keys.query_start[seq + 1] - first_row;
  if (i >= n_queries) return;
  uint32_t kv_head = head / (heads.n_heads / heads.n_kv_heads), n_keys = keys.n_keys(seq);
  Scores<> scores(heads, bias, seq, head, first_row, n_queries, n_keys);
  float* row = out + starts[seq] + (uint64_t{blockIdx.y} * n_queries + i) * n_keys;
  for (uint32_t d = threadIdx.x; d < heads.head_dim; d += kWeightThreads) {
    query[d] = to_f32(q[uint64_t{first_row + i} * q_stride + head * heads.head_dim + d]);
  }
  sync_block();
  float largest = -INFINITY;
  // A thread reads back what it wrote itself.
  for (uint32_t key = threadIdx.x; key < n_keys; key += kWeightThreads) {
    const T* k = keys.key(seq, kv_head, key);
    float product = 0;
    for (uint32_t d = 0; d < heads.head_dim; d++) product += query[d] * to_f32(k[d]);
    float score = scores.of(product, static_cast<int>(i), static_cast<int>(key));
    row[key] = score;
    largest = fmaxf(largest, score);
  }
  float base = base_of(block_max<kWeightThreads>(largest, scratch)), part = 0;
  for (uint32_t key = threadIdx.x; key < n_keys; key += kWeightThreads) {
    float weight = exp2f(row[key] - base);
    row[key] = weight;
    part += weight;
  }
  float sum = block_sum<kWeightThreads>(part, scratch), scale = sum > 0 || sum != sum ? 1.0f / sum : 0.0f;
  for (uint32_t key = threadIdx.x; key < n_keys; key += kWeightThreads) row[key] *= scale;
}

#define PARAMETERS(T)                                                                                                                    \
  (float* out, const T* q, RaggedKeys<T> keys, Heads heads, Bias bias, const uint32_t* chosen, const uint64_t* starts, uint32_t q_stride)
KERNELS(kWeightThreads, attention_weights, attention_weights, PARAMETERS, (out, q, keys, heads, bias, chosen, starts, q_stride))
#undef PARAMETERS
