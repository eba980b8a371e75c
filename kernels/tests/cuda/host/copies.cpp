// Loads and stores of vectors, atomic operations, and copies that are under way until they are waited for (`cp.async`).
#include <algorithm>
#include <cstring>

#include "host.h"

namespace host {

namespace {

// The bytes arrive: read now, since a device may read as late.
void complete(const Copy& copy) {
  if (copy.n_read) touch(copy.from, copy.n_read, 1, Kind::Read, copy.pc);
  touch(copy.to, copy.n_written, 16, Kind::Write, copy.pc);
  memset(copy.to, 0, copy.n_written);
  memcpy(copy.to, copy.from, copy.n_read);
}

}  // namespace

void copy_async(void* to, const void* from, unsigned n_read) {
  void* pc = __builtin_return_address(0);
  Block& b = *block;
  auto* target = static_cast<char*>(to);
  bool is_shared = false;
  for (const Region& array : b.shared.arrays) is_shared |= array.holds(target, 16);
  if (!is_shared) fault(kIllegalAddress, "copies to outside of shared memory", pc);
  if (n_read > 16) fault(kLaunchFailed, "copies more than 16 bytes", pc);
  if (reinterpret_cast<uintptr_t>(from) % 16) fault(kMisaligned, "copies from an address that is not aligned", pc);
  if (n_read) touch(from, n_read, 16, Kind::Read, pc);
  // From here on the bytes may change at any time.
  touch(to, 16, 16, Kind::Write, pc);
  memset(to, 0xff, 16);
  b.thread().copies.push_back({target, static_cast<const char*>(from), n_read, 16, b.thread().copy_groups, pc});
}

void copy_async_commit() { block->thread().copy_groups++; }

void copy_async_wait(unsigned n_left) {
  Thread& thread = block->thread();
  unsigned groups = thread.copy_groups;
  unsigned until = groups > n_left ? groups - n_left : 0;
  auto due = std::stable_partition(thread.copies.begin(), thread.copies.end(), [&](const Copy& copy) { return copy.group >= until; });
  std::vector<Copy> arrived(due, thread.copies.end());
  thread.copies.erase(due, thread.copies.end());
  for (size_t i = arrived.size(); i > 0; i--) {
    std::swap(arrived[i - 1], arrived[block->random() % i]);
    complete(arrived[i - 1]);
  }
}

void load(void* local, const void* from, size_t n) {
  touch(from, n, n, Kind::Read, __builtin_return_address(0));
  memcpy(local, from, n);
}

void store(void* to, const void* local, size_t n) {
  touch(to, n, n, Kind::Write, __builtin_return_address(0));
  memcpy(to, local, n);
}

void atomic_add(uint32_t* to, uint32_t value) {
  touch(to, 4, 4, Kind::Atomic, __builtin_return_address(0));
  *to += value;
}

void atomic_add(uint64_t* to, uint64_t value) {
  touch(to, 8, 8, Kind::Atomic, __builtin_return_address(0));
  *to += value;
}

}  // namespace host
