// Register allocation for vectors that are live across blocks. The scheduler assigns registers to
// all other vectors.
//
// The algorithm is greedy graph colouring in order of priority. Reference: Fred C. Chow and John L.
// Hennessy, "The Priority-Based Coloring Approach to Register Allocation", 1990. Live ranges are
// sets of complete blocks.
#ifndef QPU_SRC_COMPILER_ALLOCATE_HPP
#define QPU_SRC_COMPILER_ALLOCATE_HPP

#include <cstdint>
#include <vector>

#include "compiler/compile.hpp"
#include "compiler/liveness.hpp"

namespace qpu::compiler {

// A register of the QPU: 0..31 are ra0..ra31, 32..63 are rb0..rb31, and the following numbers are
// r0..r5.
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

// Returns the register's bit in the bit mask of its file.
constexpr std::uint32_t registerBit(Place p) { return 1U << (p % kFileB); }

// Returns the home register of each vector in `live.globals`. The home register, in file A or B,
// holds the vector at every block boundary at which the vector is live. Returns an empty list if
// there are not enough registers.
std::vector<Place> findHomes(const Function& function, const Liveness& live, int fileRegisters);

}  // namespace qpu::compiler

#endif
