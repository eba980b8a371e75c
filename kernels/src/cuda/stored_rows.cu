// Rows of encoder outputs as they are stored, to activations and back: other floats, and bytes with a scale for each row.
#include "each.cuh"
#include "reduce.cuh"

// Rows of another element.
KERNEL(kRowThreads, widen_bf16, (float* y, const bf16* x, uint32_t n_rows, uint32_t width)) {
  each_vector<1>(n_rows, width, [&](uint32_t row, uint32_t column) {
    uint64_t at = uint64_t{row} * width + column;
    y[at] = to_f32(x[at]);
  });
}

KERNEL(kRowThreads, narrow_bf16, (bf16 * y, const float* x, uint32_t n_rows, uint32_t width)) {
  each_vector<1>(n_rows, width, [&](uint32_t row, uint32_t column) {
    uint64_t at = uint64_t{row} * width + column;
    y[at] = from_f32<bf16>(x[at]);
  });
}

// An E4M3 float: four bits of exponent, three of fraction, no infinities.
DEVICE float from_f8(uint8_t byte) {
  uint32_t exponent = byte >> 3 & 0xf, fraction = byte & 7;
  float sign = byte & 0x80 ? -1.0f : 1.0f;
  if (exponent == 0xf && fraction == 7) return float_of(0x7fc00000);
  if (exponent == 0) return sign * static_cast<float>(fraction) * float_of((127 - 9) << 23);
  return sign * static_cast<float>(8 + fraction) * float_of((exponent + 127 - 10) << 23);
}

// y = x scale. `x: [n_rows, width]` bytes, integers or, `is_f8`, E4M3; `scales: [n_rows]`.
template <class T>
DEVICE void read_bytes(T* y, const uint8_t* x, const float* scales, uint32_t is_f8, uint32_t n_rows, uint32_t width) {
  each_vector<1>(n_rows, width, [&](uint32_t row, uint32_t column) {
    uint64_t at = uint64_t{row} * width + column;
    float value = is_f8 ? from_f8(x[at]) : static_cast<float>(static_cast<int8_t>(x[at]));
    y[at] = from_f32<T>(value * scales[row]);
  });
}

#define PARAMETERS(T) (T * y, const uint8_t* x, const float* scales, uint32_t is_f8, uint32_t n_rows, uint32_t width)
KERNELS(kRowThreads, read_bytes, read_bytes, PARAMETERS, (y, x, scales, is_f8, n_rows, width))
#undef PARAMETERS

// Rows as integers: the scale is the largest magnitude over 127. A row with a NaN has a scale that is one. One block a row, grid:
// (n_rows).
template <class T>
DEVICE void write_bytes(uint8_t* y, float* scales, const T* x, uint32_t width) {
  SHARED(float, scratch, kRowThreads / kWarp);
  const T* row = x + uint64_t{blockIdx.x} * width;
  float largest = 0;
  for (uint32_t i = threadIdx.x; i < width; i += kRowThreads) {
    float magnitude = fabsf(to_f32(row[i]));
    // A NaN stays one: comparisons with it are false.
    largest = magnitude <= largest ? largest : magnitude;
  }
  UNROLL
  for (int lane = 16; lane > 0; lane /= 2) {
    float other = shuffle_xor(largest, lane);
    largest = other <= largest || largest != largest ? largest : other;
  }
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = largest;
  sync_block();
  for (uint32_t warp = 0; warp < kRowThreads / kWarp; warp++) {
    float other = scratch[warp];
    largest = other <= largest || largest != largest ? largest : other;
  }
  float scale = largest / 127.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f;
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
  for (uint32_t i = threadIdx.x; i < width; i += kRowThreads) {
    float value = rintf(to_f32(row[i]) * inverse);
    value = value != value ? 0.0f : fminf(fmaxf(value, -127.0f), 127.0f);
    y[uint64_t{blockIdx.x} * width + i] = static_cast<uint8_t>(static_cast<int8_t>(value));
  }
}

#define PARAMETERS(T) (uint8_t * y, float* scales, const T* x, uint32_t width)
KERNELS(kRowThreads, write_bytes, write_bytes, PARAMETERS, (y, scales, x, width))
#undef PARAMETERS
