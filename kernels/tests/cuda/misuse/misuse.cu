// Kernels that do what a device forbids, each in one way, and some that may do what looks alike. Only tests launch them.
#include "element.cuh"

KERNEL(64, misuse_barrier_in_a_branch, (uint32_t * out)) {
  if (threadIdx.x < 32) sync_block();
  else sync_block();
  out[threadIdx.x] = 1;
}

KERNEL(64, misuse_exit_before_a_barrier, (uint32_t * out)) {
  if (threadIdx.x == 40) return;
  sync_block();
  out[threadIdx.x] = 1;
}

KERNEL(64, misuse_lane_left_out_of_a_shuffle, (float* out)) {
  float x = static_cast<float>(threadIdx.x);
  if (threadIdx.x != 3) x = shuffle_xor(x, 1);
  out[threadIdx.x] = x;
}

KERNEL(64, misuse_read_past_the_end, (uint32_t * out, const uint32_t* in)) { out[threadIdx.x] = in[threadIdx.x + 1]; }

KERNEL(64, misuse_write_past_the_end, (uint32_t * out)) { out[threadIdx.x + 1] = 1; }

KERNEL(64, misuse_vector_at_an_odd_address, (uint32_t * out, const float* in)) {
  Pack<float, 4> pack = load_pack<4>(in + 4 * threadIdx.x + 1);
  out[threadIdx.x] = bits_of(pack.value[0]);
}

// Each thread reads what its neighbour wrote: `how` is 0 without a barrier, 1 with one of the warp, 2 with one of the block.
KERNEL(64, misuse_neighbour, (float* out, uint32_t how)) {
  SHARED(float, shared, 64);
  shared[threadIdx.x] = 1;
  if (how == 1) sync_warp();
  if (how == 2) sync_block();
  out[threadIdx.x] = shared[(threadIdx.x + 1) % 64];
}

// A tile is filled again while slower warps may still read it.
KERNEL(64, misuse_tile_written_too_early, (float* out)) {
  SHARED(float, tile, 64);
  float sum = 0;
  for (int i = 0; i < 2; i++) {
    tile[threadIdx.x] = static_cast<float>(i);
    sync_block();
    sum += tile[63 - threadIdx.x];
  }
  out[threadIdx.x] = sum;
}

KERNEL(64, misuse_blocks_write_one_place, (uint32_t * out)) {
  if (threadIdx.x == 0) out[0] = blockIdx.x;
}

KERNEL(64, misuse_past_an_array_of_the_block, (float* out)) {
  SHARED(float, first, 64);
  SHARED(float, second, 64);
  second[threadIdx.x] = 0;
  first[threadIdx.x + 1] = 1;
  sync_block();
  out[threadIdx.x] = second[threadIdx.x];
}

KERNEL(64, misuse_array_of_a_thread, (uint32_t * out, uint32_t n)) {
  uint32_t local[8];
  for (uint32_t i = 0; i < n; i++) local[i] = i;
  out[threadIdx.x] = local[n / 2];
}

// `how`: 0 forgets to wait, 1 waits but not for the other threads, 2 is right.
KERNEL(32, misuse_copy, (float* out, const float* in, uint32_t how)) {
  SHARED(float, tile, 128);
  copy_async_16(tile + 4 * threadIdx.x, in + 4 * threadIdx.x, true);
  copy_async_commit();
  if (how > 0) copy_async_wait<0>();
  if (how == 2) sync_block();
  out[threadIdx.x] = tile[127 - threadIdx.x];
  if (how == 0) copy_async_wait<0>();
}

// Reads memory that nobody has written.
KERNEL(32, misuse_unwritten, (float* out, const float* in)) {
  SHARED(float, tile, 32);
  out[threadIdx.x] = in[0] + tile[threadIdx.x];
}

KERNEL(64, allowed_atomics, (uint32_t * out)) { atomic_add(out + threadIdx.x % 2, uint32_t{1}); }

KERNEL(64, misuse_atomics_beside_a_store, (uint32_t * out)) {
  if (threadIdx.x == 0) out[0] = 1;
  atomic_add(out, uint32_t{1});
}

// y = x + 1 and x = value, for tests of order.
KERNEL(32, order_add_one, (uint32_t * y, const uint32_t* x)) { y[threadIdx.x] = x[threadIdx.x] + 1; }
KERNEL(32, order_set, (uint32_t * x, uint32_t value)) { x[threadIdx.x] = value; }

// Products of one warp, for a test of the fragments' layout: `a` and `b` as the lanes hold them.
KERNEL(32, fragments_bf16, (float* d, const uint32_t* a, const uint32_t* b)) {
  float sums[4] = {};
  uint32_t own_a[4], own_b[2];
  for (int i = 0; i < 4; i++) own_a[i] = a[threadIdx.x * 4 + i];
  for (int i = 0; i < 2; i++) own_b[i] = b[threadIdx.x * 2 + i];
  mma_bf16(sums, own_a, own_b);
  for (int i = 0; i < 4; i++) d[threadIdx.x * 4 + i] = sums[i];
}

KERNEL(32, fragments_s8, (uint32_t * d, const uint32_t* a, const uint32_t* b)) {
  int32_t sums[4] = {};
  uint32_t own_a[4], own_b[2];
  for (int i = 0; i < 4; i++) own_a[i] = a[threadIdx.x * 4 + i];
  for (int i = 0; i < 2; i++) own_b[i] = b[threadIdx.x * 2 + i];
  mma_s8(sums, own_a, own_b);
  for (int i = 0; i < 4; i++) d[threadIdx.x * 4 + i] = static_cast<uint32_t>(sums[i]);
}

// Four matrices of 8 by 8 from a row-major 16 by 16 in shared memory, as lanes hold them.
KERNEL(32, fragments_loaded, (uint32_t * out, const bf16* in, uint32_t transposed)) {
  SHARED(bf16, tile, 16 * 16);
  for (uint32_t i = threadIdx.x; i < 256; i += 32) tile[i] = in[i];
  sync_warp();
  uint32_t matrix = threadIdx.x / 8, loaded[4];
  const bf16* row = tile + (threadIdx.x % 8 + (matrix & 1 ? 8 : 0)) * 16 + (matrix & 2 ? 8 : 0);
  if (transposed) load_matrices_transposed(loaded, row);
  else load_matrices(loaded, row);
  for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = loaded[i];
}
