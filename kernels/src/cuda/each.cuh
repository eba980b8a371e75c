// Loops over a matrix `[n_rows, width]`, by vectors of 16 bytes where every row starts at a multiple of them.
#pragma once
#include "element.cuh"

constexpr int kRowThreads = 256;

// Calls `body(row, column)` for each vector of `N` elements; all blocks of the grid share the work.
template <int N, class Body>
DEVICE void each_vector(uint32_t n_rows, uint32_t width, Body body) {
  uint32_t a_row = width / N;
  uint64_t n = uint64_t{n_rows} * a_row;
  for (uint64_t i = uint64_t{blockIdx.x} * kRowThreads + threadIdx.x; i < n; i += uint64_t{gridDim.x} * kRowThreads) {
    body(static_cast<uint32_t>(i / a_row), static_cast<uint32_t>(i % a_row) * N);
  }
}

template <class T>
DEVICE bool by_vectors(uint32_t width) {
  return width % kPack<T> == 0;
}
