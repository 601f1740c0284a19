// Places of vectors in a QPU, and the registers of those that live across blocks.
#ifndef QPU_SRC_COMPILER_ALLOCATE_HPP
#define QPU_SRC_COMPILER_ALLOCATE_HPP

#include <cstdint>
#include <vector>

#include "compiler/compile.hpp"
#include "compiler/liveness.hpp"

namespace qpu::compiler {

// 0..31 are ra0..ra31, 32..63 rb0..rb31, then r0..r5.
using Place = std::uint8_t;
constexpr Place kFileB = 32;
constexpr Place kR0 = 64;
constexpr Place kR4 = 68;
constexpr Place kR5 = 69;
constexpr Place kPlaces = 70;
constexpr Place kNowhere = 255;

constexpr bool isFileA(Place p) { return p < kFileB; }
constexpr bool isFileB(Place p) { return p >= kFileB && p < kR0; }
constexpr bool isFile(Place p) { return p < kR0; }
constexpr bool isAccumulator(Place p) { return p >= kR0 && p < kR4; }

// The bit of a register in the mask of its file.
constexpr std::uint32_t registerBit(Place p) { return 1U << (p % kFileB); }

// The home of each of `live.globals` in a file: where it is at both ends of
// every block that it crosses. Empty when the registers do not suffice.
std::vector<Place> findHomes(const Function& function, const Liveness& live, int fileRegisters);

}  // namespace qpu::compiler

#endif
