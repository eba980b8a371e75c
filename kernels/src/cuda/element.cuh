// Elements of activations: f32, and bf16 as its upper half. Arithmetic is in f32; a store rounds to nearest even.
#pragma once
#include "intrinsics.cuh"

struct bf16 {
  uint16_t bits;
};

DEVICE float to_f32(float x) { return x; }
DEVICE float to_f32(bf16 x) { return float_of(uint32_t{x.bits} << 16); }

template <class T>
DEVICE T from_f32(float x);

template <>
DEVICE float from_f32<float>(float x) {
  return x;
}

template <>
DEVICE bf16 from_f32<bf16>(float x) {
#if defined(__CUDACC__)
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return {bits};
#else
  uint32_t bits = bits_of(x);
  if (x != x) return {static_cast<uint16_t>(0x7fff)};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
#endif
}

// Two bf16 in a register, `low` in the lower half.
DEVICE uint32_t pack_bf16(float low, float high) {
#if defined(__CUDACC__)
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#else
  return uint32_t{from_f32<bf16>(low).bits} | uint32_t{from_f32<bf16>(high).bits} << 16;
#endif
}

// Elements of 16 bytes.
template <class T>
constexpr int kPack = 16 / static_cast<int>(sizeof(T));

// Makes a kernel for each element: `name_f32` and `name_bf16` of `body<T>`.
#define KERNELS(threads, name, body, parameters, arguments)                     \
  KERNEL(threads, name##_f32, parameters(float)) { body<float> arguments; }     \
  KERNEL(threads, name##_bf16, parameters(bf16)) { body<bf16> arguments; }

DEVICE uint32_t div_up(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
