// The names of an instruction word's fields. The assembly text uses the names for values that it
// does not express otherwise.
#ifndef QPU_SRC_ISA_FIELDS_HPP
#define QPU_SRC_ISA_FIELDS_HPP

#include <array>
#include <string_view>

#include "isa/instruction.hpp"

namespace qpu::isa {

struct NamedField {
  std::string_view name;
  unsigned low;
  unsigned bits;
  // The forms that have the field. inLoad stands for loads of immediates and for semaphores.
  bool inAlu, inLoad, inBranch;

  constexpr Word mask() const { return ((Word{1} << bits) - 1) << low; }
  constexpr bool isIn(Form form) const {
    return form == Form::Alu ? inAlu : form == Form::Branch ? inBranch : inLoad;
  }
};

// The fields that can be unused in some form.
constexpr std::array<NamedField, 18> kNamedFields{{
    {"sig", 60, 4, true, false, false},
    {"unpack", 57, 3, true, false, false},
    {"pm", 56, 1, true, true, false},
    {"pack", 52, 4, true, true, false},
    {"cond_add", 49, 3, true, true, false},
    {"cond_mul", 46, 3, true, true, false},
    {"raddr_a", 45, 5, false, false, true},
    {"sf", 45, 1, true, true, false},
    {"ws", 44, 1, true, true, true},
    {"waddr_add", 38, 6, true, true, true},
    {"waddr_mul", 32, 6, true, true, true},
    {"raddr_a", 18, 6, true, false, false},
    {"raddr_b", 12, 6, true, false, false},
    {"add_a", 9, 3, true, false, false},
    {"add_b", 6, 3, true, false, false},
    {"mul_a", 3, 3, true, false, false},
    {"mul_b", 0, 3, true, false, false},
    {"imm", 0, 32, false, true, false},
}};

}  // namespace qpu::isa

#endif
