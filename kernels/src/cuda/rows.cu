// Ops that move rows or treat each element alone. Matrices are row-major `[n_rows, width]`.
#include "activation.cuh"
#include "each.cuh"

// y[i] = x[rows[i]]; an embedding is the same of its table. `rows: [n_rows]`.
template <class T, int N>
DEVICE void gather(T* y, const T* x, const uint32_t* rows, uint32_t n_rows, uint32_t width) {
  each_vector<N>(n_rows, width, [&](uint32_t row, uint32_t column) {
    store_pack<N>(y + uint64_t{row} * width + column, load_pack<N>(x + uint64_t{rows[row]} * width + column));
  });
}

template <class T>
DEVICE void gather_rows(T* y, const T* x, const uint32_t* rows, uint32_t n_rows, uint32_t width) {
  if (by_vectors<T>(width)) gather<T, kPack<T>>(y, x, rows, n_rows, width);
  else gather<T, 1>(y, x, rows, n_rows, width);
}

#define PARAMETERS(T) (T * y, const T* x, const uint32_t* rows, uint32_t n_rows, uint32_t width)
KERNELS(kRowThreads, gather_rows, gather_rows, PARAMETERS, (y, x, rows, n_rows, width))
#undef PARAMETERS

// y[i] = sum of weights[i, j] x[rows[i, j]] over j in order; `rows`, `weights: [n_sums, n_terms]`.
template <class T, int N>
DEVICE void weighted(T* y, const T* x, const uint32_t* rows, const float* weights, uint32_t n_sums, uint32_t n_terms, uint32_t width) {
  each_vector<N>(n_sums, width, [&](uint32_t row, uint32_t column) {
    float sums[N] = {};
    for (uint32_t term = row * n_terms; term < (row + 1) * n_terms; term++) {
      Pack<T, N> values = load_pack<N>(x + uint64_t{rows[term]} * width + column);
      UNROLL
      for (int i = 0; i < N; i++) sums[i] += weights[term] * to_f32(values.value[i]);
    }
    Pack<T, N> sum;
    UNROLL
    for (int i = 0; i < N; i++) sum.value[i] = from_f32<T>(sums[i]);
    store_pack<N>(y + uint64_t{row} * width + column, sum);
  });
}

template <class T>
DEVICE void weighted_rows(T* y, const T* x, const uint32_t* rows, const float* weights, uint32_t n_sums, uint32_t n_terms, uint32_t width) {
  if (by_vectors<T>(width)) weighted<T, kPack<T>>(y, x, rows, weights, n_sums, n_terms, width);
  else weighted<T, 1>(y, x, rows, weights, n_sums, n_terms, width);
}

#define PARAMETERS(T) (T * y, const T* x, const uint32_t* rows, const float* weights, uint32_t n_sums, uint32_t n_terms, uint32_t width)
KERNELS(kRowThreads, weighted_rows, weighted_rows, PARAMETERS, (y, x, rows, weights, n_sums, n_terms, width))
#undef PARAMETERS

// x[rows[i]] = src[i]; no row twice.
template <class T, int N>
DEVICE void scatter(T* x, const T* src, const uint32_t* rows, uint32_t n_rows, uint32_t width) {
  each_vector<N>(n_rows, width, [&](uint32_t row, uint32_t column) {
    store_pack<N>(x + uint64_t{rows[row]} * width + column, load_pack<N>(src + uint64_t{row} * width + column));
  });
}

template <class T>
DEVICE void scatter_rows(T* x, const T* src, const uint32_t* rows, uint32_t n_rows, uint32_t width) {
  if (by_vectors<T>(width)) scatter<T, kPack<T>>(x, src, rows, n_rows, width);
  else scatter<T, 1>(x, src, rows, n_rows, width);
}

#define PARAMETERS(T) (T * x, const T* src, const uint32_t* rows, uint32_t n_rows, uint32_t width)
KERNELS(kRowThreads, scatter_rows, scatter_rows, PARAMETERS, (x, src, rows, n_rows, width))
#undef PARAMETERS

// y = x[:, start .. start + width], x of `x_width` columns.
template <class T, int N>
DEVICE void copy_columns(T* y, const T* x, uint32_t n_rows, uint32_t x_width, uint32_t start, uint32_t width) {
  each_vector<N>(n_rows, width, [&](uint32_t row, uint32_t column) {
    store_pack<N>(y + uint64_t{row} * width + column, load_pack<N>(x + uint64_t{row} * x_width + start + column));
  });
}

template <class T>
DEVICE void columns(T* y, const T* x, uint32_t n_rows, uint32_t x_width, uint32_t start, uint32_t width) {
  if (by_vectors<T>(width) && by_vectors<T>(x_width) && by_vectors<T>(start)) {
    copy_columns<T, kPack<T>>(y, x, n_rows, x_width, start, width);
  } else {
    copy_columns<T, 1>(y, x, n_rows, x_width, start, width);
  }
}

#define PARAMETERS(T) (T * y, const T* x, uint32_t n_rows, uint32_t x_width, uint32_t start, uint32_t width)
KERNELS(kRowThreads, columns, columns, PARAMETERS, (y, x, n_rows, x_width, start, width))
#undef PARAMETERS

// x += y.
template <class T, int N>
DEVICE void add_vectors(T* x, const T* y, uint32_t n_rows, uint32_t width) {
  each_vector<N>(n_rows, width, [&](uint32_t row, uint32_t column) {
    uint64_t at = uint64_t{row} * width + column;
    Pack<T, N> a = load_pack<N>(x + at), b = load_pack<N>(y + at);
    UNROLL
    for (int i = 0; i < N; i++) a.value[i] = from_f32<T>(to_f32(a.value[i]) + to_f32(b.value[i]));
    store_pack<N>(x + at, a);
  });
}

template <class T>
DEVICE void add(T* x, const T* y, uint32_t n_rows, uint32_t width) {
  if (by_vectors<T>(width)) add_vectors<T, kPack<T>>(x, y, n_rows, width);
  else add_vectors<T, 1>(x, y, n_rows, width);
}

#define PARAMETERS(T) (T * x, const T* y, uint32_t n_rows, uint32_t width)
KERNELS(kRowThreads, add, add, PARAMETERS, (x, y, n_rows, width))
#undef PARAMETERS

// x = c tanh(x / c).
template <class T, int N>
DEVICE void cap_vectors(T* x, float c, uint32_t n_rows, uint32_t width) {
  each_vector<N>(n_rows, width, [&](uint32_t row, uint32_t column) {
    uint64_t at = uint64_t{row} * width + column;
    Pack<T, N> a = load_pack<N>(x + at);
    UNROLL
    for (int i = 0; i < N; i++) a.value[i] = from_f32<T>(c * tanhf(to_f32(a.value[i]) / c));
    store_pack<N>(x + at, a);
  });
}

template <class T>
DEVICE void softcap(T* x, float c, uint32_t n_rows, uint32_t width) {
  if (by_vectors<T>(width)) cap_vectors<T, kPack<T>>(x, c, n_rows, width);
  else cap_vectors<T, 1>(x, c, n_rows, width);
}

#define PARAMETERS(T) (T * x, float c, uint32_t n_rows, uint32_t width)
KERNELS(kRowThreads, softcap, softcap, PARAMETERS, (x, c, n_rows, width))
#undef PARAMETERS

// y = act(x + bias) + residual: what follows a product, whose sums are in f32 whatever they become. `bias: [width]` and
// `residual` may be null; y may be x where both are of one element.
template <class T, int N>
DEVICE void finish_vectors(T* y, const float* x, const float* bias, const T* residual, uint32_t activation, uint32_t n_rows, uint32_t width) {
  each_vector<N>(n_rows, width, [&](uint32_t row, uint32_t column) {
    uint64_t at = uint64_t{row} * width + column;
    Pack<float, N> a = load_pack<N>(x + at);
    Pack<T, N> r;
    if (residual) r = load_pack<N>(residual + at);
    UNROLL
    for (int i = 0; i < N; i++) {
      float value = activate(a.value[i] + (bias ? bias[column + i] : 0.0f), activation);
      r.value[i] = from_f32<T>(residual ? value + to_f32(r.value[i]) : value);
    }
    store_pack<N>(y + at, r);
  });
}

template <class T>
DEVICE void finish_linear(T* y, const float* x, const float* bias, const T* residual, uint32_t activation, uint32_t n_rows, uint32_t width) {
  if (by_vectors<float>(width)) finish_vectors<T, kPack<float>>(y, x, bias, residual, activation, n_rows, width);
  else finish_vectors<T, 1>(y, x, bias, residual, activation, n_rows, width);
}

#define PARAMETERS(T) (T * y, const float* x, const float* bias, const T* residual, uint32_t activation, uint32_t n_rows, uint32_t width)
KERNELS(kRowThreads, finish_linear, finish_linear, PARAMETERS, (y, x, bias, residual, activation, n_rows, width))
#undef PARAMETERS

// y = act(x[:, ..width]) · x[:, width..]: `x: [n_rows, 2 width]`.
template <class T, int N>
DEVICE void gate_vectors(T* y, const T* x, uint32_t activation, uint32_t n_rows, uint32_t width) {
  each_vector<N>(n_rows, width, [&](uint32_t row, uint32_t column) {
    const T* from = x + uint64_t{row} * 2 * width + column;
    Pack<T, N> a = load_pack<N>(from), b = load_pack<N>(from + width);
    UNROLL
    for (int i = 0; i < N; i++) a.value[i] = from_f32<T>(activate(to_f32(a.value[i]), activation) * to_f32(b.value[i]));
    store_pack<N>(y + uint64_t{row} * width + column, a);
  });
}

template <class T>
DEVICE void gate(T* y, const T* x, uint32_t activation, uint32_t n_rows, uint32_t width) {
  if (by_vectors<T>(width)) gate_vectors<T, kPack<T>>(y, x, activation, n_rows, width);
  else gate_vectors<T, 1>(y, x, activation, n_rows, width);
}

#define PARAMETERS(T) (T * y, const T* x, uint32_t activation, uint32_t n_rows, uint32_t width)
KERNELS(kRowThreads, gate, gate, PARAMETERS, (y, x, activation, n_rows, width))
#undef PARAMETERS

// x = x act(gate); both `[n_rows, width]`.
template <class T, int N>
DEVICE void multiply_vectors(T* x, const T* gate, uint32_t activation, uint32_t n_rows, uint32_t width) {
  each_vector<N>(n_rows, width, [&](uint32_t row, uint32_t column) {
    uint64_t at = uint64_t{row} * width + column;
    Pack<T, N> a = load_pack<N>(x + at), b = load_pack<N>(gate + at);
    UNROLL
    for (int i = 0; i < N; i++) a.value[i] = from_f32<T>(to_f32(a.value[i]) * activate(to_f32(b.value[i]), activation));
    store_pack<N>(x + at, a);
  });
}

template <class T>
DEVICE void multiply_gated(T* x, const T* gate, uint32_t activation, uint32_t n_rows, uint32_t width) {
  if (by_vectors<T>(width)) multiply_vectors<T, kPack<T>>(x, gate, activation, n_rows, width);
  else multiply_vectors<T, 1>(x, gate, activation, n_rows, width);
}

#define PARAMETERS(T) (T * x, const T* gate, uint32_t activation, uint32_t n_rows, uint32_t width)
KERNELS(kRowThreads, multiply_gated, multiply_gated, PARAMETERS, (x, gate, activation, n_rows, width))
#undef PARAMETERS
