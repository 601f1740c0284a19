#include "compiler/lower_setup.hpp"

namespace qpu::compiler::setup {
namespace {

using detail::Direction;
using detail::Statement;

std::uint32_t horizontal(const Statement& s, unsigned bit) {
  return s.direction == Direction::Horizontal ? 1U << bit : 0;
}
std::uint32_t field(int value, unsigned bits, unsigned shift) {
  return (static_cast<std::uint32_t>(value) & ((1U << bits) - 1)) << shift;
}

}  // namespace

std::uint32_t dmaRead(const Statement& s) {
  return 1U << 31U | field(s.length, 4, 20) | field(s.count, 4, 16) | field(s.pitch, 4, 12) |
         (horizontal(s, 11) ^ 1U << 11U);
}

std::uint32_t dmaWrite(const Statement& s) {
  return 2U << 30U | field(s.count, 7, 23) | field(s.length, 7, 16) | horizontal(s, 14);
}

std::uint32_t vpmRead(const Statement& s) {
  return field(s.count, 4, 20) | field(s.pitch, 6, 12) | horizontal(s, 11) | 2U << 8U;
}

std::uint32_t vpmWrite(const Statement& s) {
  return field(s.pitch, 6, 12) | horizontal(s, 11) | 2U << 8U;
}

}  // namespace qpu::compiler::setup
