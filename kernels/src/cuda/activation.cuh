// Functions applied to each element, by the number that `ops::Activation` has.
#pragma once
#include "intrinsics.cuh"

enum Activation : uint32_t { kIdentity, kGelu, kGeluTanh, kQuickGelu, kSilu, kRelu, kTanh, kSigmoid };

DEVICE float activate(float x, uint32_t activation) {
  switch (activation) {
    case kGelu: return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    case kGeluTanh: return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case kQuickGelu: return x / (1.0f + expf(-1.702f * x));
    case kSilu: return x / (1.0f + expf(-x));
    case kRelu: return fmaxf(x, 0.0f);
    case kTanh: return tanhf(x);
    case kSigmoid: return 1.0f / (1.0f + expf(-x));
    default: return x;
  }
}
