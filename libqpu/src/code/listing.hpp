// What people read of a compiled kernel.
#ifndef QPU_SRC_CODE_LISTING_HPP
#define QPU_SRC_CODE_LISTING_HPP

#include <cstdint>
#include <string>
#include <vector>

#include "code/object.hpp"
#include "isa/text.hpp"

namespace qpu::code {

// How often an instruction ran and how long it waited, in clocks of the model;
// all QPUs together.
struct Cycles {
  std::uint64_t executed = 0;
  std::uint64_t stalled = 0;
};

// One line per instruction: number, clock at which it would issue if nothing
// stalled or branched, word, text; with `profile` (one entry per word, else
// std::invalid_argument) also its counts. Before it the uniforms, after it sums;
// between the lines the constructs of the source. `fields`: of the text.
std::string listing(const Object& object, const std::vector<Cycles>* profile = nullptr,
                    isa::Fields fields = isa::Fields::Used);

}  // namespace qpu::code

#endif
