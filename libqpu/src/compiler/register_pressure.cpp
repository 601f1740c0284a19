#include "compiler/register_pressure.hpp"

#include <algorithm>
#include <vector>

namespace qpu::compiler {

std::uint32_t pressure(const Function& function, const Liveness& live, std::size_t block) {
  std::vector<char> isLive(function.registers, 0);
  std::uint32_t count = 0;
  for (std::size_t g = 0; g < live.globals.size(); ++g)
    if (live.out[block].has(g)) {
      isLive[live.globals[g]] = 1;
      ++count;
    }
  std::uint32_t most = count;
  const auto& operations = function.blocks[block].operations;
  for (std::size_t i = operations.size(); i-- > 0;) {
    const Operation& o = operations[i];
    if (o.target != Operation::kNone && !isUpdate(o) && !live.liveOut(block, o.target) && isLive[o.target] != 0) {
      isLive[o.target] = 0;
      --count;
    }
    forEachRead(o, [&](Vreg v) {
      if (isLive[v] == 0) {
        isLive[v] = 1;
        ++count;
      }
    });
    most = std::max(most, count);
  }
  return most;
}

std::uint32_t pressure(const Function& function) {
  const Liveness live = findLiveness(function);
  std::uint32_t most = 0;
  for (std::size_t b = 0; b < function.blocks.size(); ++b) most = std::max(most, pressure(function, live, b));
  return most;
}

}  // namespace qpu::compiler
