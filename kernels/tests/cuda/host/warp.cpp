// A thread's place, and what it does with others: barriers, shuffles, ballots, products of matrices, loads of matrices.
#include <cstring>

#include "host.h"

namespace host {

namespace {

template <class T>
void put(LaneData& data, size_t at, const T& value) {
  memcpy(data.bytes + at, &value, sizeof value);
}

template <class T>
T get(const LaneData& data, size_t at) {
  T value;
  memcpy(&value, data.bytes + at, sizeof value);
  return value;
}

float widen(uint16_t bf16) {
  uint32_t bits = uint32_t{bf16} << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Where the `i`-th 16-bit value of a lane's A fragment lies in the 16 by 16 matrix, and of its B fragment in the 16 by 8:
// figures "MMA .m16n8k16 fragment layout" of the PTX ISA.
struct Place {
  int row, column;
};
Place a16(int lane, int i) { return {lane / 4 + (i & 2 ? 8 : 0), lane % 4 * 2 + (i & 1) + (i & 4 ? 8 : 0)}; }
Place b16(int lane, int i) { return {lane % 4 * 2 + (i & 1) + (i & 2 ? 8 : 0), lane / 4}; }
// The same of bytes: A is 16 by 32, B is 32 by 8; figures "MMA .m16n8k32".
Place a8(int lane, int i) { return {lane / 4 + (i & 4 ? 8 : 0), lane % 4 * 4 + (i & 3) + (i & 8 ? 16 : 0)}; }
Place b8(int lane, int i) { return {lane % 4 * 4 + (i & 3) + (i & 4 ? 16 : 0), lane / 4}; }
// The sums of a lane, in the 16 by 8 result.
Place d32(int lane, int i) { return {lane / 4 + (i & 2 ? 8 : 0), lane % 4 * 2 + (i & 1)}; }

template <class In, class Sum, int K, class Widen>
void product(Thread* lanes, Place (*place_a)(int, int), Place (*place_b)(int, int), Widen widen_value) {
  Sum a[16][K], b[K][8], d[16][8];
  for (int lane = 0; lane < 32; lane++) {
    In values[24 / sizeof(In)];
    memcpy(values, lanes[lane].in.bytes, 24);
    constexpr int n_a = 16 / sizeof(In), n_b = 8 / sizeof(In);
    for (int i = 0; i < n_a; i++) {
      Place p = place_a(lane, i);
      a[p.row][p.column] = widen_value(values[i]);
    }
    for (int i = 0; i < n_b; i++) {
      Place p = place_b(lane, i);
      b[p.row][p.column] = widen_value(values[n_a + i]);
    }
    Sum sums[4];
    memcpy(sums, lanes[lane].in.bytes + 24, 16);
    for (int i = 0; i < 4; i++) {
      Place p = d32(lane, i);
      d[p.row][p.column] = sums[i];
    }
  }
  // Each sum in the order of its products, eight sums side by side.
  for (int row = 0; row < 16; row++) {
    for (int k = 0; k < K; k++) {
      for (int column = 0; column < 8; column++) d[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < 32; lane++) {
    Sum sums[4];
    for (int i = 0; i < 4; i++) {
      Place p = d32(lane, i);
      sums[i] = d[p.row][p.column];
    }
    memcpy(lanes[lane].out.bytes, sums, 16);
  }
}

template <class Sum>
void mma(WarpOp op, Sum d[4], const uint32_t a[4], const uint32_t b[2], Site site,
         Combine combine) {
  LaneData& in = block->thread().in;
  memcpy(in.bytes, a, 16);
  memcpy(in.bytes + 16, b, 8);
  memcpy(in.bytes + 24, d, 16);
  meet({site, ~0u, op}, combine);
  memcpy(d, block->thread().out.bytes, 16);
}

}  // namespace

std::vector<Kernel>& kernels() {
  static std::vector<Kernel> all;
  return all;
}

Dim thread_index() {
  unsigned t = block->current;
  Dim d = block->launch->block;
  if (d.y == 1 && d.z == 1) return {t, 0, 0};
  return {t % d.x, t / d.x % d.y, t / d.x / d.y};
}

Dim block_index() { return block->index; }
Dim block_dimensions() { return block->launch->block; }
Dim grid_dimensions() { return block->launch->grid; }
unsigned lane() { return block->lane(); }

void* shared_array(const void* key, size_t bytes) { return block->shared.array(key, bytes); }
void* dynamic_shared(const void* key) { return block->shared.array(key, block->launch->dynamic_shared); }

void sync_block(Site site) { barrier(0, site); }

int sync_block_count(bool predicate, Site site) {
  barrier(predicate, site);
  return block->barrier_result[0];
}

bool sync_block_or(bool predicate, Site site) {
  barrier(predicate, site);
  return block->barrier_result[1];
}

bool sync_block_and(bool predicate, Site site) {
  barrier(predicate, site);
  return block->barrier_result[2];
}

uint32_t shuffle(uint32_t value, unsigned from, uint32_t mask, Site site) {
  Warp& warp = block->warp();
  unsigned lane = block->lane();
  warp.values[lane] = value;
  warp.sources[lane] = from;
  meet({site, mask, WarpOp::Shuffle}, [](Warp& warp, Thread*, const Meeting& meeting) {
    for (unsigned lane = 0; lane < 32; lane++) {
      if (!(meeting.mask >> lane & 1)) continue;
      unsigned from = warp.sources[lane];
      if (from >= 32 || !(meeting.mask >> from & 1)) fault_at(kLaunchFailed, "shuffles from a lane that is not in the mask", meeting.site);
      warp.results[lane] = warp.values[from];
    }
  });
  return warp.results[lane];
}

uint32_t ballot(bool predicate, uint32_t mask, Site site) {
  Warp& warp = block->warp();
  unsigned lane = block->lane();
  warp.values[lane] = predicate;
  meet({site, mask, WarpOp::Ballot}, [](Warp& warp, Thread*, const Meeting& meeting) {
    uint32_t votes = 0;
    for (unsigned lane = 0; lane < 32; lane++) {
      if (meeting.mask >> lane & 1) votes |= warp.values[lane] << lane;
    }
    for (unsigned lane = 0; lane < 32; lane++) {
      if (meeting.mask >> lane & 1) warp.results[lane] = votes;
    }
  });
  return warp.results[lane];
}

void sync_warp(uint32_t mask, Site site) { meet({site, mask, WarpOp::Sync}, nullptr); }

void mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2], Site site) {
  mma<float>(WarpOp::MmaBf16, d, a, b, site, [](Warp&, Thread* lanes, const Meeting&) { product<uint16_t, float, 16>(lanes, a16, b16, widen); });
}

void mma_s8(int32_t d[4], const uint32_t a[4], const uint32_t b[2], Site site) {
  mma<int32_t>(WarpOp::MmaS8, d, a, b, site, [](Warp&, Thread* lanes, const Meeting&) {
    product<int8_t, int32_t, 32>(lanes, a8, b8, [](int8_t value) { return int32_t{value}; });
  });
}

void load_matrix(uint32_t* out, int n, const void* row, bool transposed, Site site) {
  Block& b = *block;
  if (static_cast<int>(b.lane()) < 8 * n) {
    bool is_shared = false;
    for (const Region& array : b.shared.arrays) is_shared |= array.holds(static_cast<const char*>(row), 16);
    if (!is_shared) fault_at(kIllegalAddress, "loads a row of a matrix from outside of shared memory", site);
    if (reinterpret_cast<uintptr_t>(row) % 16) fault_at(kMisaligned, "loads a row of a matrix that is not aligned", site);
    touch(row, 16, 16, Kind::Read, __builtin_return_address(0));
  }
  LaneData& in = b.thread().in;
  put(in, 0, row);
  put(in, 8, n);
  put(in, 12, int{transposed});
  meet({site, ~0u, WarpOp::LoadMatrix}, [](Warp&, Thread* lanes, const Meeting&) {
    int n = get<int>(lanes[0].in, 8), transposed = get<int>(lanes[0].in, 12);
    for (int i = 0; i < n; i++) {
      uint16_t matrix[8][8];
      for (int r = 0; r < 8; r++) memcpy(matrix[r], get<const void*>(lanes[8 * i + r].in, 0), 16);
      for (int lane = 0; lane < 32; lane++) {
        for (int j = 0; j < 2; j++) {
          int row = lane / 4, column = lane % 4 * 2 + j;
          put(lanes[lane].out, 4 * i + 2 * j, transposed ? matrix[column][row] : matrix[row][column]);
        }
      }
    }
  });
  memcpy(out, b.thread().out.bytes, 4 * n);
}

}  // namespace host
