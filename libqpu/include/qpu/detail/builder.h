// The interface between the C++ classes of the kernel language and the library. While a kernel is
// recorded, each of its operators and statements calls one of the functions below. Kernels do not
// call these functions directly.
#ifndef QPU_DETAIL_BUILDER_H
#define QPU_DETAIL_BUILDER_H

#include <cstddef>
#include <cstdint>

#include "qpu/cycles.h"
#include "qpu/detail/export.h"
#include "qpu/location.h"

namespace qpu {
namespace detail {

// The type of a vector of 16 elements. A Mask has one boolean per element. A Scalar is one
// boolean for the whole vector.
enum class Type : std::uint8_t { Int, Float, Address, Mask, Scalar };

enum class Op : std::uint8_t {
  // leaves: expressions without operands
  Constant, Variable, ElementNumber, QpuNumber, QpuCount, VpmRead,
  // operations on Int, named after the operations of the ADD and MUL pipes
  Add, Sub, Mul24, Min, Max, Shl, Asr, Shr, Ror, And, Or, Xor, Not,
  // operations on Float
  FAdd, FSub, FMul, FMin, FMax, FMaxAbs, ItoF, FtoI,
  // operations on Float that the special function unit computes; accurate to about 3e-5
  Recip, RecipSqrt, Exp2, Log2,
  // operations on any type; Broadcast copies one element of operand a to all elements, and operand
  // b is the number of this element (a Constant, 0..15)
  Rotate, Broadcast, Load,
  // comparisons, per element
  Eq, Ne, Lt, Le, Gt, Ge, FEq, FNe, FLt, FLe, FGt, FGe,
  // operations on masks, and conversions from masks to scalars
  MaskAnd, MaskOr, MaskNot, Any, All
};

enum class Direction : std::uint8_t { Horizontal, Vertical };

// A node of the kernel that is being recorded. `trace` is the recording's serial number, which is
// used to detect vectors that outlive their kernel.
struct Node {
  std::uint32_t trace;
  std::uint32_t id;
};

QPU_API Node constantInt(std::int32_t value);
// Truncates toward zero. Throws CompileError if the number is outside -2^31..2^32 - 1.
QPU_API Node constantIntOf(double value);
QPU_API Node constantFloat(float value);
QPU_API Node leaf(Op op, Type type);
QPU_API Node unary(Op op, Type type, Node a);
QPU_API Node binary(Op op, Type type, Node a, Node b);
QPU_API Node load(Node address, Type type);
QPU_API Node broadcast(Type type, Node a, int element, Location where);

QPU_API Node declare(Type type, Location where);
// Returns the variable that is initialised with parameter number `position` of the kernel.
QPU_API Node parameter(std::size_t position);

QPU_API void assign(Node variable, Node value, Location where);
// If `wait` is true, the QPU continues only after the words have been written to memory.
QPU_API void store(Node value, Node address, bool wait, Location where);
// Set the number of elements in memory that the kernel's later loads or stores skip between two
// elements of a vector.
QPU_API void readStride(int elements, Location where);
QPU_API void writeStride(int elements, Location where);
// Stores only the first `words` words of the vector, and does not wait until they are written.
QPU_API void storeFirst(Node value, Node address, Node words, Location where);
QPU_API void gather(Node address, Type element, Location where);
QPU_API void receive(Node variable, Location where);

QPU_API void beginIf(Node condition, Location where);
QPU_API void beginWhile(Node condition, Location where);
QPU_API void beginFor(Node condition, Location where);
QPU_API void beginForBody();
QPU_API void beginWhere(Node mask, Location where);
QPU_API void beginElse(Location where);
QPU_API void end(Location where);

QPU_API void printText(const char* text, Location where);
QPU_API void printVector(Node value, Type type, Location where);

QPU_API void semaphoreRelease(int number, Location where);
QPU_API void semaphoreAcquire(int number, Location where);

QPU_API void dmaReadPitch(Node bytes, Location where);
QPU_API void dmaReadSetup(Direction direction, int rows, Node address, int rowLength, int vpmPitch,
                          Location where);
QPU_API void dmaReadStart(Node address, Location where);
QPU_API void dmaReadWait(Location where);
QPU_API void dmaWriteStride(Node bytes, Location where);
QPU_API void dmaWriteSetup(Direction direction, int rows, Node address, int rowLength,
                           Location where);
QPU_API void dmaWriteStart(Node address, Location where);
QPU_API void dmaWriteWait(Location where);
QPU_API void vpmReadSetup(Direction direction, int vectors, Node address, int stride,
                          Location where);
QPU_API void vpmWriteSetup(Direction direction, Node address, int stride, Location where);
QPU_API void vpmWrite(Node value, Location where);

// A compiled kernel. The program is immutable, and all copies of a Kernel object share it.
class Program;
QPU_API void releaseProgram(const Program* program) noexcept;

class Recorder;

// Represents one call to compile(). Every construct of the language that this thread executes
// between the constructor and finish() is recorded.
class QPU_API Trace {
 public:
  // If `name` is null, the kernel's name is derived from `function`, which can also be null.
  Trace(const char* name, const void* function, const Type* parameters, std::size_t count);
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;
  ~Trace();

  // Checks and compiles the recorded kernel. The caller owns the result.
  const Program* finish();

 private:
  Recorder* recorder_;
};

QPU_API const char* programName(const Program& program) noexcept;
QPU_API Cycles programCycles(const Program& program);
// The caller must free the result with freeText().
QPU_API char* programListing(const Program& program);
QPU_API void freeText(char* text) noexcept;
QPU_API void saveProgram(const Program& program, const char* path);

// Throws ArgumentError unless 1 <= n <= 12.
QPU_API void requireQpuCount(const Program& program, int n);

// Runs `program` on `qpus` QPUs. `uniforms` contains one 32-bit word per parameter. If `profile`
// is true, the emulator counts executions and stalls for each instruction.
QPU_API void launch(const Program& program, int qpus, const std::uint32_t* uniforms,
                    std::size_t count, bool profile);

}  // namespace detail
}  // namespace qpu

#endif
