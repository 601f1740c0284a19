// Constant folding of integers, for address arithmetic and for constant operands of inlined
// functions.
#ifndef QPU_SRC_LANG_FOLD_HPP
#define QPU_SRC_LANG_FOLD_HPP

#include <cstdint>

#include "qpu/detail/builder.h"

namespace qpu::detail {

inline bool foldInt(Op op, std::uint32_t a, std::uint32_t b, std::uint32_t& result) {
  const auto x = static_cast<std::int32_t>(a);
  const auto y = static_cast<std::int32_t>(b);
  const std::uint32_t n = b & 31U;
  switch (op) {
    case Op::Add: result = a + b; return true;
    case Op::Sub: result = a - b; return true;
    case Op::Mul24: result = (a & 0xffffffU) * (b & 0xffffffU); return true;
    case Op::Min: result = x < y ? a : b; return true;
    case Op::Max: result = x > y ? a : b; return true;
    case Op::Shl: result = a << n; return true;
    case Op::Asr: result = static_cast<std::uint32_t>(x >> n); return true;
    case Op::Shr: result = a >> n; return true;
    case Op::Ror: result = (a >> n) | (a << ((32U - n) & 31U)); return true;
    case Op::And: result = a & b; return true;
    case Op::Or: result = a | b; return true;
    case Op::Xor: result = a ^ b; return true;
    // A constant has the same value in all elements.
    case Op::Rotate:
    case Op::Broadcast: result = a; return true;
    default: return false;
  }
}

}  // namespace qpu::detail

#endif
