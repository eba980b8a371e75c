// Products of few rows with a weight matrix: `y = x Wᵀ` in a step of decoding, which takes as long as its weights take to be read.
//
// A tile of 16 outputs by 16 inputs is the A operand of `mma.m16n8k16`, eight tokens are the B operand. Weights are packed once,
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
// A block takes 16 outputs; its four warps take every fourth vector of inputs each and are joined in order. The split depends on
// the layer alone, so a row's value does not depend on the rows beside it.
#include "activation.cuh"
#include "element.cuh"

constexpr int kLinearThreads = 128;
constexpr uint32_t kWarps = kLinearThreads / kWarp;
// Tokens of a block.
constexpr uint32_t kTokens = 8;

// What becomes of the product: `act(x Wᵀ + bias) + residual`, `[n_tokens, n_out]`; `bias: [n_out]` and `residual` may be null.
struct Epilogue {
  bf16* y;
  const float* bias;
  const bf16* residual;
  uint32_t activation;
};

struct Product {
  const bf16* x;
  uint32_t n_tokens, n_in, n_out;
};

// B fragment: inputs `first + 2 t + (0, 1, 8, 9)` of token `g`, zeros beyond the ends.
DEVICE void load_inputs(uint32_t (&b)[2], const Product& p, uint32_t first_token, uint32_t first) {
  uint32_t lane = threadIdx.x % kWarp, token = first_token + lane / 4;
  bool is_there = token < p.n_tokens;
  const bf16* row = p.x + uint64_t{is_there ? token : 0} * p.n_in;
  UNROLL
  for (int half = 0; half < 2; half++) {
    uint32_t i = first + half * 8 + lane % 4 * 2;
    if (p.n_in % 2 == 0) {
      // Two elements side by side, at a multiple of four bytes.
      Pack<bf16, 2> both = {};
      if (is_there && i < p.n_in) both = load_pack<2>(row + i);
      b[half] = uint32_t{both.value[0].bits} | uint32_t{both.value[1].bits} << 16;
    } else {
      uint32_t low = is_there && i < p.n_in ? row[i].bits : 0, high = is_there && i + 1 < p.n_in ? row[i + 1].bits : 0;
      b[half] = low | high << 16;
    }
  }
}

// Adds the warps' sums in order and writes 16 outputs of eight tokens.
DEVICE void finish(const float (&sums)[4], const Product& p, const Epilogue& e, uint32_t first_out, uint32_t first_token) {
  SHARED(float, parts, kWarps * 16 * kTokens);
  uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  UNROLL
  for (int i = 0; i < 4; i++) parts[warp * 16 * kTokens + (lane % 4 * 2 + (i & 1)) * 16 + lane / 4 + (i & 2 ? 8 : 0)] = sums[i];
  sync_block();
  // As many threads as outputs times tokens.
  uint32_t token = first_token + threadIdx.x / 16, out = first_out + threadIdx.x % 16;
  if (token >= p.n_tokens || out >= p.n_out) return;
  float sum = 0;
  UNROLL
  for (uint32_t w = 0; w < kWarps; w++) sum += parts[w * 16 * kTokens + threadIdx.x];
  uint64_t at = uint64_t{token} * p.n_out + out;
  float value = activate(e.bias ? sum + e.bias[out] : sum, e.activation);
  e.y[at] = from_f32<bf16>(e.residual ? value + to_f32(e.residual[at]) : value);
}

// Two integers of at most eight bits as bf16, exact.
DEVICE uint32_t pack_integers(int low, int high) { return pack_bf16(static_cast<float>(low), static_cast<float>(high)); }

// Grid of all three: (n_out / 16, n_tokens / 8), rounded up.
KERNEL(kLinearThreads, linear_bf16, (Epilogue e, Product p, const bf16* weight)) {
  uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, n = div_up(p.n_in, 16);
  float sums[4] = {};
  for (uint32_t tile = warp; tile < n; tile += kWarps) {
    Pack<uint32_t, 4> a = load_pack<4>(reinterpret_cast<const uint32_t*>(weight) + ((uint64_t{blockIdx.x} * n + tile) * kWarp + lane) * 4);
    uint32_t b[2];
    load_inputs(b, p, blockIdx.y * kTokens, tile * 16);
    mma_bf16(sums, a.value, b);
  }
  finish(sums, p, e, blockIdx.x * 16, blockIdx.y * kTokens);
}

KERNEL(kLinearThreads, linear_int8, (Epilogue e, Product p, const int8_t* weight, const float* scales)) {
  uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, n = div_up(p.n_in, 32);
  float sums[4] = {};
  for (uint32_t tile = warp; tile < n; tile += kWarps) {
    Pack<int8_t, 16> w = load_pack<16>(weight + ((uint64_t{blockIdx.x} * n + tile) * kWarp + lane) * 16);
    UNROLL
    for (int f = 0; f < 2; f++) {
      uint32_t a[4], b[2];
      UNROLL
      for (int i = 0; i < 4; i++) a[i] = pack_integers(w.value[f * 8 + 2 * i], w.value[f * 8 + 2 * i + 1]);
      load_inputs(b, p, blockIdx.y * kTokens, tile * 32 + f * 16);
      mma_bf16(sums, a, b);
    }
  }
  UNROLL
  for (int i = 0; i < 4; i++) {
    uint32_t out = blockIdx.x * 16 + lane / 4 + (i & 2 ? 8 : 0);
    sums[i] *= out < p.n_out ? scales[out] : 0.0f;
  }
  finish(sums, p, e, blockIdx.x * 16, blockIdx.y * kTokens);
}

KERNEL(kLinearThreads, linear_int4, (Epilogue e, Product p, const uint8_t* weight, const bf16* scales)) {
  uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, n = div_up(p.n_in, 64);
  float sums[4] = {};
  for (uint32_t tile = warp; tile < n; tile += kWarps) {
    Pack<uint8_t, 16> w = load_pack<16>(weight + ((uint64_t{blockIdx.x} * n + tile) * kWarp + lane) * 16);
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
        load_inputs(b, p, blockIdx.y * kTokens, tile * 64 + group * 32 + f * 16);
        mma_bf16(part, a, b);
      }
      const bf16* scale = scales + ((uint64_t{blockIdx.x} * n + tile) * 2 + group) * 16 + lane / 4;
      float low = to_f32(scale[0]), high = to_f32(scale[8]);
      sums[0] += part[0] * low;
      sums[1] += part[1] * low;
      sums[2] += part[2] * high;
      sums[3] += part[3] * high;
    }
  }
  finish(sums, p, e, blockIdx.x * 16, blockIdx.y * kTokens);
}
