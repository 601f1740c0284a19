// qpu-objdump without its main(), for the tests.
#ifndef QPU_TOOLS_OBJDUMP_OBJDUMP_HPP
#define QPU_TOOLS_OBJDUMP_OBJDUMP_HPP

#include <istream>
#include <ostream>
#include <string>
#include <vector>

namespace qpu::objdump {

struct Streams {
  std::istream& in;    // read for the file "-"
  std::ostream& out;
  std::ostream& errors;
  bool outIsTerminal;  // a terminal gets no binary data
};

// Runs qpu-objdump. Exit codes: 0 done, 1 faults found or unreadable input, 2 usage error.
int run(const std::vector<std::string>& arguments, const Streams& streams);

}  // namespace qpu::objdump

#endif
