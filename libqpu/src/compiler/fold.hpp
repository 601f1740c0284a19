// Constant folding with the interpreter's arithmetic.
#ifndef QPU_SRC_COMPILER_FOLD_HPP
#define QPU_SRC_COMPILER_FOLD_HPP

#include <cstdint>
#include <optional>

#include "compiler/ir.hpp"

namespace qpu::compiler {

// Returns std::nullopt for operations that are not in the language.
std::optional<std::uint32_t> fold(isa::AddOp op, std::uint32_t a, std::uint32_t b);
std::optional<std::uint32_t> fold(isa::MulOp op, std::uint32_t a, std::uint32_t b);
bool fold(ir::Test test, std::uint32_t a, std::uint32_t b);

}  // namespace qpu::compiler

#endif
