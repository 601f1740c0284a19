// Compiles a kernel's source to object code.
#ifndef QPU_SRC_COMPILER_COMPILE_HPP
#define QPU_SRC_COMPILER_COMPILE_HPP

#include "code/object.hpp"
#include "compiler/mir.hpp"
#include "lang/source.hpp"

namespace qpu::compiler {

struct Options {
  // The optimisation level. 0: no optimisation, one operation per instruction, in source order;
  // 1: all optimisations except those of loops and addresses; 2: all optimisations.
  int level = 2;
  // The number of usable registers in each file, 4..32. Tests lower this number to force spilling.
  int fileRegisters = 32;
  // Sets up the VPM write window only once, for all stores, provided that nothing else needs the
  // window. compile() disables this option for kernels that spill.
  bool keepWriteWindow = true;
  // Merges consecutive stores to adjacent addresses into one DMA transfer. compile() disables
  // this option for kernels that spill.
  bool mergeStores = true;
};

// emit() throws SpillsNeeded if a function must spill although it keeps its write window or merges
// its stores.
struct SpillsNeeded {};

// The front end (lower*.cpp, optimise*.cpp, select.cpp) translates the source to optimised
// machine operations on virtual registers.
Function select(const detail::Source& source, const Options& options);

// The back end (spill*.cpp, allocate.cpp, schedule*.cpp, emit.cpp) allocates registers, schedules
// the operations and encodes the instructions.
code::Object emit(Function function, const Options& options);

// Runs the front end and the back end. Throws CompileError if a QPU cannot run the kernel.
code::Object compile(const detail::Source& source, const Options& options = {});

}  // namespace qpu::compiler

#endif
