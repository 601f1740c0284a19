// The interface between the C++ classes of the language and the library. Each operator
// and statement of a kernel that is being recorded calls one of these functions. Kernels
// do not call them directly.
#ifndef QPU_DETAIL_BUILDER_H
#define QPU_DETAIL_BUILDER_H

#include <cstddef>
#include <cstdint>

#include "qpu/cycles.h"
#include "qpu/detail/export.h"
#include "qpu/location.h"

namespace qpu {
namespace detail {

// Type of a vector of 16 elements. Mask: a boolean per element; Scalar: one
// boolean for the whole vector.
enum class Type : std::uint8_t { Int, Float, Address, Mask, Scalar };

enum class Op : std::uint8_t {
  // leaves
  Constant, Variable, ElementNumber, QpuNumber, QpuCount, VpmRead,
  // Int; named after the operations of the ADD and MUL pipes
  Add, Sub, Mul24, Min, Max, Shl, Asr, Shr, Ror, And, Or, Xor, Not,
  // Float
  FAdd, FSub, FMul, FMin, FMax, FMaxAbs, ItoF, FtoI,
  // Float, computed by the special function unit; accurate to about 3e-5
  Recip, RecipSqrt, Exp2, Log2,
  // any type; Broadcast: element b (a Constant, 0..15) of a in all elements
  Rotate, Broadcast, Load,
  // comparisons, per element
  Eq, Ne, Lt, Le, Gt, Ge, FEq, FNe, FLt, FLe, FGt, FGe,
  // masks and scalars
  MaskAnd, MaskOr, MaskNot, Any, All
};

enum class Direction : std::uint8_t { Horizontal, Vertical };

// A node of the kernel being recorded. The trace's serial number is used to detect vectors that
// outlive their kernel.
struct Node {
  std::uint32_t trace;
  std::uint32_t id;
};

QPU_API Node constantInt(std::int32_t value);
// Truncates toward zero. Throws CompileError for numbers outside -2^31..2^32 - 1.
QPU_API Node constantIntOf(double value);
QPU_API Node constantFloat(float value);
QPU_API Node leaf(Op op, Type type);
QPU_API Node unary(Op op, Type type, Node a);
QPU_API Node binary(Op op, Type type, Node a, Node b);
QPU_API Node load(Node address, Type type);
QPU_API Node broadcast(Type type, Node a, int element, Location where);

QPU_API Node declare(Type type, Location where);
// Variable that contains kernel parameter `position` when the kernel starts.
QPU_API Node parameter(std::size_t position);

QPU_API void assign(Node variable, Node value, Location where);
// If `wait` is set, the QPU continues only after the words are in memory.
QPU_API void store(Node value, Node address, bool wait, Location where);
// Sets the number of elements that the kernel's later loads and stores skip between two elements.
QPU_API void readStride(int elements, Location where);
QPU_API void writeStride(int elements, Location where);
// Stores only the first `words` words, without waiting.
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

// A compiled kernel: immutable, and shared by all copies of its Kernel object.
class Program;
QPU_API void releaseProgram(const Program* program) noexcept;

class Recorder;

// One call to compile(): records on this thread from construction to finish().
class QPU_API Trace {
 public:
  // `name` can be null; then `function`, which can also be null, determines the name.
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
// Free the result with freeText().
QPU_API char* programListing(const Program& program);
QPU_API void freeText(char* text) noexcept;
QPU_API void saveProgram(const Program& program, const char* path);

// Throws ArgumentError unless 1 <= n <= 12.
QPU_API void requireQpuCount(const Program& program, int n);

// Runs `program` on `qpus` QPUs with one 32-bit word per parameter. `profile` enables
// per-instruction counters on the emulator.
QPU_API void launch(const Program& program, int qpus, const std::uint32_t* uniforms,
                    std::size_t count, bool profile);

}  // namespace detail
}  // namespace qpu

#endif
