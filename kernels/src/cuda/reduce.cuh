// Sums and maxima of a warp and of a block, in an order that depends on their sizes alone.
#pragma once
#include "intrinsics.cuh"

DEVICE float warp_sum(float x) {
  UNROLL
  for (int lane = 16; lane > 0; lane /= 2) x += shuffle_xor(x, lane);
  return x;
}

DEVICE float warp_max(float x) {
  UNROLL
  for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, shuffle_xor(x, lane));
  return x;
}

// The maximum over a block of `Threads`, in every thread. `scratch: [Threads / 32]` in shared memory is free again afterwards.
template <int Threads>
DEVICE float block_max(float x, float* scratch) {
  x = warp_max(x);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  sync_block();
  float largest = scratch[0];
  UNROLL
  for (int warp = 1; warp < Threads / kWarp; warp++) largest = fmaxf(largest, scratch[warp]);
  sync_block();
  return largest;
}

// The sum over a block of `Threads`, in every thread. `scratch: [Threads / 32]` in shared memory is free again afterwards.
template <int Threads>
DEVICE float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  sync_block();
  float sum = 0;
  UNROLL
  for (int warp = 0; warp < Threads / kWarp; warp++) sum += scratch[warp];
  sync_block();
  return sum;
}
