// The instructions that kernels use beside plain C++, each with a body for a device and one for the host.
//
// Kernels use nothing of CUDA but what is here and `threadIdx`, `blockIdx`, `gridDim`. The host's bodies are in
// `kernels/tests/cuda/host/`, where tests run every kernel.
#pragma once

#if defined(__CUDACC__)

#include <cmath>
#include <cstdint>

// A kernel of at most `threads` threads a block, found by its name. The compiler may use as many registers as one block has: it
// would rather spill a few to fit a block more.
#define KERNEL(threads, name, params) extern "C" __global__ void __launch_bounds__(threads, 1) name params
#define DEVICE __device__ __forceinline__
// An array of a block, 16-byte aligned, undefined at first.
#define SHARED(type, name, count) __shared__ __align__(16) type name[count]
// The array whose bytes the launch decides.
#define SHARED_DYNAMIC(name) extern __shared__ __align__(16) unsigned char name[]
#define UNROLL _Pragma("unroll")
#define SITE
#define SITE_ONLY

#else

#include "host.h"

#define KERNEL(threads, name, params)                                          \
  extern "C" void name params;                                                 \
  static const host::Register register_##name(#name, &name, threads);          \
  extern "C" void name params
#define DEVICE inline
#define SHARED(type, name, count)   \
  static const char key_##name = 0; \
  type* name = static_cast<type*>(host::shared_array(&key_##name, sizeof(type) * (count)))
#define SHARED_DYNAMIC(name)                                                          \
  static const char key_##name = 0;                                                   \
  auto* name = static_cast<unsigned char*>(host::dynamic_shared(&key_##name))
#define UNROLL
#define SITE , host::Site site = {__builtin_FILE(), __builtin_LINE()}
#define SITE_ONLY host::Site site = {__builtin_FILE(), __builtin_LINE()}

#endif

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kWarp = 32;

DEVICE uint32_t bits_of(float value) {
#if defined(__CUDACC__)
  return __float_as_uint(value);
#else
  return __builtin_bit_cast(uint32_t, value);
#endif
}

DEVICE float float_of(uint32_t bits) {
#if defined(__CUDACC__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

// Barrier of the block.
DEVICE void sync_block(SITE_ONLY) {
#if defined(__CUDACC__)
  __syncthreads();
#else
  host::sync_block(site);
#endif
}

// Barrier of the block: true if `predicate` is true in any thread.
DEVICE bool sync_block_or(bool predicate SITE) {
#if defined(__CUDACC__)
  return __syncthreads_or(predicate);
#else
  return host::sync_block_or(predicate, site);
#endif
}

// Barrier of the block: true if `predicate` is true in all threads.
DEVICE bool sync_block_and(bool predicate SITE) {
#if defined(__CUDACC__)
  return __syncthreads_and(predicate);
#else
  return host::sync_block_and(predicate, site);
#endif
}

// Barrier of the block: the number of threads whose `predicate` is true.
DEVICE int sync_block_count(bool predicate SITE) {
#if defined(__CUDACC__)
  return __syncthreads_count(predicate);
#else
  return host::sync_block_count(predicate, site);
#endif
}

// Barrier of the warp, which orders its memory too.
DEVICE void sync_warp(SITE_ONLY) {
#if defined(__CUDACC__)
  __syncwarp();
#else
  host::sync_warp(kAllLanes, site);
#endif
}

// The value of another lane of the warp. All 32 lanes take part.
DEVICE uint32_t shuffle(uint32_t value, int lane SITE) {
#if defined(__CUDACC__)
  return __shfl_sync(kAllLanes, value, lane);
#else
  return host::shuffle(value, lane, kAllLanes, site);
#endif
}

DEVICE float shuffle(float value, int lane SITE) {
#if defined(__CUDACC__)
  return __shfl_sync(kAllLanes, value, lane);
#else
  return float_of(host::shuffle(bits_of(value), lane, kAllLanes, site));
#endif
}

// The value of the lane whose number differs in the bits of `mask`.
DEVICE uint32_t shuffle_xor(uint32_t value, int mask SITE) {
#if defined(__CUDACC__)
  return __shfl_xor_sync(kAllLanes, value, mask);
#else
  return host::shuffle(value, host::lane() ^ mask, kAllLanes, site);
#endif
}

DEVICE float shuffle_xor(float value, int mask SITE) {
#if defined(__CUDACC__)
  return __shfl_xor_sync(kAllLanes, value, mask);
#else
  return float_of(host::shuffle(bits_of(value), host::lane() ^ mask, kAllLanes, site));
#endif
}

DEVICE uint64_t shuffle_xor(uint64_t value, int mask SITE) {
#if defined(__CUDACC__)
  return __shfl_xor_sync(kAllLanes, static_cast<unsigned long long>(value), mask);
#else
  uint32_t low = host::shuffle(static_cast<uint32_t>(value), host::lane() ^ mask, kAllLanes, site);
  uint32_t high = host::shuffle(static_cast<uint32_t>(value >> 32), host::lane() ^ mask, kAllLanes, site);
  return uint64_t{high} << 32 | low;
#endif
}

// The lanes whose `predicate` is true.
DEVICE uint32_t warp_ballot(bool predicate SITE) {
#if defined(__CUDACC__)
  return __ballot_sync(kAllLanes, predicate);
#else
  return host::ballot(predicate, kAllLanes, site);
#endif
}

DEVICE uint32_t count_bits(uint32_t bits) {
#if defined(__CUDACC__)
  return static_cast<uint32_t>(__popc(bits));
#else
  return static_cast<uint32_t>(__builtin_popcount(bits));
#endif
}

// d += a b: `mma.sync.m16n8k16` of bf16, f32 sums. A is row-major, B column-major; fragments as in the PTX ISA.
DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2] SITE) {
#if defined(__CUDACC__)
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  host::mma_bf16(d, a, b, site);
#endif
}

// d += a b: `mma.sync.m16n8k32` of s8, s32 sums.
DEVICE void mma_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2] SITE) {
#if defined(__CUDACC__)
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};\n"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  host::mma_s8(d, a, b, site);
#endif
}

#if defined(__CUDACC__)
DEVICE uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }
#endif

// Four 8 by 8 matrices of 16-bit values from shared memory (`ldmatrix.x4`): lane 8 i + r brings row r of matrix i.
DEVICE void load_matrices(uint32_t (&out)[4], const void* row SITE) {
#if defined(__CUDACC__)
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
#else
  host::load_matrix(out, 4, row, false, site);
#endif
}

// The same, each matrix transposed.
DEVICE void load_matrices_transposed(uint32_t (&out)[4], const void* row SITE) {
#if defined(__CUDACC__)
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
#else
  host::load_matrix(out, 4, row, true, site);
#endif
}

// Starts a copy of 16 bytes to shared memory (`cp.async`); zeros where `is_there` is false, and nothing is read.
DEVICE void copy_async_16(void* to, const void* from, bool is_there) {
#if defined(__CUDACC__)
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(to)), "l"(from), "r"(is_there ? 16 : 0)
               : "memory");
#else
  host::copy_async(to, from, is_there ? 16 : 0);
#endif
}

// Ends a group of copies.
DEVICE void copy_async_commit() {
#if defined(__CUDACC__)
  asm volatile("cp.async.commit_group;\n" ::: "memory");
#else
  host::copy_async_commit();
#endif
}

// Waits for this thread's groups but the latest `N`.
template <int N>
DEVICE void copy_async_wait() {
#if defined(__CUDACC__)
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
#else
  host::copy_async_wait(N);
#endif
}

DEVICE void atomic_add(uint32_t* to, uint32_t value) {
#if defined(__CUDACC__)
  atomicAdd(to, value);
#else
  host::atomic_add(to, value);
#endif
}

DEVICE void atomic_add(uint64_t* to, uint64_t value) {
#if defined(__CUDACC__)
  atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
#else
  host::atomic_add(to, value);
#endif
}

// 2^x, to two units in the last place; 0 for minus infinity.
DEVICE float exp2_fast(float x) {
#if defined(__CUDACC__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

// 1 / x, to a unit in the last place; 0 for infinity.
DEVICE float reciprocal_fast(float x) {
#if defined(__CUDACC__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

// `N` values side by side, loaded and stored as one: their address is a multiple of their bytes, at most 16.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T value[N];
};

template <int N, class T>
DEVICE Pack<T, N> load_pack(const T* from) {
  static_assert(sizeof(T) * N <= 16);
#if defined(__CUDACC__)
  return *reinterpret_cast<const Pack<T, N>*>(from);
#else
  Pack<T, N> pack;
  host::load(&pack, from, sizeof pack);
  return pack;
#endif
}

template <int N, class T>
DEVICE void store_pack(T* to, const Pack<T, N>& pack) {
  static_assert(sizeof(T) * N <= 16);
#if defined(__CUDACC__)
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
#else
  host::store(to, &pack, sizeof pack);
#endif
}
