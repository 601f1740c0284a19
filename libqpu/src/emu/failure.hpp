// Raises errors whose messages name the QPU and the instruction.
#ifndef QPU_SRC_EMU_FAILURE_HPP
#define QPU_SRC_EMU_FAILURE_HPP

#include "emu/machine.hpp"
#include "error_facts.hpp"

namespace qpu::emu {

template <typename E>
void Machine::fail(const Qpu& q, std::uint32_t at, const std::string& what,
                   std::uint32_t address) const {
  detail::raise<E>(messagePrefix(q, at) + what, facts(q, at, address));
}

}  // namespace qpu::emu

#endif
