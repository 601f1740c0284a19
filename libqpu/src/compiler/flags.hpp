// The flags that a comparison, or a combination of comparisons, can leave in the elements where it
// is true and in the other elements.
#ifndef QPU_SRC_COMPILER_FLAGS_HPP
#define QPU_SRC_COMPILER_FLAGS_HPP

#include <array>
#include <cstdint>
#include <optional>

#include "isa/instruction.hpp"

namespace qpu::compiler {

// Two sets of combinations of the flags N, Z and C. Bit 4 N + 2 Z + C of a set represents the
// combination of N, Z and C.
struct FlagSets {
  std::uint8_t yes = 0;  // combinations that are possible where the mask is true
  std::uint8_t no = 0;

  FlagSets inverse() const { return {no, yes}; }
};

constexpr std::uint8_t kFlagsNone = 1U << 0U;
constexpr std::uint8_t kFlagsC = 1U << 1U;
constexpr std::uint8_t kFlagsZ = 1U << 2U;
constexpr std::uint8_t kFlagsZC = 1U << 3U;
constexpr std::uint8_t kFlagsN = 1U << 4U;
constexpr std::uint8_t kFlagsNC = 1U << 5U;

constexpr isa::Cond opposite(isa::Cond c) {
  return static_cast<isa::Cond>(static_cast<unsigned>(c) ^ 1U);
}

// Returns the combinations for which the condition holds.
constexpr std::uint8_t flagsOf(isa::Cond c) {
  constexpr std::uint8_t all = 0x3f;
  switch (c) {
    case isa::Cond::Never: return 0;
    case isa::Cond::Always: return all;
    case isa::Cond::ZSet: return kFlagsZ | kFlagsZC;
    case isa::Cond::ZClear: return all & ~(kFlagsZ | kFlagsZC);
    case isa::Cond::NSet: return kFlagsN | kFlagsNC;
    case isa::Cond::NClear: return all & ~(kFlagsN | kFlagsNC);
    case isa::Cond::CSet: return kFlagsC | kFlagsZC | kFlagsNC;
    case isa::Cond::CClear: return all & ~(kFlagsC | kFlagsZC | kFlagsNC);
  }
  return 0;
}

// Returns a condition that holds in exactly the elements where the mask is true, if such a
// condition exists.
constexpr std::optional<isa::Cond> condition(FlagSets f) {
  constexpr std::array<isa::Cond, 6> all = {isa::Cond::ZSet,   isa::Cond::ZClear,
                                            isa::Cond::NSet,   isa::Cond::NClear,
                                            isa::Cond::CSet,   isa::Cond::CClear};
  for (const isa::Cond c : all)
    if ((f.yes & ~flagsOf(c)) == 0 && (f.no & flagsOf(c)) == 0) return c;
  return std::nullopt;
}

// Return the flags after two comparisons. The second comparison sets flags only in the elements
// where the first comparison is true (for both()) or false (for either()). The other elements keep
// the flags that the first comparison set.
constexpr FlagSets both(FlagSets first, FlagSets second) {
  return {second.yes, static_cast<std::uint8_t>(first.no | second.no)};
}
constexpr FlagSets either(FlagSets first, FlagSets second) {
  return {static_cast<std::uint8_t>(first.yes | second.yes), second.no};
}

}  // namespace qpu::compiler

#endif
