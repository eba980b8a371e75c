// Device memory: one range of addresses for each device, without access from outside of its own operations.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "device.h"

namespace driver {

namespace {

constexpr size_t kAlignment = 256;
// Address space of a device. Addresses are not given twice, so that a use after free is always one.
constexpr size_t kSpace = size_t{16} << 30;

char* all_devices() {
  static char* base = [] {
    void* base = mmap(nullptr, kSpace * kDevices, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
      fprintf(stderr, "no addresses for the devices\n");
      abort();
    }
    return static_cast<char*>(base);
  }();
  return base;
}

size_t pages(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

}  // namespace

Open::Open(Device& device) : device(device), opened(!device.is_open) {
  if (!opened) return;
  if (device.used) mprotect(device.base, pages(device.used), PROT_READ | PROT_WRITE);
  device.is_open = true;
}

Open::~Open() {
  if (!opened) return;
  if (device.used) mprotect(device.base, pages(device.used), PROT_NONE);
  device.is_open = false;
}

Result allocate(Device& device, size_t bytes, char** out) {
  if (bytes == 0) return kInvalidValue;
  if (device.allocated + bytes > kDeviceBytes) return kOutOfMemory;
  if (!device.base) device.base = all_devices() + kSpace * device.ordinal;
  // A gap that belongs to no allocation, before and after.
  size_t at = (device.used + 2 * kAlignment - 1) / kAlignment * kAlignment;
  if (at + bytes + 4096 > kSpace) return kOutOfMemory;
  device.used = at + bytes;
  char* address = device.base + at;
  mprotect(device.base, pages(device.used), device.is_open ? PROT_READ | PROT_WRITE : PROT_NONE);
  {
    Open open(device);
    memset(address, 0xff, bytes);
  }
  device.regions[address] = host::make_region(address, bytes);
  device.allocated += bytes;
  *out = address;
  return kSuccess;
}

Result release(Device& device, char* address) {
  auto found = device.regions.find(address);
  if (found == device.regions.end()) return kInvalidValue;
  host::Region* region = found->second;
  device.allocated -= region->bytes;
  host::free_region(region);
  device.regions.erase(found);
  return kSuccess;
}

bool is_allocated(Device& device, uint64_t address, size_t bytes) {
  auto* pointer = reinterpret_cast<char*>(address);
  auto after = device.regions.upper_bound(pointer);
  if (after == device.regions.begin()) return false;
  return std::prev(after)->second->holds(pointer, bytes);
}

bool is_device_address(const void* address) {
  auto* pointer = static_cast<const char*>(address);
  return pointer >= all_devices() && pointer < all_devices() + kSpace * kDevices;
}

bool is_pinned(Device& device, const void* address, size_t bytes) {
  auto* pointer = static_cast<char*>(const_cast<void*>(address));
  auto after = device.pinned.upper_bound(pointer);
  if (after == device.pinned.begin()) return false;
  auto& [base, size] = *std::prev(after);
  return static_cast<size_t>(pointer - base) + bytes <= size;
}

}  // namespace driver
