// What a kernel may touch, and who touched it: bounds, alignment, and races of every load and store.
//
// Each byte has a record of its last write and its last reads: which thread of which block, and how many barriers of the
// block and of the warp lay before it. Two accesses of which one is a write must have a barrier between them, and blocks
// of one launch must not touch what another writes. The idea is FastTrack's (Flanagan and Freund, 2009), with barriers
// in place of vector clocks.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace host {

// False in the faster library, which holds accesses to bounds and alignment alone and keeps no records.
#if defined(WITHOUT_RACES)
constexpr bool kFindsRaces = false;
#else
constexpr bool kFindsRaces = true;
#endif

// One access, packed: a block's number, a thread, and the barriers before it. 0: none.
struct Access {
  uint64_t bits = 0;
};

struct ByteShadow {
  Access write, read;
};

// A range of memory that kernels may use.
struct Region {
  char* base = nullptr;
  size_t bytes = 0;
  // Lazily touched, one for each byte; null where no races are found.
  ByteShadow* shadow = nullptr;

  bool holds(const char* address, size_t n) const {
    return address >= base && n <= bytes && static_cast<size_t>(address - base) <= bytes - n;
  }
};

// A region with its shadow; the memory itself is the caller's.
Region* make_region(char* base, size_t bytes);
void free_region(Region* region);

// Shared memory of a block: arrays with unusable bytes between them, NaN when a block starts.
struct SharedMemory {
  char* base = nullptr;
  size_t used = 0;
  std::vector<Region> arrays;
  std::vector<const void*> keys;
  ByteShadow* shadow = nullptr;

  ~SharedMemory();
  // Forgets the block before.
  void reset();
  // The array of a declaration, the same for all threads of a block.
  char* array(const void* key, size_t bytes);
};

// Most shared memory of a block, as on an H100.
constexpr size_t kSharedBytes = 227 << 10;

enum class Kind { Read, Write, Atomic };

// Checks and records an access of the current thread.
void touch(const void* address, size_t bytes, size_t alignment, Kind kind, void* pc);

// Forgets what the calling OS thread remembers of regions, which another launch may not have.
void forget_regions();

// Runs of blocks that shadows can tell apart; then they are cleared.
constexpr uint32_t kMaxSerial = (1 << 22) - 1;

}  // namespace host
