// The devices of the stand-in: memory, streams, events, graphs, and what tests ask of them.
//
// A process has several devices, so that each test has one of its own: its memory, its order of things, its failures.
// Work that is submitted waits in its stream until something must be known of it; then streams advance one operation at a
// time, in a random order that the events between them allow. So a missing event is a wrong answer, in some order.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../host/host.h"

namespace driver {

// The driver's results that the stand-in gives (`CUresult`).
enum Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kInvalidDevice = 101,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kOutOfResources = 701,
  kMisalignedAddress = 716,
  kLaunchFailed = 719,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureUnmatched = 903,
  kCaptureUnjoined = 904,
  kCaptureIsolation = 905,
  kCaptureImplicit = 906,
  kCapturedEvent = 907,
  kCaptureWrongThread = 908,
  kGraphExecUpdateFailure = 910,
};

constexpr int kDevices = 2048;
// Memory of a device, as it tells callers.
constexpr size_t kDeviceBytes = size_t{1} << 30;

struct Stream;
struct Device;

// Work of a stream, or of a node of a graph.
using Work = std::function<host::Fault(Device&)>;

// A place in a stream: done when the stream has done so many operations.
struct Mark {
  std::shared_ptr<Stream> stream;
  uint64_t operation = 0;
};

struct Operation {
  Work work;
  std::vector<Mark> after;
};

// What an operation is, for an update of a graph: only kernels may change, and only in their arguments and grid.
struct Node {
  std::string what;
  Work work;
  std::vector<size_t> after;
};

struct Graph {
  std::vector<Node> nodes;
};

// A capture under way, shared by the streams that are in it.
struct Capture {
  Graph graph;
  Stream* origin = nullptr;
  int mode = 0;
  uint64_t thread = 0;
  bool invalidated = false;
};

struct Stream {
  bool is_blocking = true;
  std::deque<Operation> queue;
  uint64_t submitted = 0, done = 0;
  // Marks that the next operation waits for.
  std::vector<Mark> pending;
  std::shared_ptr<Capture> capture;
  // Nodes after which the next node of this stream's capture comes.
  std::vector<size_t> tail;
};

// A point in a stream, or after nodes of a capture.
struct Event {
  Mark mark;
  std::shared_ptr<Capture> capture;
  std::vector<size_t> captured_after;
};

struct Module {};

struct Function {
  const host::Kernel* kernel = nullptr;
  int max_dynamic_shared = 48 << 10;
};

// A failure that a test asked for: the `nth` call of `entry` from now gives `code`.
struct Planned {
  std::string entry;
  unsigned nth;
  int code;
};

struct Device {
  std::recursive_mutex lock;
  int ordinal = 0;
  int retained = 0;
  uint64_t random_state = 1;
  // In 256ths: how likely a burst of operations goes on. 0: none runs before something must be known of it.
  unsigned eagerness = 240;
  // The error after which nothing works any more, and its cause.
  host::Fault sticky;

  char* base = nullptr;
  size_t used = 0;
  size_t allocated = 0;
  bool is_open = false;
  std::map<char*, host::Region*> regions;
  uint32_t next_serial = 1;

  std::map<char*, size_t> pinned;
  std::shared_ptr<Stream> null_stream;
  // In the order in which they were made.
  std::vector<std::shared_ptr<Stream>> streams;
  std::set<Event*> events;
  std::set<Graph*> graphs, executables;
  std::set<Module*> modules;
  std::map<std::string, std::unique_ptr<Function>> functions;
  std::vector<Planned> planned;
  std::map<std::string, unsigned> calls;

  uint64_t random(uint64_t below);
};

Device& device(int ordinal);

// The device of the calling thread's context; `nullptr` if it has none.
Device*& current();

// Memory. Device memory may be touched only while it is open.
struct Open {
  explicit Open(Device& device);
  ~Open();
  Device& device;
  bool opened;
};
Result allocate(Device& device, size_t bytes, char** out);
Result release(Device& device, char* address);
// True if the range lies in one allocation.
bool is_allocated(Device& device, uint64_t address, size_t bytes);
bool is_device_address(const void* address);
bool is_pinned(Device& device, const void* address, size_t bytes);

// Streams.
std::shared_ptr<Stream> find_stream(Device& device, void* handle);
// Puts work at the end of a stream, or of its capture.
Result submit(Device& device, void* stream, const std::string& what, Work work);
// Runs operations in a random legal order until `done`.
void advance_until(Device& device, const std::function<bool()>& done);
// Runs a few operations, or none.
void advance(Device& device);
bool is_done(const Mark& mark);

// What a call gives that is not allowed while a stream captures: it spoils the capture.
Result refuse_while_capturing(Device& device);

// An entry point begins: what it gives at once, if a test or an earlier fault has decided that.
Result begin(Device& device, const char* entry);

}  // namespace driver

// Begins an entry point that needs a context.
#define ENTRY(name)                                                     \
  driver::Device* entry_device = driver::current();                     \
  if (!entry_device) return driver::kInvalidContext;                    \
  driver::Device& dev = *entry_device;                                  \
  std::lock_guard<std::recursive_mutex> guard(dev.lock);                \
  if (driver::Result early = driver::begin(dev, name)) return early
