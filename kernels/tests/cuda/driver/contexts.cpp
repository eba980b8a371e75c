// Entry points for devices and their primary contexts.
#include <cstdio>
#include <cstring>

#include "device.h"

namespace driver {

Device& device(int ordinal) {
  static Device devices[kDevices];
  devices[ordinal].ordinal = ordinal;
  return devices[ordinal];
}

Device*& current() {
  static thread_local Device* device = nullptr;
  return device;
}

namespace {

bool is_device(int ordinal) { return ordinal >= 0 && ordinal < kDevices; }

}  // namespace

}  // namespace driver

using namespace driver;

extern "C" int cuInit(unsigned flags) { return flags ? kInvalidValue : kSuccess; }

extern "C" int cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}

extern "C" int cuDeviceGet(int* out, int ordinal) {
  if (!is_device(ordinal)) return kInvalidDevice;
  *out = ordinal;
  return kSuccess;
}

extern "C" int cuDeviceGetCount(int* count) {
  *count = kDevices;
  return kSuccess;
}

extern "C" int cuDeviceGetName(char* name, int length, int ordinal) {
  if (!is_device(ordinal)) return kInvalidDevice;
  snprintf(name, static_cast<size_t>(length), "stand-in %d", ordinal);
  return kSuccess;
}

extern "C" int cuDeviceGetUuid_v2(char* uuid, int ordinal) {
  if (!is_device(ordinal)) return kInvalidDevice;
  memset(uuid, 0, 16);
  memcpy(uuid, &ordinal, sizeof ordinal);
  return kSuccess;
}

extern "C" int cuDeviceTotalMem_v2(size_t* bytes, int ordinal) {
  if (!is_device(ordinal)) return kInvalidDevice;
  *bytes = kDeviceBytes;
  return kSuccess;
}

// Attributes of an H100, by their numbers in `CUdevice_attribute`.
extern "C" int cuDeviceGetAttribute(int* value, int attribute, int ordinal) {
  if (!is_device(ordinal)) return kInvalidDevice;
  switch (attribute) {
    case 1: *value = 1024; break;       // Threads a block.
    case 8: *value = 48 << 10; break;   // Shared memory a block.
    case 10: *value = 32; break;        // Warp size.
    case 16: *value = 132; break;       // Multiprocessors.
    case 38: *value = 50 << 20; break;  // L2.
    case 75: *value = 9; break;         // Compute capability.
    case 76: *value = 0; break;
    case 81: *value = 228 << 10; break;  // Shared memory a multiprocessor.
    case 97: *value = 227 << 10; break;  // Shared memory a block, opted in.
    case 115: *value = 1; break;         // Memory pools.
    default: return kInvalidValue;
  }
  return kSuccess;
}

extern "C" int cuDevicePrimaryCtxRetain(void** context, int ordinal) {
  if (!is_device(ordinal)) return kInvalidDevice;
  Device& dev = device(ordinal);
  std::lock_guard<std::recursive_mutex> guard(dev.lock);
  if (Result early = begin(dev, "cuDevicePrimaryCtxRetain")) return early;
  dev.retained++;
  *context = &dev;
  return kSuccess;
}

extern "C" int cuDevicePrimaryCtxRelease_v2(int ordinal) {
  if (!is_device(ordinal)) return kInvalidDevice;
  Device& dev = device(ordinal);
  std::lock_guard<std::recursive_mutex> guard(dev.lock);
  if (dev.retained == 0) return kInvalidContext;
  dev.retained--;
  return kSuccess;
}

extern "C" int cuCtxSetCurrent(void* context) {
  current() = static_cast<Device*>(context);
  return kSuccess;
}

extern "C" int cuCtxGetCurrent(void** context) {
  *context = current();
  return kSuccess;
}

extern "C" int cuCtxSetFlags(unsigned) {
  ENTRY("cuCtxSetFlags");
  return kSuccess;
}

extern "C" int cuCtxSynchronize() {
  ENTRY("cuCtxSynchronize");
  if (Result refused = refuse_while_capturing(dev)) return refused;
  advance_until(dev, [&dev] {
    bool all_done = !dev.null_stream || dev.null_stream->queue.empty();
    for (auto& stream : dev.streams) all_done = all_done && stream->queue.empty();
    return all_done;
  });
  return dev.sticky.code;
}

extern "C" int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  ENTRY("cuCtxGetStreamPriorityRange");
  *least = 0;
  *greatest = -5;
  return kSuccess;
}

namespace {

struct Name {
  int code;
  const char *name, *text;
};

constexpr Name kNames[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not initiated in this stream"},
    {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing blocking stream"},
    {907, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a thread-local capture sequence from another thread"},
    {910, "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", "the graph update was not performed because it included changes which violated constraints"},
};

}  // namespace

extern "C" int cuGetErrorName(int code, const char** out) {
  for (const Name& name : kNames) {
    if (name.code == code) return *out = name.name, kSuccess;
  }
  return *out = nullptr, kInvalidValue;
}

extern "C" int cuGetErrorString(int code, const char** out) {
  for (const Name& name : kNames) {
    if (name.code == code) return *out = name.text, kSuccess;
  }
  return *out = nullptr, kInvalidValue;
}
