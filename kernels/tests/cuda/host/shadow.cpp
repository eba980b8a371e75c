// Bounds, alignment and races.
#include "shadow.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "launch.h"

namespace host {

namespace {

// Who has read a byte since it was last in order, beside the thread of the record.
enum class Others : unsigned { None, LanesOfItsWarp, OtherWarps, OtherBlocks };

// `thread` of a write by an atomic operation.
constexpr unsigned kAtomic = 1023;

struct Unpacked {
  uint32_t serial;
  unsigned thread, barrier_epoch, warp_epoch;
  Others others;
};

Unpacked unpack(Access access) {
  uint64_t b = access.bits;
  return {static_cast<uint32_t>(b >> 42), static_cast<unsigned>(b >> 32 & 1023), static_cast<unsigned>(b >> 18 & 0x3fff),
          static_cast<unsigned>(b >> 2 & 0xffff), static_cast<Others>(b & 3)};
}

Access pack(unsigned thread, Others others) {
  const Block& b = *block;
  uint64_t barriers = b.barrier_epoch, meetings = b.warps[b.current / 32].epoch;
  return {uint64_t{b.serial} << 42 | uint64_t{thread} << 32 | barriers << 18 | meetings << 2 | static_cast<uint64_t>(others)};
}

// True if an earlier access of one thread is in order before one of the current thread.
bool ordered(const Unpacked& before) {
  const Block& b = *block;
  if (before.serial != b.serial) return before.serial < b.launch->first_serial;
  if (before.thread == b.current || before.barrier_epoch < b.barrier_epoch) return true;
  return before.thread != kAtomic && before.thread / 32 == b.current / 32 && before.warp_epoch < b.warps[b.current / 32].epoch;
}

// True if all reads of a record are in order before the current thread.
bool reads_ordered(const Unpacked& before) {
  const Block& b = *block;
  switch (before.others) {
    case Others::None: return ordered(before);
    case Others::OtherBlocks: return before.serial < b.launch->first_serial;
    case Others::OtherWarps:
      return before.serial != b.serial ? before.serial < b.launch->first_serial : before.barrier_epoch < b.barrier_epoch;
    case Others::LanesOfItsWarp: {
      Unpacked alone = before;
      // No thread of the block is every lane of a warp.
      if (alone.thread == b.current) alone.thread ^= 1;
      return ordered(alone);
    }
  }
  return false;
}

Access record_read(Access old) {
  if (old.bits == 0) return pack(block->current, Others::None);
  Unpacked before = unpack(old);
  const Block& b = *block;
  if (before.serial != b.serial) {
    bool same_launch = before.serial >= b.launch->first_serial;
    return pack(b.current, same_launch ? Others::OtherBlocks : Others::None);
  }
  if (before.others == Others::OtherBlocks) return pack(b.current, Others::OtherBlocks);
  if (before.barrier_epoch < b.barrier_epoch) return pack(b.current, Others::None);
  if (before.others == Others::OtherWarps || before.thread / 32 != b.current / 32) return pack(b.current, Others::OtherWarps);
  if (before.warp_epoch < b.warps[b.current / 32].epoch) return pack(b.current, Others::None);
  bool alone = before.thread == b.current && before.others == Others::None;
  return pack(b.current, alone ? Others::None : Others::LanesOfItsWarp);
}

std::string place(Unpacked access) {
  char text[96];
  if (access.serial != block->serial) return "a thread of another block";
  if (access.thread == kAtomic) return "an atomic operation";
  snprintf(text, sizeof text, "thread %u", access.thread);
  return text;
}

[[noreturn]] void race(const void* address, Kind kind, Unpacked before, bool was_write, void* pc) {
  char text[200];
  snprintf(text, sizeof text, "race: %s %p, which %s %s with no barrier between", kind == Kind::Read ? "reads" : "writes", address,
           place(before).c_str(), was_write ? "wrote" : "read");
  fault(kLaunchFailed, text, pc);
}

void check_races(ByteShadow* shadow, const char* address, size_t bytes, Kind kind, void* pc) {
  for (size_t i = 0; i < bytes; i++) {
    ByteShadow& byte = shadow[i];
    if (byte.write.bits) {
      Unpacked before = unpack(byte.write);
      bool both_atomic = kind == Kind::Atomic && before.thread == kAtomic;
      if (!both_atomic && !ordered(before)) race(address + i, kind, before, true, pc);
    }
    if (kind == Kind::Read) {
      byte.read = record_read(byte.read);
      continue;
    }
    if (byte.read.bits) {
      Unpacked before = unpack(byte.read);
      if (!reads_ordered(before)) race(address + i, kind, before, false, pc);
    }
    byte.write = pack(kind == Kind::Atomic ? kAtomic : block->current, Others::None);
  }
}

ByteShadow* map_shadow(size_t bytes) {
  void* base = mmap(nullptr, bytes * sizeof(ByteShadow), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    fprintf(stderr, "no memory for the shadow of %zu bytes\n", bytes);
    abort();
  }
  return static_cast<ByteShadow*>(base);
}

// Constants of the kernels' own library, which they read as tables.
extern "C" const char __ehdr_start __attribute__((visibility("hidden")));
extern "C" const char _edata __attribute__((visibility("hidden")));

thread_local Region* last_hit __attribute__((tls_model("initial-exec"))) = nullptr;

Region* find(const char* address, size_t bytes) {
  const std::vector<Region*>& regions = block->launch->regions;
  size_t low = 0, high = regions.size();
  while (low < high) {
    size_t mid = (low + high) / 2;
    if (regions[mid]->base <= address) low = mid + 1;
    else high = mid;
  }
  if (low == 0 || !regions[low - 1]->holds(address, bytes)) return nullptr;
  return regions[low - 1];
}

[[noreturn]] void outside(const void* address, size_t bytes, Kind kind, void* pc) {
  char text[200];
  snprintf(text, sizeof text, "%s %zu bytes at %p, outside of every allocation", kind == Kind::Read ? "reads" : "writes", bytes, address);
  std::string message = text;
  // The allocation that ends or begins next to it.
  const Region* nearest = nullptr;
  ptrdiff_t least = 4096;
  auto* at = static_cast<const char*>(address);
  for (const Region* region : block->launch->regions) {
    ptrdiff_t distance = at < region->base ? region->base - at : at - (region->base + region->bytes);
    if (distance < least) least = distance, nearest = region;
  }
  if (nearest) {
    snprintf(text, sizeof text, ": byte %td of an allocation of %zu bytes", at - nearest->base, nearest->bytes);
    message += text;
  }
  fault(kIllegalAddress, message, pc);
}

}  // namespace

Region* make_region(char* base, size_t bytes) {
  auto* region = new Region;
  region->base = base;
  region->bytes = bytes;
  if (kFindsRaces) region->shadow = map_shadow(bytes ? bytes : 1);
  return region;
}

void free_region(Region* region) {
  if (region->shadow) munmap(region->shadow, (region->bytes ? region->bytes : 1) * sizeof(ByteShadow));
  delete region;
}

SharedMemory::~SharedMemory() {
  if (base) munmap(base, kSharedBytes * 2);
  if (shadow) munmap(shadow, kSharedBytes * 2 * sizeof(ByteShadow));
}

void SharedMemory::reset() {
  if (!base) {
    base = static_cast<char*>(mmap(nullptr, kSharedBytes * 2, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (kFindsRaces) shadow = map_shadow(kSharedBytes * 2);
  }
  memset(base, 0xff, used);
  if (shadow) memset(static_cast<void*>(shadow), 0, used * sizeof(ByteShadow));
  used = 0;
  arrays.clear();
  keys.clear();
}

char* SharedMemory::array(const void* key, size_t bytes) {
  for (size_t i = 0; i < keys.size(); i++) {
    if (keys[i] == key) return arrays[i].base;
  }
  size_t total = bytes;
  for (const Region& other : arrays) total += other.bytes;
  if (total > kSharedBytes) fault(kLaunchFailed, "more shared memory than a block has", __builtin_return_address(0));
  // 128 bytes between two arrays belong to none.
  size_t at = (used + 128 + 127) / 128 * 128;
  if (at + bytes > kSharedBytes * 2) fault(kLaunchFailed, "too many arrays in shared memory", __builtin_return_address(0));
  memset(base + used, 0xff, at + bytes - used);
  used = at + bytes;
  Region region;
  region.base = base + at;
  region.bytes = bytes;
  if (shadow) region.shadow = shadow + at;
  arrays.push_back(region);
  keys.push_back(key);
  return region.base;
}

void touch(const void* pointer, size_t bytes, size_t alignment, Kind kind, void* pc) {
  auto* address = static_cast<const char*>(pointer);
  const Block& b = *block;
  const char* stack = b.threads[b.current].stack;
  if (address >= stack && address < stack + kStackBytes) return;
  if (alignment > 1 && reinterpret_cast<uintptr_t>(address) % alignment) {
    char text[120];
    snprintf(text, sizeof text, "%s %zu bytes at %p, which is not aligned", kind == Kind::Read ? "reads" : "writes", bytes, pointer);
    fault(kMisaligned, text, pc);
  }
  for (const Region& array : b.shared.arrays) {
    if (array.holds(address, bytes)) return kFindsRaces ? check_races(array.shadow + (address - array.base), address, bytes, kind, pc) : void();
  }
  Region* region = last_hit;
  if (!region || !region->holds(address, bytes)) {
    region = find(address, bytes);
    if (!region) {
      if (kind == Kind::Read && address >= &__ehdr_start && address < &_edata) return;
      outside(pointer, bytes, kind, pc);
    }
    last_hit = region;
  }
  if (kFindsRaces) check_races(region->shadow + (address - region->base), address, bytes, kind, pc);
}

void forget_regions() { last_hit = nullptr; }

}  // namespace host
