// The reads, writes and side effects of an instruction.
#ifndef QPU_SRC_ISA_ACCESS_HPP
#define QPU_SRC_ISA_ACCESS_HPP

#include <array>
#include <cstdint>
#include <optional>

#include "isa/instruction.hpp"

namespace qpu::isa {

enum class Pipe : std::uint8_t { Add, Mul };

struct Write {
  Pipe pipe = Pipe::Add;
  std::uint8_t address = 0;
  bool fileA = true;
  bool always = true;  // writes all elements
  bool never = false;  // writes no element, but writes to I/O addresses have side effects

  bool isRegister() const { return address < 32 && !never; }
  bool isAccumulator() const { return !never && (address < 36 || isR5()) && address >= 32; }
  bool isR5() const { return address == address::kR5 && !never; }
  bool isIo() const;  // returns true if the write has side effects
};

// Bits that stand for the parts of the VPM and its DMA engines.
enum VpmSide : std::uint16_t {
  kVpmRead = 1, kVpmWrite = 2, kReadSetup = 4, kWriteSetup = 8, kLoadStart = 16,
  kStoreStart = 32, kLoadBusy = 64, kStoreBusy = 128, kLoadWait = 256, kStoreWait = 512
};

struct Access {
  // Writes by the ALUs, loads and branches, except those to address 39 (nop).
  std::array<Write, 2> write;
  std::size_t writes = 0;

  // The addresses on the read ports, even if the ALUs do not use the values.
  std::optional<std::uint8_t> portA, portB;
  bool takesA = false;  // an ALU or the branch uses the value on port A
  bool takesB = false;
  std::uint8_t accumulators = 0;      // bit n is set if rn is read
  std::uint8_t rotationSources = 0;   // bit n is set if a MUL operation with a rotation reads rn
  bool rotationTakesA = false, rotationTakesB = false;
  bool rotatesByR5 = false;
  bool readsFlags = false;
  bool setsFlags = false;

  bool ends = false;                  // the instruction has the program end signal
  bool loadsR4 = false;               // the instruction has a signal that loads r4
  std::uint16_t vpm = 0;              // VpmSide bits
  // Number of reads that certainly take place, including texture parameters.
  unsigned uniformReads = 0;
  bool varyingRead = false;
  bool mutexRead = false;

  const Write* begin() const { return write.data(); }
  const Write* end() const { return write.data() + writes; }
  bool readsR4() const { return (accumulators & 16U) != 0; }
};

Access accessOf(const Instruction& instruction);

constexpr bool isTmu(std::uint8_t a) { return a >= address::kTmu0S; }
constexpr bool isTmuStart(std::uint8_t a) { return a == address::kTmu0S || a == address::kTmu1S; }
constexpr bool isSfu(std::uint8_t a) { return a >= address::kSfuRecip && a <= address::kSfuLog; }
constexpr std::uint8_t kTlbFirst = 43, kTlbZ = 44, kTlbLast = 47, kVarying = 35, kMsFlags = 42;
constexpr bool isTlb(std::uint8_t a) { return a >= kTlbFirst && a <= kTlbLast; }

bool isFloat(AddOp op);  // returns true if the operation reads its operands as floats
bool isUnary(AddOp op);

}  // namespace qpu::isa

#endif
