// What qpu-objdump does, on streams.
#ifndef QPU_TOOLS_OBJDUMP_OBJDUMP_HPP
#define QPU_TOOLS_OBJDUMP_OBJDUMP_HPP

#include <istream>
#include <ostream>
#include <string>
#include <vector>

namespace qpu::objdump {

struct Streams {
  std::istream& in;    // of the file "-"
  std::ostream& out;
  std::ostream& errors;
  bool outIsTerminal;  // and gets no binary data
};

// The exit code: 0 done, 1 faults or unreadable input, 2 wrong use.
int run(const std::vector<std::string>& arguments, const Streams& streams);

}  // namespace qpu::objdump

#endif
