// Streams advance one operation at a time, in a random order that their marks allow.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "device.h"

namespace driver {

namespace {

std::vector<std::shared_ptr<Stream>> all(Device& device) {
  std::vector<std::shared_ptr<Stream>> streams;
  if (device.null_stream) streams.push_back(device.null_stream);
  streams.insert(streams.end(), device.streams.begin(), device.streams.end());
  return streams;
}

bool can_run(const Stream& stream) {
  if (stream.queue.empty()) return false;
  for (const Mark& mark : stream.queue.front().after) {
    if (!is_done(mark)) return false;
  }
  return true;
}

// Runs the next operation of a random stream; false if none can run.
bool step(Device& device) {
  std::vector<std::shared_ptr<Stream>> able;
  for (auto& stream : all(device)) {
    if (can_run(*stream)) able.push_back(stream);
  }
  if (able.empty()) return false;
  Stream& stream = *able[device.random(able.size())];
  Operation operation = std::move(stream.queue.front());
  stream.queue.pop_front();
  if (device.sticky.code == 0) {
    Open open(device);
    host::Fault fault = operation.work(device);
    if (fault.code) {
      device.sticky = fault;
      fprintf(stderr, "%s\n", fault.message.c_str());
    }
  }
  stream.done++;
  return true;
}

// The legacy default stream and blocking streams wait for each other.
void add_implicit_marks(Device& device, Stream& stream, std::vector<Mark>& after) {
  if (&stream != device.null_stream.get()) {
    if (stream.is_blocking && device.null_stream) after.push_back({device.null_stream, device.null_stream->submitted});
    return;
  }
  for (auto& other : device.streams) {
    if (other->is_blocking) after.push_back({other, other->submitted});
  }
}

}  // namespace

uint64_t Device::random(uint64_t below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (random_state >> 11) % below;
}

std::shared_ptr<Stream> find_stream(Device& device, void* handle) {
  // 1 is the legacy stream, 2 the stream of the thread, which this takes for the same.
  if (!handle || handle == reinterpret_cast<void*>(1) || handle == reinterpret_cast<void*>(2)) {
    if (!device.null_stream) device.null_stream = std::make_shared<Stream>();
    return device.null_stream;
  }
  for (auto& stream : device.streams) {
    if (stream.get() == handle) return stream;
  }
  return nullptr;
}

bool is_done(const Mark& mark) { return !mark.stream || mark.stream->done >= mark.operation; }

Result submit(Device& device, void* handle, const std::string& what, Work work) {
  std::shared_ptr<Stream> stream = find_stream(device, handle);
  if (!stream) return kInvalidHandle;
  if (stream->capture) {
    if (stream->capture->invalidated) return kCaptureInvalidated;
    std::vector<Node>& nodes = stream->capture->graph.nodes;
    nodes.push_back({what, std::move(work), stream->tail});
    stream->tail = {nodes.size() - 1};
    return kSuccess;
  }
  if (stream == device.null_stream) {
    for (auto& other : all(device)) {
      if (other->capture && other->is_blocking) {
        other->capture->invalidated = true;
        return kCaptureImplicit;
      }
    }
  }
  Operation operation{std::move(work), std::move(stream->pending)};
  stream->pending.clear();
  add_implicit_marks(device, *stream, operation.after);
  stream->queue.push_back(std::move(operation));
  stream->submitted++;
  advance(device);
  return kSuccess;
}

void advance_until(Device& device, const std::function<bool()>& done) {
  if (done()) return;
  Open open(device);
  while (!done()) {
    if (!step(device)) {
      fprintf(stderr, "streams wait for each other\n");
      abort();
    }
  }
}

// Work runs in bursts, one for so many calls, since each costs two changes of the memory's protection.
constexpr uint64_t kCallsOfBurst = host::kFindsRaces ? 8 : 32;

void advance(Device& device) {
  if (!device.eagerness || device.random(kCallsOfBurst)) return;
  Open open(device);
  while (device.random(256) < device.eagerness && step(device)) {
  }
}

// `CUDA_STANDIN_LOST` is a file in which a test writes the number of the process that loses its devices.
static bool is_lost_by_file() {
  static const char* path = getenv("CUDA_STANDIN_LOST");
  if (!path) return false;
  FILE* file = fopen(path, "r");
  if (!file) return false;
  long process = 0;
  bool is_own = fscanf(file, "%ld", &process) == 1 && process == static_cast<long>(getpid());
  fclose(file);
  return is_own;
}

Result begin(Device& device, const char* entry) {
  unsigned call = ++device.calls[entry];
  if (!device.sticky.code && is_lost_by_file()) device.sticky = {host::kIllegalAddress, "the test takes the device away"};
  for (size_t i = 0; i < device.planned.size(); i++) {
    Planned& planned = device.planned[i];
    if (planned.entry != entry || planned.nth != call) continue;
    int code = planned.code;
    device.planned.erase(device.planned.begin() + static_cast<ptrdiff_t>(i));
    return static_cast<Result>(code);
  }
  return static_cast<Result>(device.sticky.code);
}

}  // namespace driver
