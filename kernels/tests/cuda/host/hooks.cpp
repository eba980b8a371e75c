// Every load and store of a kernel comes here first: `-fsanitize=thread` makes g++ call these before each, and this file
// stands in for the sanitizer's library. `-fsanitize=bounds` does the same for arrays of known length.
#include <cstddef>
#include <cstdint>

#include "launch.h"
#include "shadow.h"

namespace {

inline void seen(const void* address, size_t bytes, size_t alignment, host::Kind kind, void* pc) {
  if (host::block) host::touch(address, bytes, alignment, kind, pc);
}

}  // namespace

#define PC __builtin_return_address(0)
#define HOOKS(size)                                                                                         \
  extern "C" void __tsan_read##size(void* a) { seen(a, size, size, host::Kind::Read, PC); }                 \
  extern "C" void __tsan_write##size(void* a) { seen(a, size, size, host::Kind::Write, PC); }               \
  extern "C" void __tsan_unaligned_read##size(void* a) { seen(a, size, 1, host::Kind::Read, PC); }          \
  extern "C" void __tsan_unaligned_write##size(void* a) { seen(a, size, 1, host::Kind::Write, PC); }

HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

extern "C" void __tsan_read_range(void* a, size_t n) { seen(a, n, 1, host::Kind::Read, PC); }
extern "C" void __tsan_write_range(void* a, size_t n) { seen(a, n, 1, host::Kind::Write, PC); }
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}

// The first fields of what g++ hands over: the place in the source.
struct BoundsData {
  const char* file;
  uint32_t line, column;
};

extern "C" void __ubsan_handle_out_of_bounds_abort(BoundsData* data, uintptr_t index) {
  host::fault_at(host::kIllegalAddress, "index " + std::to_string(index) + " is outside of an array", {data->file, data->line});
}
