// Norms of rows, with the residual added before; and the norm of a whole sequence.
#include "each.cuh"
#include "reduce.cuh"

constexpr int kNormThreads = 256;

// One block normalises one row: `y = norm(x + residual) scale + bias`, and `sum = x + residual` rounded as it is kept.
// `x`, `y: [n_rows, width]`; `residual` and `sum` may be null together or be the same; `scale`, `bias: [width]`, `bias` may be
// null. `is_layer`: with the mean taken off, else by the root mean square alone. Grid: (n_rows).
template <class T, int N>
DEVICE void norm_row(T* y, T* sum, const T* x, const T* residual, const float* scale, const float* bias, float eps, uint32_t is_layer,
                     uint32_t width) {
  SHARED(float, scratch, kNormThreads / kWarp);
  uint64_t row = uint64_t{blockIdx.x} * width;
  const T* from = x + row;
  if (residual) {
    for (uint32_t column = threadIdx.x * N; column < width; column += kNormThreads * N) {
      Pack<T, N> a = load_pack<N>(x + row + column), b = load_pack<N>(residual + row + column);
      UNROLL
      for (int i = 0; i < N; i++) a.value[i] = from_f32<T>(to_f32(a.value[i]) + to_f32(b.value[i]));
      store_pack<N>(sum + row + column, a);
    }
    // A thread reads back what it wrote itself.
    from = sum + row;
  }
  auto total = [&](auto term) {
    float part = 0;
    for (uint32_t column = threadIdx.x * N; column < width; column += kNormThreads * N) {
      Pack<T, N> a = load_pack<N>(from + column);
      UNROLL
      for (int i = 0; i < N; i++) part += term(to_f32(a.value[i]));
    }
    return block_sum<kNormThreads>(part, scratch);
  };
  float mean = is_layer ? total([](float v) { return v; }) / static_cast<float>(width) : 0.0f;
  float variance = total([&](float v) { return (v - mean) * (v - mean); }) / static_cast<float>(width);
  float factor = 1.0f / sqrtf(variance + eps);
  for (uint32_t column = threadIdx.x * N; column < width; column += kNormThreads * N) {
    Pack<T, N> a = load_pack<N>(from + column);
    UNROLL
    for (int i = 0; i < N; i++) {
      float value = (to_f32(a.value[i]) - mean) * factor * scale[column + i];
      a.value[i] = from_f32<T>(bias ? value + bias[column + i] : value);
    }
    store_pack<N>(y + row + column, a);
  }
}

template <class T>
DEVICE void norm(T* y, T* sum, const T* x, const T* residual, const float* scale, const float* bias, float eps, uint32_t is_layer,
                 uint32_t width) {
  if (by_vectors<T>(width)) norm_row<T, kPack<T>>(y, sum, x, residual, scale, bias, eps, is_layer, width);
  else norm_row<T, 1>(y, sum, x, residual, scale, bias, eps, is_layer, width);
}

#define PARAMETERS(T) \
  (T * y, T * sum, const T* x, const T* residual, const float* scale, const float* bias, float eps, uint32_t is_layer, uint32_t width)
KERNELS(kNormThreads, norm, norm, PARAMETERS, (y, sum, x, residual, scale, bias, eps, is_layer, width))
#undef PARAMETERS

// One block normalises one sequence, rows `starts[s] .. starts[s + 1]`, by the mean and variance of all its values: a group norm
// of one group. Sums are in f64, for a sequence has as many values as f32 has steps. Grid: (n_seqs).
template <class T>
DEVICE void group_norm(T* y, const T* x, const uint32_t* starts, const float* scale, const float* bias, float eps, uint32_t is_layer,
                       uint32_t width) {
  SHARED(double, scratch, kNormThreads);
  uint64_t first = uint64_t{starts[blockIdx.x]} * width, n = uint64_t{starts[blockIdx.x + 1]} * width - first;
  auto total = [&](auto term) {
    double part = 0;
    for (uint64_t i = threadIdx.x; i < n; i += kNormThreads) part += term(static_cast<double>(to_f32(x[first + i])));
    scratch[threadIdx.x] = part;
    sync_block();
    for (uint32_t half = kNormThreads / 2; half > 0; half /= 2) {
      if (threadIdx.x < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
      sync_block();
    }
    double sum = scratch[0];
    sync_block();
    return sum;
  };
  double mean = is_layer ? total([](double v) { return v; }) / static_cast<double>(n) : 0.0;
  double variance = total([&](double v) { return (v - mean) * (v - mean); }) / static_cast<double>(n);
  float centre = static_cast<float>(mean), factor = static_cast<float>(1.0 / sqrt(variance + static_cast<double>(eps)));
  for (uint64_t i = threadIdx.x; i < n; i += kNormThreads) {
    uint32_t column = static_cast<uint32_t>(i % width);
    float value = (to_f32(x[first + i]) - centre) * factor * scale[column];
    y[first + i] = from_f32<T>(bias ? value + bias[column] : value);
  }
}

#define PARAMETERS(T) \
  (T * y, const T* x, const uint32_t* starts, const float* scale, const float* bias, float eps, uint32_t is_layer, uint32_t width)
KERNELS(kNormThreads, group_norm, group_norm, PARAMETERS, (y, x, starts, scale, bias, eps, is_layer, width))
#undef PARAMETERS
