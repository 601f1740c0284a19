// The listing of a compiled kernel.
#ifndef QPU_SRC_CODE_LISTING_HPP
#define QPU_SRC_CODE_LISTING_HPP

#include <cstdint>
#include <string>
#include <vector>

#include "code/object.hpp"
#include "isa/text.hpp"

namespace qpu::code {

// The profile of an instruction: the number of executions, and the stalls in the model's clocks.
// Both numbers are sums over all QPUs.
struct Cycles {
  std::uint64_t executed = 0;
  std::uint64_t stalled = 0;
};

// Returns one line per instruction. Each line contains the instruction's number, the clock at which
// the instruction would issue if there were no stalls or branches, its word, its text and, if
// `profile` is given, its profile. The listing begins with the uniforms and ends with totals.
// Before the instructions of a source construct, a comment names the construct. Throws
// std::invalid_argument if `profile` does not have one entry per word. `fields` is passed to
// isa::disassemble().
std::string listing(const Object& object, const std::vector<Cycles>* profile = nullptr,
                    isa::Fields fields = isa::Fields::Used);

}  // namespace qpu::code

#endif
