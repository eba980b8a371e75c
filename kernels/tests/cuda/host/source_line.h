// The line of a source that an instruction of this library comes from.
#pragma once
#include <string>

namespace host {

// `file:line` of the call that returns to `pc`, of the kernel's own code rather than of the wrappers of intrinsics that
// it is inlined from; an address where the binary has no line numbers.
std::string source_line(void* pc);

}  // namespace host
