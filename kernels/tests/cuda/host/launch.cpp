// The scheduler of a launch: blocks, threads, barriers, and operations of a warp.
#include "launch.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

#include "source_line.h"

namespace host {

thread_local Block* block = nullptr;

namespace {

// Most threads of a block: shadows tell as many apart.
constexpr unsigned kMaxThreads = 992;

std::string where() {
  char text[200];
  const Block& b = *block;
  unsigned t = b.current;
  Dim d = b.launch->block;
  snprintf(text, sizeof text, "kernel %s, block (%u, %u, %u), thread (%u, %u, %u): ", b.launch->kernel.c_str(), b.index.x, b.index.y,
           b.index.z, t % d.x, t / d.x % d.y, t / d.x / d.y);
  return text;
}

[[noreturn]] void stop(int code, const std::string& message) {
  if (block->fault.code == 0) block->fault = {code, message};
  Fiber abandoned;
  Fiber& own = block->threads.empty() ? abandoned : block->thread().fiber;
  switch_fiber(own, block->scheduler);
  __builtin_unreachable();
}

bool is_turn_over() { return block->turn.next == block->turn.count; }

// Makes the next thread of the turn the current one.
void take_turn() {
  Block& b = *block;
  b.current = b.turn.threads[b.turn.next++];
  b.warp().ready &= ~(1u << b.lane());
}

void entry();

// What goes on when the current thread does not: the next of the turn, which is then the current one, or the scheduler.
Fiber& next_fiber() {
  Block& b = *block;
  if (is_turn_over()) return b.scheduler;
  take_turn();
  Thread& thread = b.thread();
  if (!thread.stack) {
    if (b.free_stacks.empty()) {
      thread.stack = b.stack_base + b.n_stacks++ * kStackBytes;
    } else {
      thread.stack = b.free_stacks.back();
      b.free_stacks.pop_back();
    }
    start(thread.fiber, thread.stack, entry);
  }
  return thread.fiber;
}

// Runs the current thread, and those of the turn that follow it and have not begun: on the same stack, without a switch.
void entry() {
  Block& b = *block;
  for (;;) {
    b.launch->body();
    Thread& thread = b.thread();
    if (!thread.copies.empty()) fault(kLaunchFailed, "ends with copies under way", nullptr);
    b.warp().gone |= 1u << b.lane();
    b.n_alive--;
    char* stack = std::exchange(thread.stack, nullptr);
    bool is_next_new = !is_turn_over() && !b.threads[b.turn.threads[b.turn.next]].stack;
    if (!is_next_new) {
      // It is nobody's until the switch is done: what goes on has a stack of its own.
      b.free_stacks.push_back(stack);
      switch_fiber(thread.fiber, next_fiber());
      __builtin_unreachable();
    }
    take_turn();
    b.thread().stack = stack;
  }
}

// Nothing can run: says why.
Fault stuck() {
  Block& b = *block;
  unsigned at_barrier = 0, done = 0, at_warp = 0;
  unsigned waiting = 0;
  for (unsigned i = 0; i < b.n_threads; i++) {
    const Warp& warp = b.warps[i / 32];
    bool is_at_warp = warp.waiting >> i % 32 & 1, is_at_barrier = warp.at_barrier >> i % 32 & 1;
    at_warp += is_at_warp;
    at_barrier += is_at_barrier;
    done += warp.gone >> i % 32 & 1;
    if (is_at_warp || (is_at_barrier && !at_warp)) waiting = i;
  }
  b.current = waiting;
  const Thread& thread = b.threads[waiting];
  std::string line = std::string(thread.at.site.file) + ":" + std::to_string(thread.at.site.line);
  char text[200];
  if (at_warp) {
    snprintf(text, sizeof text, "lanes of its warp do not all come to the operation at which it waits; %s", line.c_str());
  } else {
    snprintf(text, sizeof text, "%u of %u threads wait at a barrier, %u have ended; %s", at_barrier, b.n_threads, done, line.c_str());
  }
  return {kLaunchFailed, where() + text};
}

void run_lanes(unsigned warp_index) {
  Block& b = *block;
  Warp& warp = b.warps[warp_index];
  // An odd step from any lane comes to each of the 32 once.
  auto order = static_cast<unsigned>(b.random());
  unsigned lane = order & 31, step = order >> 5 | 1;
  b.turn.next = b.turn.count = 0;
  for (unsigned i = 0; i < 32; i++, lane = (lane + step) & 31) {
    if (warp.ready >> lane & 1) b.turn.threads[b.turn.count++] = warp_index * 32 + lane;
  }
  switch_fiber(b.scheduler, next_fiber());
}

void run_block() {
  Block& b = *block;
  b.threads.clear();
  b.threads.resize(b.n_threads);
  b.warps.assign((b.n_threads + 31) / 32, Warp{});
  for (Warp& warp : b.warps) warp.ready = ~0u;
  if (b.n_threads % 32) {
    b.warps.back().gone = ~0u << b.n_threads % 32;
    b.warps.back().ready = ~b.warps.back().gone;
  }
  b.n_alive = b.n_threads;
  b.n_at_barrier = 0;
  b.barrier_epoch = 1;
  b.barrier_result[0] = b.barrier_result[1] = 0;
  b.barrier_result[2] = 1;
  b.shared.reset();
  b.n_stacks = 0;
  b.free_stacks.clear();
  std::vector<unsigned> ready;
  while (b.n_alive && b.fault.code == 0) {
    ready.clear();
    for (unsigned w = 0; w < b.warps.size(); w++) {
      if (b.warps[w].ready) ready.push_back(w);
    }
    if (ready.empty()) {
      b.fault = stuck();
      break;
    }
    run_lanes(ready[b.below(static_cast<unsigned>(ready.size()))]);
  }
}

Fault refused(const std::string& kernel, const char* what) {
  return {1, "kernel " + kernel + ": " + what};
}

}  // namespace

uint64_t Block::random() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state >> 11;
}

void fault(int code, const std::string& what, void* pc) {
  std::string line = pc ? "; " + source_line(pc) : "";
  stop(code, where() + what + line);
}

void fault_at(int code, const std::string& what, Site site) {
  stop(code, where() + what + "; " + site.file + ":" + std::to_string(site.line));
}

void wait() {
  Fiber& own = block->thread().fiber;
  switch_fiber(own, next_fiber());
}

void barrier(int predicate, Site site) {
  Block& b = *block;
  Thread& thread = b.thread();
  thread.at.site = site;
  thread.predicate = predicate;
  b.n_at_barrier++;
  b.warp().at_barrier |= 1u << b.lane();
  if (b.n_at_barrier < b.n_threads) return wait();
  int results[3] = {0, 0, 1};
  for (Thread& other : b.threads) {
    if (!(other.at.site == site)) {
      fault_at(kLaunchFailed, "waits at another barrier than thread " + std::to_string(&other - b.threads.data()) + ", which is at line " +
                                  std::to_string(other.at.site.line), site);
    }
    results[0] += other.predicate != 0;
    results[1] |= other.predicate != 0;
    results[2] &= other.predicate != 0;
  }
  std::copy(results, results + 3, b.barrier_result);
  b.n_at_barrier = 0;
  if (++b.barrier_epoch >= 1 << 14) fault_at(kLaunchFailed, "more barriers than the shadow counts", site);
  for (Warp& warp : b.warps) warp.ready |= std::exchange(warp.at_barrier, 0);
  b.warp().ready &= ~(1u << b.lane());
}

void meet(const Meeting& meeting, Combine combine) {
  Block& b = *block;
  Thread& thread = b.thread();
  Warp& warp = b.warp();
  const uint32_t mask = meeting.mask, own = 1u << b.lane();
  if (!(mask & own)) fault_at(kLaunchFailed, "is not in the mask of its warp's operation", meeting.site);
  thread.at = meeting;
  if (!warp.waiting) {
    warp.first = meeting;
    warp.is_one_meeting = true;
  } else if (!(warp.first == meeting)) {
    warp.is_one_meeting = false;
  }
  warp.waiting |= own;
  if (uint32_t missing = mask & warp.gone) {
    fault_at(kLaunchFailed, "lane " + std::to_string(__builtin_ctz(missing)) + " of the mask is not there any more", meeting.site);
  }
  if (mask & ~warp.waiting) return wait();
  Thread* lanes = &b.threads[b.current / 32 * 32];
  if (!warp.is_one_meeting) {
    for (unsigned lane = 0; lane < 32; lane++) {
      if (mask >> lane & 1 && !(lanes[lane].at == meeting)) return wait();
    }
  }
  warp.waiting &= ~mask;
  if (combine) combine(warp, lanes, meeting);
  warp.ready |= mask & ~own;
  unsigned n_lanes = std::min(32u, b.n_threads - b.current / 32 * 32);
  if (meeting.op == WarpOp::Sync && mask == (n_lanes == 32 ? ~0u : (1u << n_lanes) - 1)) {
    if (++warp.epoch >= 1 << 16) fault_at(kLaunchFailed, "more synchronisations of a warp than the shadow counts", meeting.site);
  }
}

Fault run(const Launch& launch) {
  thread_local std::unique_ptr<Block> own;
  if (!own) own = std::make_unique<Block>();
  Block& b = *own;
  b.launch = &launch;
  b.n_threads = launch.block.x * launch.block.y * launch.block.z;
  if (b.n_threads == 0 || b.n_threads > kMaxThreads) return refused(launch.kernel, "too few or too many threads in a block");
  uint64_t n_blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  if (n_blocks == 0 || launch.grid.y > 65535 || launch.grid.z > 65535) return refused(launch.kernel, "an empty or too large grid");
  b.stack_base = stacks(b.n_threads);
  b.fault = {};
  b.random_state = launch.seed * 0x9e3779b97f4a7c15 | 1;
  forget_regions();
  block = &b;
  std::vector<uint32_t> order(n_blocks);
  std::iota(order.begin(), order.end(), 0);
  for (uint64_t i = n_blocks; i > 1; i--) std::swap(order[i - 1], order[b.random() % i]);
  for (uint64_t i = 0; i < n_blocks && b.fault.code == 0; i++) {
    uint32_t k = order[i];
    b.index = {k % launch.grid.x, k / launch.grid.x % launch.grid.y, k / launch.grid.x / launch.grid.y};
    b.serial = launch.first_serial + static_cast<uint32_t>(i);
    run_block();
  }
  block = nullptr;
  return b.fault;
}

}  // namespace host
