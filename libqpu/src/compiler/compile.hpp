// Source to object code.
#ifndef QPU_SRC_COMPILER_COMPILE_HPP
#define QPU_SRC_COMPILER_COMPILE_HPP

#include "code/object.hpp"
#include "compiler/mir.hpp"
#include "lang/source.hpp"

namespace qpu::compiler {

struct Options {
  // 0: no optimisation, one operation per instruction, in source order;
  // 1: no loop or address optimisation; 2: everything.
  int level = 2;
  // Registers of each file that may be used, for tests of spilling; 4..32.
  int fileRegisters = 32;
  // The VPM write window is set up once for all stores, if nothing else needs it.
  // compile() does without for kernels that spill.
  bool keepWriteWindow = true;
  // Stores to neighbouring places, one after the other, become one DMA. compile()
  // does without for kernels that spill.
  bool mergeStores = true;
};

// What emit() throws when a function that keeps its write window, or merges stores,
// has to spill.
struct SpillsNeeded {};

// Front half (lower.cpp, optimise*.cpp): source to optimised machine operations
// over virtual registers.
Function select(const detail::Source& source, const Options& options);

// Back half (schedule*.cpp, allocate*.cpp, emit.cpp): registers, dual issue,
// delay slots, hazards, words.
code::Object emit(Function function, const Options& options);

// Both. Throws CompileError for what no QPU can run.
code::Object compile(const detail::Source& source, const Options& options = {});

}  // namespace qpu::compiler

#endif
