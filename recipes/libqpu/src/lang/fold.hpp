// Constant folding of what address arithmetic needs: sums, differences, shifts.
#ifndef QPU_SRC_LANG_FOLD_HPP
#define QPU_SRC_LANG_FOLD_HPP

#include <cstdint>

#include "qpu/detail/builder.h"

namespace qpu::detail {

inline bool foldInt(Op op, std::uint32_t a, std::uint32_t b, std::uint32_t& result) {
  switch (op) {
    case Op::Add: result = a + b; return true;
    case Op::Sub: result = a - b; return true;
    case Op::Shl: result = a << (b & 31U); return true;
    default: return false;
  }
}

}  // namespace qpu::detail

#endif
