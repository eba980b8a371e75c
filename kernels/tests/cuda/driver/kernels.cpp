// Entry points for modules, functions and launches.
#include <cstring>

#include "device.h"

using namespace driver;

namespace {

constexpr unsigned kFatbinMagic = 0xba55ed50;

bool is_image(const void* image) {
  unsigned magic;
  memcpy(&magic, image, sizeof magic);
  return magic == kFatbinMagic || memcmp(image, "\x7f" "ELF", 4) == 0;
}

// Arguments as they are at the launch.
struct Arguments {
  std::vector<std::vector<char>> values;
  std::vector<void*> pointers;

  Arguments(const host::Kernel& kernel, void** args) {
    for (size_t i = 0; i < kernel.sizes.size(); i++) {
      auto* from = static_cast<const char*>(args[i]);
      values.emplace_back(from, from + kernel.sizes[i]);
    }
    for (auto& value : values) pointers.push_back(value.data());
  }

  Arguments(const Arguments&) = delete;

  // One thread of the kernel.
  void call(const host::Kernel& kernel) const { kernel.call(pointers.data()); }
};

uint32_t reserve_serials(Device& device, uint64_t n_blocks) {
  if (device.next_serial + n_blocks >= host::kMaxSerial) {
    for (auto& [base, region] : device.regions) {
      if (region->shadow) memset(static_cast<void*>(region->shadow), 0, region->bytes * sizeof(host::ByteShadow));
    }
    device.next_serial = 1;
  }
  uint32_t first = device.next_serial;
  device.next_serial += static_cast<uint32_t>(n_blocks);
  return first;
}

host::Fault run(Device& device, host::Launch launch, const host::Kernel& kernel, const Arguments& arguments) {
  for (auto& [base, region] : device.regions) launch.regions.push_back(region);
  launch.first_serial = reserve_serials(device, uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z);
  launch.seed = device.random(~uint64_t{0}) | 1;
  launch.body = [&] { arguments.call(kernel); };
  return host::run(launch);
}

}  // namespace

extern "C" int cuModuleLoadData(void** out, const void* image) {
  ENTRY("cuModuleLoadData");
  if (!is_image(image)) return kInvalidImage;
  auto* module = new Module;
  dev.modules.insert(module);
  *out = module;
  return kSuccess;
}

extern "C" int cuModuleUnload(void* handle) {
  ENTRY("cuModuleUnload");
  auto* module = static_cast<Module*>(handle);
  if (!dev.modules.erase(module)) return kInvalidHandle;
  delete module;
  return kSuccess;
}

extern "C" int cuModuleGetFunction(void** out, void* module, const char* name) {
  ENTRY("cuModuleGetFunction");
  if (!dev.modules.count(static_cast<Module*>(module))) return kInvalidHandle;
  for (const host::Kernel& kernel : host::kernels()) {
    if (strcmp(kernel.name, name) != 0) continue;
    auto& function = dev.functions[name];
    if (!function) function = std::make_unique<Function>();
    function->kernel = &kernel;
    *out = function.get();
    return kSuccess;
  }
  return kNotFound;
}

extern "C" int cuFuncSetAttribute(void* handle, int attribute, int value) {
  ENTRY("cuFuncSetAttribute");
  auto* function = static_cast<Function*>(handle);
  // 8: most dynamic shared memory; 9: preferred share of shared memory.
  if (attribute == 9) return kSuccess;
  if (attribute != 8 || value < 0 || static_cast<size_t>(value) > host::kSharedBytes) return kInvalidValue;
  function->max_dynamic_shared = value;
  return kSuccess;
}

extern "C" int cuLaunchKernel(void* handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                              void* stream, void** args, void** extra) {
  ENTRY("cuLaunchKernel");
  auto* function = static_cast<Function*>(handle);
  const host::Kernel& kernel = *function->kernel;
  uint64_t n_threads = uint64_t{bx} * by * bz;
  bool is_grid = gx && gy && gz && gx <= 0x7fffffff && gy <= 65535 && gz <= 65535;
  if (extra || !is_grid || n_threads == 0 || n_threads > kernel.max_threads) return kInvalidValue;
  if (static_cast<int>(shared) > function->max_dynamic_shared) return kInvalidValue;
  host::Launch launch;
  launch.kernel = kernel.name;
  launch.grid = {gx, gy, gz};
  launch.block = {bx, by, bz};
  launch.dynamic_shared = shared;
  auto arguments = std::make_shared<Arguments>(kernel, args);
  return submit(dev, stream, std::string("kernel ") + kernel.name,
                [launch, arguments, &kernel](Device& device) { return run(device, launch, kernel, *arguments); });
}
