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

// Returns one line per instruction. Each line contains the instruction's number, issue clock, word
// and text. The issue clock is computed as if there were no stalls or branches. If `profile` is
// given, the line also contains the instruction's profile. The listing begins with the uniforms and
// ends with totals. A comment before the instructions of a source construct names the construct.
// Throws std::invalid_argument if `profile` does not have one entry per word. `fields` is passed to
// isa::disassemble().
std::string listing(const Object& object, const std::vector<Cycles>* profile = nullptr,
                    isa::Fields fields = isa::Fields::Used);

}  // namespace qpu::code

#endif
