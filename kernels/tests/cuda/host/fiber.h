// A fiber: a stack and the place at which it goes on. One for each CUDA thread of a block.
//
// x86-64 switches in a few instructions of its own; other machines use ucontext, whose switch is a system call.
#pragma once
#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__) || defined(PORTABLE_FIBERS)
#include <ucontext.h>
#endif

namespace host {

struct Fiber {
#if defined(__x86_64__) && !defined(PORTABLE_FIBERS)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
};

// Bytes of a stack. Its lowest page is left without access, so that an overflow faults.
constexpr size_t kStackBytes = 128 << 10;

// Stacks for `count` fibers, one after another; kept by the calling thread for the next launch.
char* stacks(unsigned count);

// Makes `fiber` start at `entry` on its stack at the next switch to it.
void start(Fiber& fiber, char* stack, void (*entry)());

#if defined(__x86_64__) && !defined(PORTABLE_FIBERS)
extern "C" void host_switch(void** save, void* to) __attribute__((visibility("hidden")));
#endif

// Goes on at `to`; comes back when someone switches to `from`.
inline void switch_fiber(Fiber& from, Fiber& to) {
#if defined(__x86_64__) && !defined(PORTABLE_FIBERS)
  host_switch(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.context, &to.context);
#endif
}

}  // namespace host
