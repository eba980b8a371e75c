// What attention does to a score: its scale, the bias, and the keys that a query sees.
//
// Query `i` of a sequence of `n_q` queries and `n_k` keys stands at position `n_k - n_q + i`, key `j` at `j`. Scores are in powers
// of two: times log2(e), so that the softmax takes `exp2`.
#pragma once
#include "intrinsics.cuh"

constexpr float kLog2E = 1.44269504088896341f;

enum BiasKind : uint32_t { kNoBias, kByDistance, kAlibi, kMatrix };

// Bias added to each score. By distance: `values: [n_heads, 2 max_distance + 1]`, from the farthest key before the query to the
// farthest after. ALiBi: `values: [n_heads]`, slopes. Matrix: `values` from `offsets[seq]` on are `[n_heads, n_q, n_k]`; several
// sequences may have one offset.
struct Bias {
  const float* values;
  const uint64_t* offsets;
  uint32_t kind;
  uint32_t max_distance;
};

// Heads, and the keys that are seen. `window`: a query sees only so many keys up to its own, itself included; 0: all. `ahead`:
// keys after its own that each query sees as well, [Σ queries]; null: none. How far a query sees never falls from one to the next.
// `softcap`: scaled scores are `c tanh(score / c)` before a bias; 0: they are as they are. `quotient`: 2 / c.
struct Heads {
  uint32_t n_heads;
  uint32_t n_kv_heads;
  uint32_t head_dim;
  float scale;
  const uint32_t* ahead;
  uint32_t is_causal;
  uint32_t window;
  float softcap;
  float quotient;
};

// The scores of one head of one sequence. `kMayCap`: false in kernels that are launched without a cap alone, which have no code
// and no register for it.
template <bool kMayCap = true>
struct Scores {
  const float* bias;
  // Of the first query of the sequence; null: none.
  const uint32_t* ahead;
  uint32_t kind;
  int max_distance;
  int n_queries, n_keys;
  bool is_causal;
  int window;
  float scale, slope;
  // The factor of capped scores, 0 without a cap, and that of what their hyperbolic tangent takes.
  float cap, quotient;

  DEVICE Scores(const Heads& heads, const Bias& b, uint32_t seq, uint32_t head, uint32_t first_row, uint32_t queries, uint32_t keys)
      : bias(nullptr), ahead(heads.ahead ? heads.ahead + first_row : nullptr), kind(b.kind), max_distance(static_cast<int>(b.max_distance)), n_queries(static_cast<int>(queries)),
        n_keys(static_cast<int>(keys)), is_causal(heads.is_causal != 0), window(static_cast<int>(heads.window)),
        scale(heads.scale * kLog2E), slope(0), cap(heads.softcap * kLog2E), quotient(heads.quotient) {
    if (kind == kByDistance) bias = b.values + uint64_t{head} * (2 * b.max_distance + 1);
    if (kind == kAlibi) slope = b.values[head] * kLog2E;
    if (kind == kMatrix) bias = b.values + b.offsets[seq] + uint64_t{head} * queries * keys;
  }

  // Position of a query.
  DEVICE int position(int query) const { return n_keys - n_queries + query; }

  // One more than the last key that a query sees.
  DEVICE int end(int query) const {
    int last = position(query) + 1 + (ahead ? static_cast<int>(ahead[query]) : 0);
    return is_causal && last < n_keys ? last : n_keys;
  }

  // The first key that a query sees.
  DEVICE int begin(int query) const {
    int first = position(query) - window + 1;
    return window > 0 && first > 0 ? first : 0;
  }

  // The score of a product, minus infinity where the query does not see the key. A tile has rows beyond the last query; they see
  // none.
  DEVICE float of(float product, int query, int key) const {
    // Checked first: there is nothing ahead of a query that is not there.
    if (query >= n_queries) return -INFINITY;
    if (key >= end(query) || key < begin(query)) return -INFINITY;
    float score = product * scale;
    if constexpr (kMayCap) {
      // tanh x is 1 - 2 / (1 + e^2x), here within 2e-7.
      if (cap > 0) score = cap * (1.0f - 2.0f * reciprocal_fast(1.0f + exp2_fast(score * quotient)));
    }
    if (kind == kNoBias) return score;
    int distance = key - position(query);
    if (kind == kAlibi) return score - slope * static_cast<float>(distance < 0 ? -distance : distance);
    if (kind == kByDistance) {
      int clamped = distance < -max_distance ? -max_distance : distance > max_distance ? max_distance : distance;
      return score + kLog2E * bias[clamped + max_distance];
    }
    return score + kLog2E * bias[static_cast<int64_t>(query) * n_keys + key];
  }
};

// What is subtracted from scores before the exponential: their largest, or 0 if no key is seen.
DEVICE float base_of(float largest) { return largest == -INFINITY ? 0.0f : largest; }
