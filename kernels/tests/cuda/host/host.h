// What a kernel's source sees in place of CUDA's headers when it is compiled for the host.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "launch.h"

namespace host {

// A kernel by its name, with the sizes of its arguments and a call that takes them as the driver does.
struct Kernel {
  const char* name;
  unsigned max_threads;
  std::vector<size_t> sizes;
  void (*function)();
  void (*apply)(void (*function)(), void* const* args);

  void call(void* const* args) const { apply(function, args); }
};

// Every kernel of this library.
std::vector<Kernel>& kernels();

// The host's own code in a kernel's source: its loads and stores are not the kernel's.
#define UNCHECKED __attribute__((no_sanitize("thread")))

struct Register {
  template <class... Args>
  UNCHECKED Register(const char* name, void (*function)(Args...), unsigned max_threads) {
    kernels().push_back({name, max_threads, {sizeof(Args)...}, reinterpret_cast<void (*)()>(function), apply<Args...>});
  }

 private:
  template <class... Args>
  UNCHECKED static void apply(void (*function)(), void* const* args) {
    spread(reinterpret_cast<void (*)(Args...)>(function), args, std::index_sequence_for<Args...>{});
  }

  template <class... Args, size_t... I>
  UNCHECKED static void spread(void (*function)(Args...), void* const* args, std::index_sequence<I...>) {
    function(*static_cast<std::decay_t<Args>*>(args[I])...);
  }
};

// The same in every call of a thread, which runs one function of a kernel from its start to its end.
#define OF_THREAD __attribute__((const))
OF_THREAD Dim thread_index();
OF_THREAD Dim block_index();
OF_THREAD Dim block_dimensions();
OF_THREAD Dim grid_dimensions();
OF_THREAD unsigned lane();

// An array in shared memory, by the address of a mark of its declaration; and the one whose bytes the launch decides.
void* shared_array(const void* key, size_t bytes);
void* dynamic_shared(const void* key);

// Barriers of the block; the last three give the number of threads with a predicate, and whether any or all have it.
void sync_block(Site site);
int sync_block_count(bool predicate, Site site);
bool sync_block_or(bool predicate, Site site);
bool sync_block_and(bool predicate, Site site);

uint32_t shuffle(uint32_t value, unsigned from, uint32_t mask, Site site);
uint32_t ballot(bool predicate, uint32_t mask, Site site);
void sync_warp(uint32_t mask, Site site);
// `d` += `a` `b` of one warp, fragments as in the PTX ISA: m16n8k16 of bf16 with f32 sums, m16n8k32 of s8 with s32 sums.
void mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2], Site site);
void mma_s8(int32_t d[4], const uint32_t a[4], const uint32_t b[2], Site site);
// `ldmatrix`: `n` matrices of 8 rows of 16 bytes; lane `8 i + r` brings the address of row `r` of matrix `i`.
void load_matrix(uint32_t* out, int n, const void* row, bool transposed, Site site);

// `cp.async` of 16 bytes, of which `n_read` come from `from` and the rest are zeros.
void copy_async(void* to, const void* from, unsigned n_read);
void copy_async_commit();
// Until at most `n_left` of the latest groups are under way.
void copy_async_wait(unsigned n_left);

// Loads and stores of vectors, `n` bytes at an address that is a multiple of `n`.
void load(void* local, const void* from, size_t n);
void store(void* to, const void* local, size_t n);

void atomic_add(uint32_t* to, uint32_t value);
void atomic_add(uint64_t* to, uint64_t value);

}  // namespace host

#define threadIdx (host::thread_index())
#define blockIdx (host::block_index())
#define blockDim (host::block_dimensions())
#define gridDim (host::grid_dimensions())
