// The softmax of a warp's 16 rows while their keys come tile by tile (Milakov and Gimelshein, 2018; FlashAttention-2).
#pragma once
#include "scores.cuh"
#include "tile.cuh"

// Largest score, sum of weights, and weighted sum of values so far. A lane has two rows, `lane / 4` and 8 more, and of each the
// columns of its accumulators; `sum` is that of its own columns alone.
template <int D>
struct Running {
  float largest[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0, 0};
  float out[D / 8][4] = {};

  // Takes in products of `Keys` keys with 16 queries: turns them to weights and rescales what was there. `score(product, half,
  // key)` is the score of the lane's row `half` and the `key`-th of the tile.
  template <int Keys, class Score>
  DEVICE void weigh(float (&products)[Keys / 8][4], Score score) {
    uint32_t column = threadIdx.x % 4 * 2;
    UNROLL
    for (int half = 0; half < 2; half++) {
      float top = largest[half];
      UNROLL
      for (int n = 0; n < Keys / 8; n++) {
        UNROLL
        for (int j = 0; j < 2; j++) {
          float& value = products[n][2 * half + j];
          value = score(value, half, n * 8 + static_cast<int>(column) + j);
          top = fmaxf(top, value);
        }
      }
      top = fmaxf(top, shuffle_xor(top, 1));
      top = fmaxf(top, shuffle_xor(top, 2));
      float base = base_of(top), factor = exp2_fast(largest[half] - base), weights = 0;
      largest[half] = top;
      UNROLL
      for (int n = 0; n < Keys / 8; n++) {
        UNROLL
        for (int j = 0; j < 2; j++) {
          float& value = products[n][2 * half + j];
          value = exp2_fast(value - base);
          weights += value;
        }
      }
      sum[half] = sum[half] * factor + weights;
      UNROLL
      for (int n = 0; n < D / 8; n++) {
        out[n][2 * half] *= factor;
        out[n][2 * half + 1] *= factor;
      }
    }
  }

  // Adds up the sums of the four lanes that share a row.
  DEVICE void finish() {
    UNROLL
    for (int half = 0; half < 2; half++) {
      sum[half] += shuffle_xor(sum[half], 1);
      sum[half] += shuffle_xor(sum[half], 2);
    }
  }
};
