// Convolutions: windows for a product with the weights, and convolutions of each channel by itself.
#include "each.cuh"

// Pairs are (vertical, horizontal); `out` is the windows of each axis. A signal is an image of one column.
struct Windows {
  uint32_t n_images;
  uint32_t size[2];
  uint32_t kernel[2];
  uint32_t stride[2];
  uint32_t padding[2];
  uint32_t out[2];

  DEVICE uint32_t n_rows() const { return n_images * out[0] * out[1]; }
  DEVICE uint32_t n_taps() const { return kernel[0] * kernel[1]; }

  // The row of pixels under a tap of a window; false if it is outside of the image.
  DEVICE bool pixel(uint32_t window, uint32_t tap, uint64_t& row) const {
    uint32_t place[2] = {window / out[1] % out[0], window % out[1]};
    uint32_t at[2] = {tap / kernel[1], tap % kernel[1]};
    UNROLL
    for (int axis = 0; axis < 2; axis++) {
      // Unsigned: what is before the image is beyond its end too.
      at[axis] += place[axis] * stride[axis] - padding[axis];
      if (at[axis] >= size[axis]) return false;
    }
    row = (uint64_t{window / (out[0] * out[1])} * size[0] + at[0]) * size[1] + at[1];
    return true;
  }
};

// y: [windows, channels, taps], zeros outside of the image. `x: [pixels, channels]`.
template <class T>
DEVICE void unfold(T* y, const T* x, Windows windows, uint32_t channels) {
  uint32_t taps = windows.n_taps();
  each_vector<1>(windows.n_rows(), channels * taps, [&](uint32_t window, uint32_t column) {
    uint64_t row = 0;
    bool is_in = windows.pixel(window, column % taps, row);
    y[uint64_t{window} * channels * taps + column] = is_in ? x[row * channels + column / taps] : from_f32<T>(0.0f);
  });
}

#define PARAMETERS(T) (T * y, const T* x, Windows windows, uint32_t channels)
KERNELS(kRowThreads, unfold, unfold, PARAMETERS, (y, x, windows, channels))
#undef PARAMETERS

// y: [windows, channels]. `weight: [taps, channels]`, `bias: [channels]` or null. Taps are added in order.
template <class T>
DEVICE void depthwise(T* y, const T* x, const float* weight, const float* bias, Windows windows, uint32_t channels) {
  each_vector<1>(windows.n_rows(), channels, [&](uint32_t window, uint32_t channel) {
    float sum = 0;
    for (uint32_t tap = 0; tap < windows.n_taps(); tap++) {
      uint64_t row = 0;
      if (windows.pixel(window, tap, row)) sum += to_f32(x[row * channels + channel]) * weight[uint64_t{tap} * channels + channel];
    }
    y[uint64_t{window} * channels + channel] = from_f32<T>(bias ? sum + bias[channel] : sum);
  });
}

#define PARAMETERS(T) (T * y, const T* x, const float* weight, const float* bias, Windows windows, uint32_t channels)
KERNELS(kRowThreads, depthwise, depthwise, PARAMETERS, (y, x, weight, bias, windows, channels))
#undef PARAMETERS
