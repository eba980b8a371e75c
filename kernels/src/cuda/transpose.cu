// Transposes each of several matrices: `[n_seqs, t, width]` to `[n_seqs, width, t]`.
#include "element.cuh"

constexpr uint32_t kTile = 32;
constexpr uint32_t kTransposeThreads = 256;

// Grid: (tiles across, tiles down, n_seqs). A tile of 32 by 32 goes through shared memory, so that both sides are read and
// written by whole lines; one column more keeps its columns in different banks.
template <class T>
DEVICE void transpose(T* y, const T* x, uint32_t t, uint32_t width) {
  SHARED(T, tile, kTile * (kTile + 1));
  x += uint64_t{blockIdx.z} * t * width;
  y += uint64_t{blockIdx.z} * t * width;
  uint32_t across = threadIdx.x % kTile, first = threadIdx.x / kTile;
  for (uint32_t i = first; i < kTile; i += kTransposeThreads / kTile) {
    uint32_t row = blockIdx.y * kTile + i, column = blockIdx.x * kTile + across;
    if (row < t && column < width) tile[i * (kTile + 1) + across] = x[uint64_t{row} * width + column];
  }
  sync_block();
  for (uint32_t i = first; i < kTile; i += kTransposeThreads / kTile) {
    uint32_t row = blockIdx.x * kTile + i, column = blockIdx.y * kTile + across;
    if (row < width && column < t) y[uint64_t{row} * t + column] = tile[across * (kTile + 1) + i];
  }
}

#define PARAMETERS(T) (T * y, const T* x, uint32_t t, uint32_t width)
KERNELS(kTransposeThreads, transpose, transpose, PARAMETERS, (y, x, t, width))
#undef PARAMETERS
