// Stacks and switches of fibers.
#include "fiber.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

namespace host {

namespace {

struct Stacks {
  char* base = nullptr;
  unsigned count = 0;
  ~Stacks() {
    if (base) munmap(base, count * kStackBytes);
  }
};

thread_local Stacks own_stacks;

}  // namespace

char* stacks(unsigned count) {
  Stacks& have = own_stacks;
  if (have.count >= count) return have.base;
  if (have.base) munmap(have.base, have.count * kStackBytes);
  void* base = mmap(nullptr, count * kStackBytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    fprintf(stderr, "no memory for the stacks of %u fibers\n", count);
    abort();
  }
  have.base = static_cast<char*>(base);
  have.count = count;
  for (unsigned i = 0; i < count; i++) mprotect(have.base + i * kStackBytes, 4096, PROT_NONE);
  return have.base;
}

#if defined(__x86_64__) && !defined(PORTABLE_FIBERS)

asm(R"(
.text
.globl host_switch
.hidden host_switch
.type host_switch,@function
host_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size host_switch,.-host_switch
)");

void start(Fiber& fiber, char* stack, void (*entry)()) {
  // Tops of stacks at one place of their pages would share a few lines of the cache.
  size_t colour = reinterpret_cast<uintptr_t>(stack) / kStackBytes % 64 * 64;
  auto* top = reinterpret_cast<uint64_t*>(stack + kStackBytes - 64 - colour);
  *--top = 0;  // The return address of `entry`, which never returns.
  *--top = reinterpret_cast<uint64_t>(entry);
  for (int saved = 0; saved < 6; saved++) *--top = 0;
  fiber.stack_pointer = top;
}

#else

void start(Fiber& fiber, char* stack, void (*entry)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}

#endif

}  // namespace host
