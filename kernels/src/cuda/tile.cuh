// Tiles of bf16 keys and values in shared memory, and the products of one warp with them.
#pragma once
#include "element.cuh"

// Elements between two rows of a tile of `D` columns: 16 bytes more than the row, so that `ldmatrix` finds its eight rows in
// different banks.
template <int D>
constexpr int kPitch = D + 8;

// Starts to copy rows `first .. first + Rows` of `row(i)` to a tile; zeros from `n_rows` on and beyond `width`. The `n` threads
// that share the work call it with their number `thread`.
template <int D, int Rows, class Row>
DEVICE void load_tile(bf16* tile, Row row, uint32_t first, uint32_t n_rows, uint32_t width, bool is_aligned, uint32_t thread, uint32_t n) {
  constexpr int kChunks = D / 8;
  for (uint32_t i = thread; i < Rows * kChunks; i += n) {
    uint32_t r = i / kChunks, column = i % kChunks * 8;
    bf16* to = tile + r * kPitch<D> + column;
    bool is_there = first + r < n_rows;
    const bf16* from = row(is_there ? first + r : 0);
    if (is_aligned) {
      bool is_in = is_there && column < width;
      copy_async_16(to, from + (is_in ? column : 0), is_in);
    } else {
      Pack<bf16, 8> pack;
      UNROLL
      for (uint32_t e = 0; e < 8; e++) pack.value[e] = is_there && column + e < width ? from[column + e] : bf16{0};
      store_pack<8>(to, pack);
    }
  }
}

// The queries of one warp, 16 rows, as A fragments: in registers, or for the widest heads in shared memory, since their sums leave
// no room beside them.
template <int D>
struct Queries {
  static constexpr bool kIsShared = D > 128;
  uint32_t fragments[kIsShared ? 1 : D / 16][4];
  const bf16* tile;

  // Rows `first .. first + 16` of `row(i)`; zeros from `n_rows` on and beyond `width`. `shared: [16, kPitch]` is this warp's, unused
  // where queries stay in registers. The caller has a barrier of the warp before the first fragment.
  template <class Row>
  DEVICE void load(bf16* shared, Row row, uint32_t first, uint32_t n_rows, uint32_t width) {
    uint32_t lane = threadIdx.x % kWarp;
    tile = shared;
    UNROLL
    for (int r = 0; r < 2; r++) {
      uint32_t i = first + lane / 4 + r * 8;
      bool is_there = i < n_rows;
      const bf16* from = row(is_there ? i : 0);
      UNROLL
      for (int kk = 0; kk < D / 16; kk++) {
        UNROLL
        for (int half = 0; half < 2; half++) {
          uint32_t column = kk * 16 + half * 8 + lane % 4 * 2;
          bf16 low = is_there && column < width ? from[column] : bf16{0};
          bf16 high = is_there && column + 1 < width ? from[column + 1] : bf16{0};
          if constexpr (kIsShared) store_pack<2>(shared + (lane / 4 + r * 8) * kPitch<D> + column, Pack<bf16, 2>{{low, high}});
          else fragments[kk][r + 2 * half] = uint32_t{low.bits} | uint32_t{high.bits} << 16;
        }
      }
    }
  }

  // Columns 16 kk .. 16 kk + 16.
  DEVICE void fragment(uint32_t (&a)[4], int kk) const {
    if constexpr (kIsShared) {
      uint32_t lane = threadIdx.x % kWarp;
      load_matrices(a, tile + (lane % 8 + (lane & 8)) * kPitch<D> + kk * 16 + (lane & 16 ? 8 : 0));
    } else {
      UNROLL
      for (int i = 0; i < 4; i++) a[i] = fragments[kk][i];
    }
  }
};

// scores += Q Kᵀ for `Keys` keys of a tile: `scores[n]` are keys 8 n .. 8 n + 8.
template <int D, int Keys>
DEVICE void multiply_keys(float (&scores)[Keys / 8][4], const Queries<D>& queries, const bf16* k) {
  uint32_t lane = threadIdx.x % kWarp, matrix = lane / 8;
  const bf16* row = k + (lane % 8 + (matrix & 2 ? 8 : 0)) * kPitch<D> + (matrix & 1 ? 8 : 0);
  UNROLL
  for (int kk = 0; kk < D / 16; kk++) {
    uint32_t a[4];
    queries.fragment(a, kk);
    UNROLL
    for (int n = 0; n < Keys / 16; n++) {
      uint32_t b[4];
      load_matrices(b, row + n * 16 * kPitch<D> + kk * 16);
      uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
      mma_bf16(scores[2 * n], a, first);
      mma_bf16(scores[2 * n + 1], a, second);
    }
  }
}

// out += P V for `Keys` keys of a tile: `weights[n]` as `scores`, `out[n]` are columns 8 n .. 8 n + 8.
template <int D, int Keys>
DEVICE void multiply_values(float (&out)[D / 8][4], const float (&weights)[Keys / 8][4], const bf16* v) {
  uint32_t lane = threadIdx.x % kWarp, matrix = lane / 8;
  const bf16* row = v + (lane % 8 + (matrix & 1 ? 8 : 0)) * kPitch<D> + (matrix & 2 ? 8 : 0);
  UNROLL
  for (int kk = 0; kk < Keys / 16; kk++) {
    uint32_t p[4] = {pack_bf16(weights[2 * kk][0], weights[2 * kk][1]), pack_bf16(weights[2 * kk][2], weights[2 * kk][3]),
                     pack_bf16(weights[2 * kk + 1][0], weights[2 * kk + 1][1]), pack_bf16(weights[2 * kk + 1][2], weights[2 * kk + 1][3])};
    UNROLL
    for (int n = 0; n < D / 16; n++) {
      uint32_t b[4];
      load_matrices_transposed(b, row + kk * 16 * kPitch<D> + n * 16);
      uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
      mma_bf16(out[2 * n], p, first);
      mma_bf16(out[2 * n + 1], p, second);
    }
  }
}
