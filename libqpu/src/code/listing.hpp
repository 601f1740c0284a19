// Listing of a compiled kernel.
#ifndef QPU_SRC_CODE_LISTING_HPP
#define QPU_SRC_CODE_LISTING_HPP

#include <cstdint>
#include <string>
#include <vector>

#include "code/object.hpp"
#include "isa/text.hpp"

namespace qpu::code {

// Profile of one instruction: the number of executions, and the stalls in the model's clocks,
// each summed over all QPUs.
struct Cycles {
  std::uint64_t executed = 0;
  std::uint64_t stalled = 0;
};

// Returns one line per instruction: its number, the clock at which it would issue without stalls
// and branches, its word and its text and, with `profile`, its profile. The uniforms come first
// and totals last. A comment before a construct's instructions names the construct in the source.
// Throws std::invalid_argument if `profile` does not have one entry per word. `fields` is passed
// to isa::disassemble().
std::string listing(const Object& object, const std::vector<Cycles>* profile = nullptr,
                    isa::Fields fields = isa::Fields::Used);

}  // namespace qpu::code

#endif
