// Rotary embedding, in place or on the way into the cache.
#include "each.cuh"
#include "pages.cuh"

// The part of a head that is rotated: pair `i` is (x[i], x[i + rotary_dim / 2]) or, interleaved, (x[2 i], x[2 i + 1]). `cos`,
// `sin: [n_tokens, rotary_dim / 2]`, the same for all heads.
struct Rotation {
  const float* cos;
  const float* sin;
  uint32_t rotary_dim;
  uint32_t is_interleaved;
};

// Element `e` of a head after the rotation of token `token`.
template <class T>
DEVICE float rotated(const T* head, uint32_t e, uint32_t token, const Rotation& rotation) {
  if (e >= rotation.rotary_dim) return to_f32(head[e]);
  uint32_t half = rotation.rotary_dim / 2;
  uint32_t pair = rotation.is_interleaved ? e / 2 : e % half;
  bool is_second = rotation.is_interleaved ? e % 2 : e >= half;
  uint32_t first = rotation.is_interleaved ? 2 * pair : pair, second = rotation.is_interleaved ? first + 1 : pair + half;
  float a = to_f32(head[first]), b = to_f32(head[second]);
  float cos = rotation.cos[uint64_t{token} * half + pair], sin = rotation.sin[uint64_t{token} * half + pair];
  return is_second ? b * cos + a * sin : a * cos - b * sin;
}

// Rotates `n_heads` heads of each row of `x`, which start `row_stride` elements apart.
template <class T>
DEVICE void rope(T* x, Rotation rotation, uint32_t n_tokens, uint32_t n_heads, uint32_t head_dim, uint32_t row_stride) {
  uint32_t half = rotation.rotary_dim / 2;
  uint64_t n = uint64_t{n_tokens} * n_heads * half;
  for (uint64_t i = uint64_t{blockIdx.x} * kRowThreads + threadIdx.x; i < n; i += uint64_t{gridDim.x} * kRowThreads) {
    uint32_t pair = static_cast<uint32_t>(i % half), head = static_cast<uint32_t>(i / half % n_heads);
    uint32_t token = static_cast<uint32_t>(i / half / n_heads);
    T* at = x + uint64_t{token} * row_stride + head * head_dim;
    uint32_t first = rotation.is_interleaved ? 2 * pair : pair, second = rotation.is_interleaved ? first + 1 : pair + half;
    // Both are computed before either is written.
    float a = rotated(at, first, token, rotation), b = rotated(at, second, token, rotation);
    at[first] = from_f32<T>(a);
    at[second] = from_f32<T>(b);
  }
}

#define PARAMETERS(T) (T * x, Rotation rotation, uint32_t n_tokens, uint32_t n_heads, uint32_t head_dim, uint32_t row_stride)
KERNELS(kRowThreads, rope, rope, PARAMETERS, (x, rotation, n_tokens, n_heads, head_dim, row_stride))
#undef PARAMETERS

// Writes keys, rotated unless `rotation.rotary_dim` is 0, and values of token `i` to slot `slots[i]`; slot = page * 32 + place.
// `k`, `v`: rows of `n_kv_heads` heads, `k_stride` and `v_stride` elements apart. What pads a head is written as zero.
template <class T>
DEVICE void write_kv(Pages<T> pages, const T* k, const T* v, const uint32_t* slots, Rotation rotation, uint32_t n_tokens, uint32_t head_dim,
                     uint32_t k_stride, uint32_t v_stride) {
  uint32_t row = pages.n_kv_heads * pages.head_stride;
  uint64_t n = uint64_t{n_tokens} * row;
  for (uint64_t i = uint64_t{blockIdx.x} * kRowThreads + threadIdx.x; i < n; i += uint64_t{gridDim.x} * kRowThreads) {
    uint32_t token = static_cast<uint32_t>(i / row), head = static_cast<uint32_t>(i % row) / pages.head_stride;
    uint32_t e = static_cast<uint32_t>(i % row) % pages.head_stride, slot = slots[token];
    uint64_t to = pages.at(slot / kPageTokens, head, slot % kPageTokens) + e;
    bool is_there = e < head_dim;
    pages.k[to] = from_f32<T>(is_there ? rotated(k + uint64_t{token} * k_stride + head * head_dim, e, token, rotation) : 0.0f);
    pages.v[to] = from_f32<T>(is_there ? to_f32(v[uint64_t{token} * v_stride + head * head_dim + e]) : 0.0f);
  }
}

#define PARAMETERS(T)                                                                                                             \
  (Pages<T> pages, const T* k, const T* v, const uint32_t* slots, Rotation rotation, uint32_t n_tokens, uint32_t head_dim, uint32_t k_stride, \
   uint32_t v_stride)
KERNELS(kRowThreads, write_kv, write_kv, PARAMETERS, (pages, k, v, slots, rotation, n_tokens, head_dim, k_stride, v_stride))
#undef PARAMETERS

// The same of rows in which `n_heads` heads of queries stand in front of as many keys and values as pages have: queries,
// rotated, go to `q: [n_tokens, n_heads head_dim]`.
template <class T>
DEVICE void write_qkv(T* q, Pages<T> pages, const T* rows, const uint32_t* slots, Rotation rotation, uint32_t n_tokens, uint32_t n_heads,
                      uint32_t head_dim) {
  uint32_t all_heads = n_heads + 2 * pages.n_kv_heads, width = all_heads * pages.head_stride;
  uint64_t n = uint64_t{n_tokens} * width;
  for (uint64_t i = uint64_t{blockIdx.x} * kRowThreads + threadIdx.x; i < n; i += uint64_t{gridDim.x} * kRowThreads) {
    uint32_t token = static_cast<uint32_t>(i / width), column = static_cast<uint32_t>(i % width);
    uint32_t head = column / pages.head_stride, e = column % pages.head_stride;
    const T* from = rows + (uint64_t{token} * all_heads + head) * head_dim;
    bool is_there = e < head_dim, is_value = head >= n_heads + pages.n_kv_heads;
    float value = !is_there ? 0.0f : is_value ? to_f32(from[e]) : rotated(from, e, token, rotation);
    if (head < n_heads) {
      if (is_there) q[(uint64_t{token} * n_heads + head) * head_dim + e] = from_f32<T>(value);
      continue;
    }
    uint32_t slot = slots[token], kv_head = head - n_heads - (is_value ? pages.n_kv_heads : 0);
    uint64_t to = pages.at(slot / kPageTokens, kv_head, slot % kPageTokens) + e;
    (is_value ? pages.v : pages.k)[to] = from_f32<T>(value);
  }
}

#define PARAMETERS(T)                                                                                                               \
  (T * q, Pages<T> pages, const T* rows, const uint32_t* slots, Rotation rotation, uint32_t n_tokens, uint32_t n_heads, uint32_t head_dim)
KERNELS(kRowThreads, write_qkv, write_qkv, PARAMETERS, (q, pages, rows, slots, rotation, n_tokens, n_heads, head_dim))
#undef PARAMETERS
