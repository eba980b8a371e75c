// Asks addr2line of binutils, which g++ needs too.
#include "source_line.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>

namespace host {

std::string source_line(void* pc) {
  Dl_info info;
  if (!dladdr(pc, &info) || !info.dli_fname) return "at an unknown address";
  // The call is before the address to which it returns.
  auto offset = static_cast<const char*>(pc) - static_cast<const char*>(info.dli_fbase) - 1;
  char command[1200];
  snprintf(command, sizeof command, "addr2line -i -e '%s' 0x%zx 2>/dev/null", info.dli_fname, static_cast<size_t>(offset));
  FILE* pipe = popen(command, "r");
  if (!pipe) return "at an unknown line";
  std::string found;
  char line[1000];
  while (fgets(line, sizeof line, pipe)) {
    line[strcspn(line, " \n")] = 0;
    const char* name = strrchr(line, '/');
    name = name ? name + 1 : line;
    bool wrapper = strncmp(name, "intrinsics.cuh", 14) == 0;
    if (found.empty() || !wrapper) found = name;
    if (!wrapper) break;
  }
  pclose(pipe);
  return found.empty() ? "at an unknown line" : found;
}

}  // namespace host
