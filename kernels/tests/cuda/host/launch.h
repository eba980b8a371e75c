// A launch: the blocks of a grid one after another in random order, the threads of a block as fibers.
//
// A thread runs until it waits at a barrier or at an operation of its warp; then the next of its warp goes on, in random order,
// and behind the last of them another warp that is chosen at random. Threads that never wait run one after another on one stack.
// Whatever a device would not promise ends the launch with a `Fault`.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fiber.h"
#include "shadow.h"

namespace host {

struct Dim {
  unsigned x, y, z;
};

// What a launch did that a device forbids. `code` is the driver's error.
struct Fault {
  int code = 0;
  std::string message;
};

constexpr int kIllegalAddress = 700;
constexpr int kMisaligned = 716;
constexpr int kLaunchFailed = 719;

// A line of a kernel's source.
struct Site {
  const char* file;
  unsigned line;
  bool operator==(const Site& other) const { return line == other.line && file == other.file; }
};

// Operations at which lanes of a warp meet.
enum class WarpOp : uint8_t { Sync, Shuffle, Ballot, MmaBf16, MmaS8, LoadMatrix };

// Bytes that a lane brings to an operation of its warp, or takes from it.
struct alignas(16) LaneData {
  char bytes[48];
};

// A copy to shared memory under way (`cp.async`).
struct Copy {
  char* to;
  const char* from;
  unsigned n_read, n_written;
  unsigned group;
  void* pc;
};

// An operation of some lanes of a warp, and its line.
struct Meeting {
  Site site{};
  uint32_t mask = 0;
  WarpOp op = WarpOp::Sync;
  bool operator==(const Meeting& other) const { return site == other.site && mask == other.mask && op == other.op; }
};

struct alignas(64) Thread {
  Fiber fiber;
  // Lowest byte of its stack; null before it starts and when it has ended.
  char* stack = nullptr;
  // Where it waits at an operation of its warp, or at a barrier: then its line alone.
  Meeting at;
  int predicate = 0;
  LaneData in, out;
  std::vector<Copy> copies;
  unsigned copy_groups = 0;
};

struct Warp {
  uint32_t ready = 0;
  // Lanes that wait at an operation of the warp, lanes that wait at a barrier, and lanes that have ended or were never there.
  uint32_t waiting = 0;
  uint32_t at_barrier = 0;
  uint32_t gone = 0;
  // Synchronisations of the whole warp so far.
  uint32_t epoch = 1;
  // Where the first of the lanes waits that wait, and true if all others do so at the same.
  Meeting first;
  bool is_one_meeting = true;
  // Values that lanes bring to a shuffle or a ballot, the lanes whose values they want, and what they get.
  uint32_t values[32], sources[32], results[32];
};

// Threads of a warp in the order in which they run, each until it waits or ends.
struct Turn {
  unsigned threads[32];
  unsigned next = 0, count = 0;
};

struct Launch {
  std::string kernel;
  Dim grid, block;
  unsigned dynamic_shared = 0;
  uint64_t seed = 1;
  std::function<void()> body;
  // Memory that the kernel may touch, sorted by address.
  std::vector<Region*> regions;
  // Number of the first block's run among all that the regions' shadows know; the others follow.
  uint32_t first_serial = 1;
};

// Runs a launch to its end or to its first fault.
Fault run(const Launch& launch);

// The block that this OS thread runs.
struct Block {
  const Launch* launch = nullptr;
  Dim index{};
  unsigned n_threads = 0;
  unsigned n_alive = 0;
  unsigned n_at_barrier = 0;
  unsigned current = 0;
  uint32_t barrier_epoch = 1;
  int barrier_result[3] = {0, 0, 0};
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  // Stacks of the launch, how many of them were used, and those whose threads have ended.
  char* stack_base = nullptr;
  unsigned n_stacks = 0;
  std::vector<char*> free_stacks;
  Turn turn;
  Fiber scheduler;
  SharedMemory shared;
  Fault fault;
  uint64_t random_state = 1;
  // Number of this block's run.
  uint32_t serial = 1;

  Thread& thread() { return threads[current]; }
  Warp& warp() { return warps[current / 32]; }
  unsigned lane() const { return current % 32; }
  uint64_t random();
  // A number below `n`.
  unsigned below(unsigned n) { return static_cast<unsigned>((random() & 0xffffffff) * n >> 32); }
};

extern thread_local Block* block __attribute__((tls_model("initial-exec")));

// Ends the launch; never returns. `pc` is a return address in the kernel, if the line is not known.
[[noreturn]] void fault(int code, const std::string& what, void* pc);
[[noreturn]] void fault_at(int code, const std::string& what, Site site);

// The current thread waits; the scheduler goes on with another.
void wait();

// Waits until all threads of the block are here. `predicate` is counted.
void barrier(int predicate, Site site);

// What lanes that have met make of what they brought.
using Combine = void (*)(Warp& warp, Thread* lanes, const Meeting& meeting);

// Waits until the lanes of a mask are here with what they bring, in `thread().in` or `warp().values`; `combine` then fills in what
// they get.
void meet(const Meeting& meeting, Combine combine);

}  // namespace host
