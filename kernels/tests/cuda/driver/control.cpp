// What tests ask of the stand-in, beside the driver's own entry points.
#include <cstdio>
#include <cstring>

#include "device.h"

using namespace driver;

// A device no test has had before; its seed decides every order.
extern "C" int standin_new_device(uint64_t seed) {
  static std::mutex lock;
  static int next = 0;
  std::lock_guard<std::mutex> guard(lock);
  if (next >= kDevices) return -1;
  Device& dev = device(next);
  dev.random_state = seed * 0x9e3779b97f4a7c15 | 1;
  for (int i = 0; i < 8; i++) dev.random(2);
  constexpr unsigned kEagerness[] = {0, 186, 246, 255};
  dev.eagerness = kEagerness[dev.random(4)];
  return next++;
}

// Makes the `nth` call of an entry point from now, counted from 1, give `code`.
extern "C" void standin_fail(int ordinal, const char* entry, unsigned nth, int code) {
  Device& dev = device(ordinal);
  std::lock_guard<std::recursive_mutex> guard(dev.lock);
  dev.planned.push_back({entry, dev.calls[entry] + nth, code});
}

// Calls of an entry point so far.
extern "C" unsigned standin_calls(int ordinal, const char* entry) {
  Device& dev = device(ordinal);
  std::lock_guard<std::recursive_mutex> guard(dev.lock);
  return dev.calls[entry];
}

// What is still there: allocations, pinned allocations, streams, events, modules, graphs, executable graphs.
extern "C" void standin_left(int ordinal, size_t out[7]) {
  Device& dev = device(ordinal);
  std::lock_guard<std::recursive_mutex> guard(dev.lock);
  size_t left[7] = {dev.regions.size(), dev.pinned.size(), dev.streams.size(), dev.events.size(), dev.modules.size(), dev.graphs.size(), dev.executables.size()};
  memcpy(out, left, sizeof left);
}

// The cause of the device's error, cut to `length` bytes; empty if it has none.
extern "C" void standin_fault(int ordinal, char* out, size_t length) {
  Device& dev = device(ordinal);
  std::lock_guard<std::recursive_mutex> guard(dev.lock);
  snprintf(out, length, "%s", dev.sticky.message.c_str());
}

// Work of another library on a stream, such as cublasLt's: `run` returns false for an address that is not allocated.
extern "C" int standin_submit(void* stream, const char* what, std::function<bool(Device&)> run) {
  ENTRY("standin_submit");
  std::string name = what;
  return submit(dev, stream, name, [run, name](Device& device) {
    if (run(device)) return host::Fault{};
    return host::Fault{kIllegalAddress, name + ": an operand is outside of every allocation"};
  });
}

extern "C" bool standin_is_allocated(Device& device, uint64_t address, size_t bytes) { return is_allocated(device, address, bytes); }
