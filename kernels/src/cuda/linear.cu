// Products of few rows with a weight matrix: `y = x Wᵀ` in a step of decoding, which takes as long as its weights take to be read.
// Weights are packed as `fragments.cuh` says.
#include "activation.cuh"
#include "fragments.cuh"

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

// The row of the lane's `g`; null beyond the last.
DEVICE const bf16* row_of_lane(const Product& p) {
  uint32_t token = blockIdx.y * kTokens + threadIdx.x % kWarp / 4;
  return token < p.n_tokens ? p.x + uint64_t{token} * p.n_in : nullptr;
}

// Writes 16 outputs of eight tokens.
DEVICE void finish(const float (&sums)[4], const Product& p, const Epilogue& e) {
  float sum = join_warps(sums);
  uint32_t token = blockIdx.y * kTokens + threadIdx.x / kOutputs, out = blockIdx.x * kOutputs + threadIdx.x % kOutputs;
  if (token >= p.n_tokens || out >= p.n_out) return;
  uint64_t at = uint64_t{token} * p.n_out + out;
  float value = activate(e.bias ? sum + e.bias[out] : sum, e.activation);
  e.y[at] = from_f32<bf16>(e.residual ? value + to_f32(e.residual[at]) : value);
}

// Grid of all three: (n_out / 16, n_tokens / 8), rounded up.
KERNEL(kLinearThreads, linear_bf16, (Epilogue e, Product p, const bf16* weight)) {
  float sums[4] = {};
  multiply_bf16(sums, weight, blockIdx.x, row_of_lane(p), p.n_in);
  finish(sums, p, e);
}

KERNEL(kLinearThreads, linear_int8, (Epilogue e, Product p, const int8_t* weight, const float* scales)) {
  float sums[4] = {};
  multiply_int8(sums, weight, scales, blockIdx.x, row_of_lane(p), p.n_in, p.n_out);
  finish(sums, p, e);
}

KERNEL(kLinearThreads, linear_int4, (Epilogue e, Product p, const uint8_t* weight, const bf16* scales)) {
  float sums[4] = {};
  multiply_int4(sums, weight, scales, blockIdx.x, row_of_lane(p), p.n_in);
  finish(sums, p, e);
}
