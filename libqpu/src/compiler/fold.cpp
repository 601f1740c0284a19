#include "compiler/fold.hpp"

#include "interp/arith.hpp"
#include "interp/vector_ops.hpp"

namespace qpu::compiler {
namespace {

using interp::asSigned;

bool top(std::uint32_t a, std::uint32_t b) {
  return interp::hasTopExponent(a) || interp::hasTopExponent(b);
}

}  // namespace

std::optional<std::uint32_t> fold(isa::AddOp op, std::uint32_t a, std::uint32_t b) {
  using isa::AddOp;
  switch (op) {
    case AddOp::Add: return a + b;
    case AddOp::Sub: return a - b;
    case AddOp::Min: return asSigned(a) > asSigned(b) ? b : a;
    case AddOp::Max: return asSigned(a) > asSigned(b) ? a : b;
    case AddOp::Shl: return interp::shl(a, b);
    case AddOp::Shr: return interp::shr(a, b);
    case AddOp::Asr: return interp::asr(a, b);
    case AddOp::Ror: return interp::ror(a, b);
    case AddOp::And: return a & b;
    case AddOp::Or: return a | b;
    case AddOp::Xor: return a ^ b;
    case AddOp::Not: return ~a;
    case AddOp::FAdd: return top(a, b) ? interp::faddTop(a, b) : interp::fadd(a, b);
    case AddOp::FSub:
      return top(a, b) ? interp::faddTop(a, b ^ interp::kSign) : interp::fsub(a, b);
    case AddOp::FMin: return interp::fmin(a, b);
    case AddOp::FMax: return interp::fmax(a, b);
    case AddOp::FMaxAbs: return interp::fmaxabs(a, b);
    case AddOp::ItoF: return interp::itof(a);
    case AddOp::FtoI: return interp::ftoi(a);
    default: return std::nullopt;
  }
}

std::optional<std::uint32_t> fold(isa::MulOp op, std::uint32_t a, std::uint32_t b) {
  switch (op) {
    case isa::MulOp::Mul24: return interp::mul24(a, b);
    case isa::MulOp::FMul: return top(a, b) ? interp::fmulTop(a, b) : interp::fmul(a, b);
    default: return std::nullopt;
  }
}

bool fold(ir::Test test, std::uint32_t a, std::uint32_t b) {
  switch (test) {
    case ir::Test::Equal: return a == b;
    case ir::Test::Less: return asSigned(a) < asSigned(b);
    case ir::Test::FloatLess: return interp::order(a) < interp::order(b);
  }
  return false;
}

}  // namespace qpu::compiler
