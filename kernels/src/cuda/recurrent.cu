// Recurrent states of sequences: causal convolutions of channels, and the gated delta rule.
//
// Both go over the tokens of a sequence in order, from the state that its slot has, and leave the state after the last of them there.
// A value is computed in the same way wherever a step begins.
#include "activation.cuh"
#include "element.cuh"
#include "reduce.cuh"

// States of one layer, f32, and the sequences that have them. A slot of padding is all ones: nothing is read for it, rows are zeros.
struct States {
  float* values;
  const uint32_t* query_start;
  const uint32_t* slots;
  uint64_t slot_stride;
  // Values of the convolution, before those of the heads.
  uint32_t n_conv;
  uint32_t gap;

  DEVICE bool is_padding(uint32_t seq) const { return slots[seq] == 0xffffffffu; }
  DEVICE float* of(uint32_t seq) const { return values + uint64_t{slots[seq]} * slot_stride; }
};

constexpr int kConvThreads = 256;
// Rows of a sequence that a block convolves: no fewer than rows that a kernel reaches back, so that only the first block of a
// sequence reads its state, which it then replaces.
constexpr uint32_t kConvRows = 64;

// y = act(bias + sum over j of weight[j] x[t - kernel + 1 + j]). `x`, `y: [n_rows, channels]`, `weight: [kernel, channels]`,
// `bias: [channels]` or null; `state: [kernel - 1, channels]`, the last rows before. Grid: (channels / 256, rows / 64, n_seqs).
template <class T>
DEVICE void causal_conv(T* y, const T* x, const float* weight, const float* bias, States states, uint32_t activation, uint32_t channels,
                        uint32_t kernel) {
  uint32_t channel = blockIdx.x * kConvThreads + threadIdx.x, seq = blockIdx.z, first = blockIdx.y * kConvRows;
  uint32_t start = states.query_start[seq], n = states.query_start[seq + 1] - start;
  if (channel >= channels || first >= n) return;
  uint32_t end = first + kConvRows < n ? first + kConvRows : n;
  T* to = y + uint64_t{start} * channels + channel;
  if (states.is_padding(seq)) {
    for (uint32_t t = first; t < end; t++) to[uint64_t{t} * channels] = from_f32<T>(0.0f);
    return;
  }
  const T* from = x + uint64_t{start} * channels + channel;
  float* state = states.of(seq) + channel;
  uint32_t kept = kernel - 1;
  // Rows are counted from the oldest that is kept.
  auto value = [&](uint32_t row) {
    return row < kept ? state[uint64_t{row} * channels] : to_f32(from[uint64_t{row - kept} * channels]);
  };
  for (uint32_t t = first; t < end; t++) {
    float sum = bias ? bias[channel] : 0.0f;
    for (uint32_t tap = 0; tap < kernel; tap++) sum += value(t + tap) * weight[uint64_t{tap} * channels + channel];
    to[uint64_t{t} * channels] = from_f32<T>(activate(sum, activation));
  }
  if (first > 0) return;
  // A row that is written is not read any more: the one that replaces it lies behind it.
  for (uint32_t row = 0; row < kept; row++) state[uint64_t{row} * channels] = value(n + row);
}

#define PARAMETERS(T) \
  (T * y, const T* x, const float* weight, const float* bias, States states, uint32_t activation, uint32_t channels, uint32_t kernel)
KERNELS(kConvThreads, causal_conv, causal_conv, PARAMETERS, (y, x, weight, bias, states, activation, channels, kernel))
#undef PARAMETERS

// Rows of queries, keys and values, `[n_rows, 2 n_key_heads key_dim + n_heads value_dim]`, and of gates, `[n_rows, 2 n_heads]`; of
// the decay `-exp(a_log)` and `dt_bias`, `[2, n_heads]`.
struct DeltaHeads {
  const float* decay;
  uint32_t n_heads;
  uint32_t n_key_heads;
  uint32_t key_dim;
  uint32_t value_dim;

  DEVICE uint32_t key_width() const { return n_key_heads * key_dim; }
  DEVICE uint32_t width() const { return 2 * key_width() + n_heads * value_dim; }
};

constexpr int kDeltaThreads = 256;
// Lanes that share a column of the state: lane p has keys p, p + 8, ...
constexpr int kParts = 8;
constexpr int kColumns = kDeltaThreads / kParts;
constexpr int kMaxKeys = 256;
constexpr int kKeys = kMaxKeys / kParts;
// Keys of a lane after which it looks whether there are more.
constexpr int kGroup = 4;
// Tokens that are prepared at once, each by a warp.
constexpr int kTokens = kDeltaThreads / kWarp;

// Tokens in shared memory.
struct Prepared {
  // Of each token, for every key, the value of the key vector and that of the query: `[kTokens, kMaxKeys, 2]`.
  float* key_query;
  // Product of both vectors, weight of the update, factor on the state: `[kTokens, 3]`.
  float* scalars;
};

// A warp puts one token of a head where all threads read it: vectors over their norms, zeros behind the last key.
template <class T>
DEVICE void prepare(Prepared to, const T* row, const T* gates, const DeltaHeads& heads, uint32_t head, uint32_t token) {
  uint32_t lane = threadIdx.x % kWarp;
  uint32_t key_head = head / (heads.n_heads / heads.n_key_heads);
  const T* q = row + key_head * heads.key_dim;
  const T* k = q + heads.key_width();
  float of_q = 0, of_k = 0, product = 0;
  for (uint32_t i = lane; i < heads.key_dim; i += kWarp) {
    float a = to_f32(q[i]), b = to_f32(k[i]);
    of_q += a * a;
    of_k += b * b;
  }
  of_q = 1.0f / sqrtf(warp_sum(of_q) + 1e-6f) / sqrtf(static_cast<float>(heads.key_dim));
  of_k = 1.0f / sqrtf(warp_sum(of_k) + 1e-6f);
  float* out = to.key_query + token * 2 * kMaxKeys;
  for (uint32_t i = lane; i < kMaxKeys; i += kWarp) {
    bool is_in = i < heads.key_dim;
    float a = is_in ? to_f32(q[i]) * of_q : 0.0f, b = is_in ? to_f32(k[i]) * of_k : 0.0f;
    out[2 * i] = b;
    out[2 * i + 1] = a;
    product += a * b;
  }
  product = warp_sum(product);
  if (lane > 0) return;
  float step = to_f32(gates[heads.n_heads + head]) + heads.decay[heads.n_heads + head];
  // Above 20 the logarithm is the step itself in f32.
  float softplus = step > 20.0f ? step : log1pf(expf(step));
  to.scalars[3 * token] = product;
  to.scalars[3 * token + 1] = 1.0f / (1.0f + expf(-to_f32(gates[head])));
  to.scalars[3 * token + 2] = expf(heads.decay[head] * softplus);
}

// The sum over the lanes of a column, in each of them.
DEVICE float column_sum(float x) {
  UNROLL
  for (int lane = kParts / 2; lane > 0; lane /= 2) x += shuffle_xor(x, lane);
  return x;
}

// Keys of a lane, of the `n` that it has.
template <class Body>
DEVICE void each_key(uint32_t n, Body body) {
  UNROLL
  for (int group = 0; group < kKeys; group += kGroup) {
    if (group < static_cast<int>(n)) {
      UNROLL
      for (int i = group; i < group + kGroup; i++) body(i);
    }
  }
}

// One token over a column of the state: with the decay d and the weight b, the value's part that is new is
// delta = b (v - d S k), the row is d S q + (k q) delta, and the state becomes d S + k delta.
DEVICE float token_row(float (&state)[kKeys], Prepared tokens, uint32_t token, uint32_t part, uint32_t n_keys, float v) {
  const float* at = tokens.key_query + token * 2 * kMaxKeys + 2 * part;
  float product = tokens.scalars[3 * token], beta = tokens.scalars[3 * token + 1], decay = tokens.scalars[3 * token + 2];
  float of_k = 0, of_q = 0;
  each_key(n_keys, [&](int i) {
    Pack<float, 2> both = load_pack<2>(at + 2 * kParts * i);
    of_k += state[i] * both.value[0];
    of_q += state[i] * both.value[1];
  });
  of_k = column_sum(of_k);
  of_q = column_sum(of_q);
  float delta = beta * (v - decay * of_k);
  each_key(n_keys, [&](int i) { state[i] = decay * state[i] + at[2 * kParts * i] * delta; });
  return decay * of_q + product * delta;
}

// One block goes over the tokens of a sequence for 32 columns of the state of a head, which its threads keep in registers.
// y: [n_rows, n_heads value_dim]. Grid: (value_dim / 32, n_heads, n_seqs).
template <class T>
DEVICE void delta_rule(T* y, const T* qkv, const T* gates, States states, DeltaHeads heads) {
  SHARED(float, key_query, kTokens * 2 * kMaxKeys);
  SHARED(float, scalars, 3 * kTokens);
  Prepared tokens = {key_query, scalars};
  uint32_t seq = blockIdx.z, head = blockIdx.y, part = threadIdx.x % kParts, warp = threadIdx.x / kWarp;
  uint32_t column = blockIdx.x * kColumns + threadIdx.x / kParts, y_width = heads.n_heads * heads.value_dim;
  uint32_t first = states.query_start[seq], end = states.query_start[seq + 1];
  bool is_in = column < heads.value_dim;
  T* to = y + head * heads.value_dim + column;
  if (states.is_padding(seq)) {
    for (uint32_t t = first + part; is_in && t < end; t += kParts) to[uint64_t{t} * y_width] = from_f32<T>(0.0f);
    return;
  }
  float* matrix = states.of(seq) + states.n_conv + uint64_t{head} * heads.key_dim * heads.value_dim + column;
  auto has = [&](int i) { return is_in && i * kParts + part < heads.key_dim; };
  auto value = [&](int i) -> float& { return matrix[uint64_t{i * kParts + part} * heads.value_dim]; };
  float state[kKeys];
  uint32_t n_keys = div_up(heads.key_dim, kParts);
  each_key(n_keys, [&](int i) { state[i] = has(i) ? value(i) : 0.0f; });
  const T* v = qkv + 2 * heads.key_width() + head * heads.value_dim + column;
  for (uint32_t start = first; start < end; start += kTokens) {
    uint32_t n = end - start < kTokens ? end - start : kTokens, mine = start + warp;
    if (warp < n) prepare(tokens, qkv + uint64_t{mine} * heads.width(), gates + uint64_t{mine} * 2 * heads.n_heads, heads, head, warp);
    sync_block();
    for (uint32_t token = 0; token < n; token++) {
      uint64_t row = start + token;
      float sum = token_row(state, tokens, token, part, n_keys, is_in ? to_f32(v[row * heads.width()]) : 0.0f);
      if (is_in && part == 0) to[row * y_width] = from_f32<T>(sum);
    }
    sync_block();
  }
  each_key(n_keys, [&](int i) {
    if (has(i)) value(i) = state[i];
  });
}

#define PARAMETERS(T) (T * y, const T* qkv, const T* gates, States states, DeltaHeads heads)
KERNELS(kDeltaThreads, gated_delta_rule, delta_rule, PARAMETERS, (y, qkv, gates, states, heads))
#undef PARAMETERS
