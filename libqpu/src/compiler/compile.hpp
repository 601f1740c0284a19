// Compiles the source of a kernel to object code.
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
  // Number of usable registers in each file, 4..32. Used to test spilling.
  int fileRegisters = 32;
  // Sets up the VPM write window once for all stores, if nothing else needs the window. compile()
  // disables it for kernels that spill.
  bool keepWriteWindow = true;
  // Merges consecutive stores to adjacent addresses into one DMA transfer. compile() disables it
  // for kernels that spill.
  bool mergeStores = true;
};

// Thrown by emit() if a function that keeps its write window or merges stores must spill.
struct SpillsNeeded {};

// Front end (lower*.cpp, optimise*.cpp, select.cpp): source to optimised machine operations on virtual registers.
Function select(const detail::Source& source, const Options& options);

// Back end (spill*.cpp, allocate.cpp, schedule*.cpp, emit.cpp): register allocation, scheduling and encoding.
code::Object emit(Function function, const Options& options);

// Runs both parts of the compiler. Throws CompileError for a kernel that a QPU cannot run.
code::Object compile(const detail::Source& source, const Options& options = {});

}  // namespace qpu::compiler

#endif
