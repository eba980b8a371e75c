// Products of eight rows with 16 outputs of a packed weight matrix, by one block.
//
// A tile of 16 outputs by 16 inputs is the A operand of `mma.m16n8k16`, eight rows are the B operand. Weights are packed once,
// so that a lane reads its fragments of 16, 32 or 64 inputs as one vector of 16 bytes:
//
//   bf16: [n_out / 16, n_in / 16, 32 lanes, 8]
//   int8: [n_out / 16, n_in / 32, 32 lanes, 16], and `scales: [n_out]`
//   int4: [n_out / 16, n_in / 64, 32 lanes, 16 bytes], and bf16 `scales: [n_out / 16, n_in / 32, 16]`, one for 32 inputs
//
// both dimensions rounded up, what is beyond them zero. Of lane `4 g + t`, element `i` of a fragment of 16 inputs is output
// `g + (i & 2 ? 8 : 0)`, input `2 t + (i & 1) + (i & 4 ? 8 : 0)`. A byte of int4 holds element `i` of fragment `f` in its low half
// and of fragment `f + 1` in its high half, plus 8; the first eight bytes are fragments 0 and 1, the others 2 and 3.
//
// The four warps of a block take every fourth vector of inputs each and are joined in order. The split depends on the layer alone,
// so a row's value does not depend on the rows beside it.
#pragma once
#include "element.cuh"

constexpr int kLinearThreads = 128;
constexpr uint32_t kWarps = kLinearThreads / kWarp;
// Rows and outputs of a block.
constexpr uint32_t kTokens = 8, kOutputs = 16;

// B fragment: inputs `first + 2 t + (0, 1, 8, 9)` of `row`, the one of the lane's `g`; zeros beyond its end, and of no row (null).
DEVICE void load_inputs(uint32_t (&b)[2], const bf16* row, uint32_t n_in, uint32_t first) {
  UNROLL
  for (int half = 0; half < 2; half++) {
    uint32_t i = first + half * 8 + threadIdx.x % 4 * 2;
    if (n_in % 2 == 0) {
      // Two elements side by side, at a multiple of four bytes.
      Pack<bf16, 2> both = {};
      if (row && i < n_in) both = load_pack<2>(row + i);
      b[half] = uint32_t{both.value[0].bits} | uint32_t{both.value[1].bits} << 16;
    } else {
      uint32_t low = row && i < n_in ? row[i].bits : 0, high = row && i + 1 < n_in ? row[i + 1].bits : 0;
      b[half] = low | high << 16;
    }
  }
}

// Two integers of at most eight bits as bf16, exact.
DEVICE uint32_t pack_integers(int low, int high) { return pack_bf16(static_cast<float>(low), static_cast<float>(high)); }

// The sums of a warp: of lane `4 g + t`, element `i` is output `g + (i & 2 ? 8 : 0)` of row `2 t + (i & 1)`. `tile` is the block's
// outputs by 16, `row` the row of the lane's `g` or null.
DEVICE void multiply_bf16(float (&sums)[4], const bf16* weight, uint32_t tile, const bf16* row, uint32_t n_in) {
  uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, n = div_up(n_in, 16);
  for (uint32_t k = warp; k < n; k += kWarps) {
    Pack<uint32_t, 4> a = load_pack<4>(reinterpret_cast<const uint32_t*>(weight) + ((uint64_t{tile} * n + k) * kWarp + lane) * 4);
    uint32_t b[2];
    load_inputs(b, row, n_in, k * 16);
    mma_bf16(sums, a.value, b);
  }
}

DEVICE void multiply_int8(float (&sums)[4], const int8_t* weight, const float* scales, uint32_t tile, const bf16* row, uint32_t n_in, uint32_t n_out) {
  uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, n = div_up(n_in, 32);
  for (uint32_t k = warp; k < n; k += kWarps) {
    Pack<int8_t, 16> w = load_pack<16>(weight + ((uint64_t{tile} * n + k) * kWarp + lane) * 16);
    UNROLL
    for (int f = 0; f < 2; f++) {
      uint32_t a[4], b[2];
      UNROLL
      for (int i = 0; i < 4; i++) a[i] = pack_integers(w.value[f * 8 + 2 * i], w.value[f * 8 + 2 * i + 1]);
      load_inputs(b, row, n_in, k * 32 + f * 16);
      mma_bf16(sums, a, b);
    }
  }
  UNROLL
  for (int i = 0; i < 4; i++) {
    uint32_t out = tile * kOutputs + lane / 4 + (i & 2 ? 8 : 0);
    sums[i] *= out < n_out ? scales[out] : 0.0f;
  }
}

DEVICE void multiply_int4(float (&sums)[4], const uint8_t* weight, const bf16* scales, uint32_t tile, const bf16* row, uint32_t n_in) {
  uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, n = div_up(n_in, 64);
  for (uint32_t k = warp; k < n; k += kWarps) {
    Pack<uint8_t, 16> w = load_pack<16>(weight + ((uint64_t{tile} * n + k) * kWarp + lane) * 16);
    UNROLL
    for (int group = 0; group < 2; group++) {
      // 32 inputs share a scale, which their sum is multiplied with.
      float part[4] = {};
      UNROLL
      for (int f = 0; f < 2; f++) {
        uint32_t a[4], b[2];
        UNROLL
        for (int i = 0; i < 4; i++) {
          uint32_t first = w.value[group * 8 + 2 * i] >> 4 * f & 0xf, second = w.value[group * 8 + 2 * i + 1] >> 4 * f & 0xf;
          a[i] = pack_integers(static_cast<int>(first) - 8, static_cast<int>(second) - 8);
        }
        load_inputs(b, row, n_in, k * 64 + group * 32 + f * 16);
        mma_bf16(part, a, b);
      }
      const bf16* scale = scales + ((uint64_t{tile} * n + k) * 2 + group) * 16 + lane / 4;
      float low = to_f32(scale[0]), high = to_f32(scale[8]);
      sums[0] += part[0] * low;
      sums[1] += part[1] * low;
      sums[2] += part[2] * high;
      sums[3] += part[3] * high;
    }
  }
}

// The warps' sums, added in order: in thread `16 r + o` that of row `r` and output `o`.
DEVICE float join_warps(const float (&sums)[4]) {
  SHARED(float, parts, kWarps * kOutputs * kTokens);
  uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  UNROLL
  for (int i = 0; i < 4; i++) {
    uint32_t row = lane % 4 * 2 + (i & 1), out = lane / 4 + (i & 2 ? 8 : 0);
    parts[(warp * kTokens + row) * kOutputs + out] = sums[i];
  }
  sync_block();
  float sum = 0;
  UNROLL
  for (uint32_t w = 0; w < kWarps; w++) sum += parts[w * kOutputs * kTokens + threadIdx.x];
  return sum;
}
