// qpu-objdump without its main() function, so that tests can call it.
#ifndef QPU_TOOLS_OBJDUMP_OBJDUMP_HPP
#define QPU_TOOLS_OBJDUMP_OBJDUMP_HPP

#include <istream>
#include <ostream>
#include <string>
#include <vector>

namespace qpu::objdump {

struct Streams {
  std::istream& in;    // is read if the file name is "-"
  std::ostream& out;
  std::ostream& errors;
  bool outIsTerminal;  // if true, no binary data is written to `out`
};

// Runs qpu-objdump. Exit codes: 0 success, 1 faults were found or the input is unreadable, 2
// usage error.
int run(const std::vector<std::string>& arguments, const Streams& streams);

}  // namespace qpu::objdump

#endif
