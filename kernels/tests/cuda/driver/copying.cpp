// Entry points for memory: allocations, copies, fills.
//
// A copy to the device from pageable memory reads it before the call returns; one from pinned memory reads it when its
// turn comes, so that a buffer that is written again too early is a wrong answer. The same of copies to the host.
#include <cstdlib>
#include <cstring>

#include "device.h"

using namespace driver;

namespace {

using Address = unsigned long long;

char* pointer(Address address) { return reinterpret_cast<char*>(address); }

host::Fault illegal(const char* what) { return {kIllegalAddress, std::string(what) + " a range that is not allocated"}; }

Result finish(Device& device, void* stream) {
  std::shared_ptr<Stream> on = find_stream(device, stream);
  uint64_t operation = on->submitted;
  advance_until(device, [&] { return on->done >= operation; });
  return static_cast<Result>(device.sticky.code);
}

Result upload(Device& device, Address to, const void* from, size_t n, void* stream) {
  if (is_device_address(from)) return kInvalidValue;
  if (n == 0) return kSuccess;
  if (is_pinned(device, from, n)) {
    return submit(device, stream, "upload", [=](Device& device) {
      if (!is_allocated(device, to, n)) return illegal("an upload to");
      memcpy(pointer(to), from, n);
      return host::Fault{};
    });
  }
  auto staged = std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + n);
  return submit(device, stream, "upload", [=](Device& device) {
    if (!is_allocated(device, to, n)) return illegal("an upload to");
    memcpy(pointer(to), staged->data(), n);
    return host::Fault{};
  });
}

Result download(Device& device, void* to, Address from, size_t n, void* stream) {
  if (is_device_address(to)) return kInvalidValue;
  if (n == 0) return kSuccess;
  Result result = submit(device, stream, "download", [=](Device& device) {
    if (!is_allocated(device, from, n)) return illegal("a download from");
    memcpy(to, pointer(from), n);
    return host::Fault{};
  });
  if (result || is_pinned(device, to, n)) return result;
  return finish(device, stream);
}

Result copy(Device& device, Address to, Address from, size_t n, void* stream) {
  if (n == 0) return kSuccess;
  return submit(device, stream, "copy", [=](Device& device) {
    if (!is_allocated(device, from, n)) return illegal("a copy from");
    if (!is_allocated(device, to, n)) return illegal("a copy to");
    memmove(pointer(to), pointer(from), n);
    return host::Fault{};
  });
}

Result fill(Device& device, Address to, unsigned char value, size_t n, void* stream) {
  if (n == 0) return kSuccess;
  return submit(device, stream, "fill", [=](Device& device) {
    if (!is_allocated(device, to, n)) return illegal("a fill of");
    memset(pointer(to), value, n);
    return host::Fault{};
  });
}

// Pageable memory in a capture would be read or written whenever the graph is launched.
Result refuse_pageable(Device& device, void* stream, const void* memory, size_t n) {
  std::shared_ptr<Stream> on = find_stream(device, stream);
  if (!on || !on->capture || is_pinned(device, memory, n)) return kSuccess;
  on->capture->invalidated = true;
  return kCaptureUnsupported;
}

}  // namespace

extern "C" int cuMemAlloc_v2(Address* out, size_t n) {
  ENTRY("cuMemAlloc_v2");
  if (Result refused = refuse_while_capturing(dev)) return refused;
  return allocate(dev, n, reinterpret_cast<char**>(out));
}

extern "C" int cuMemFree_v2(Address address) {
  ENTRY("cuMemFree_v2");
  if (Result refused = refuse_while_capturing(dev)) return refused;
  advance_until(dev, [&dev] {
    bool all_done = !dev.null_stream || dev.null_stream->queue.empty();
    for (auto& stream : dev.streams) all_done = all_done && stream->queue.empty();
    return all_done;
  });
  return release(dev, pointer(address));
}

extern "C" int cuMemAllocAsync(Address* out, size_t n, void* stream) {
  ENTRY("cuMemAllocAsync");
  std::shared_ptr<Stream> on = find_stream(dev, stream);
  if (!on) return kInvalidHandle;
  // The driver makes a node that allocates, which replay then owns; the product must not, so that this is an error here.
  if (on->capture) {
    on->capture->invalidated = true;
    return kCaptureUnsupported;
  }
  return allocate(dev, n, reinterpret_cast<char**>(out));
}

extern "C" int cuMemFreeAsync(Address address, void* stream) {
  ENTRY("cuMemFreeAsync");
  std::shared_ptr<Stream> on = find_stream(dev, stream);
  if (on && on->capture) {
    on->capture->invalidated = true;
    return kCaptureUnsupported;
  }
  if (!is_allocated(dev, address, 1)) return kInvalidValue;
  return submit(dev, stream, "free", [=](Device& device) {
    if (release(device, pointer(address))) return illegal("a free of");
    return host::Fault{};
  });
}

extern "C" int cuMemGetInfo_v2(size_t* free, size_t* total) {
  ENTRY("cuMemGetInfo_v2");
  *free = kDeviceBytes - dev.allocated;
  *total = kDeviceBytes;
  return kSuccess;
}

extern "C" int cuMemHostAlloc(void** out, size_t n, unsigned) {
  ENTRY("cuMemHostAlloc");
  if (Result refused = refuse_while_capturing(dev)) return refused;
  if (n == 0) return kInvalidValue;
  auto* memory = static_cast<char*>(aligned_alloc(4096, (n + 4095) / 4096 * 4096));
  memset(memory, 0xff, n);
  dev.pinned[memory] = n;
  *out = memory;
  return kSuccess;
}

extern "C" int cuMemFreeHost(void* memory) {
  ENTRY("cuMemFreeHost");
  if (Result refused = refuse_while_capturing(dev)) return refused;
  if (!dev.pinned.count(static_cast<char*>(memory))) return kInvalidValue;
  advance_until(dev, [&dev] {
    bool all_done = !dev.null_stream || dev.null_stream->queue.empty();
    for (auto& stream : dev.streams) all_done = all_done && stream->queue.empty();
    return all_done;
  });
  dev.pinned.erase(static_cast<char*>(memory));
  free(memory);
  return kSuccess;
}

extern "C" int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t n, void* stream) {
  ENTRY("cuMemcpyHtoDAsync_v2");
  if (Result refused = refuse_pageable(dev, stream, from, n)) return refused;
  return upload(dev, to, from, n, stream);
}

extern "C" int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t n, void* stream) {
  ENTRY("cuMemcpyDtoHAsync_v2");
  if (Result refused = refuse_pageable(dev, stream, to, n)) return refused;
  return download(dev, to, from, n, stream);
}

extern "C" int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t n, void* stream) {
  ENTRY("cuMemcpyDtoDAsync_v2");
  return copy(dev, to, from, n, stream);
}

extern "C" int cuMemsetD8Async(Address to, unsigned char value, size_t n, void* stream) {
  ENTRY("cuMemsetD8Async");
  return fill(dev, to, value, n, stream);
}

extern "C" int cuMemcpyHtoD_v2(Address to, const void* from, size_t n) {
  ENTRY("cuMemcpyHtoD_v2");
  if (Result refused = refuse_while_capturing(dev)) return refused;
  // Pageable memory has been staged when the call returns; the bytes arrive in their turn, which no other stream waits for.
  if (Result result = upload(dev, to, from, n, nullptr)) return result;
  return is_pinned(dev, from, n) ? finish(dev, nullptr) : kSuccess;
}

extern "C" int cuMemcpyDtoH_v2(void* to, Address from, size_t n) {
  ENTRY("cuMemcpyDtoH_v2");
  if (Result refused = refuse_while_capturing(dev)) return refused;
  if (Result result = download(dev, to, from, n, nullptr)) return result;
  return finish(dev, nullptr);
}

extern "C" int cuMemcpyDtoD_v2(Address to, Address from, size_t n) {
  ENTRY("cuMemcpyDtoD_v2");
  if (Result refused = refuse_while_capturing(dev)) return refused;
  return copy(dev, to, from, n, nullptr);
}

extern "C" int cuMemsetD8_v2(Address to, unsigned char value, size_t n) {
  ENTRY("cuMemsetD8_v2");
  if (Result refused = refuse_while_capturing(dev)) return refused;
  return fill(dev, to, value, n, nullptr);
}
