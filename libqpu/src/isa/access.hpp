// Reads, writes and side effects of an instruction.
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
  bool always = true;  // in all elements
  bool never = false;  // in no element; an I/O address is triggered nevertheless

  bool isRegister() const { return address < 32 && !never; }
  bool isAccumulator() const { return !never && (address < 36 || isR5()) && address >= 32; }
  bool isR5() const { return address == address::kR5 && !never; }
  bool isIo() const;  // has side effects
};

// Parts of the VPM and its DMA, as bits.
enum VpmSide : std::uint16_t {
  kVpmRead = 1, kVpmWrite = 2, kReadSetup = 4, kWriteSetup = 8, kLoadStart = 16,
  kStoreStart = 32, kLoadBusy = 64, kStoreBusy = 128, kLoadWait = 256, kStoreWait = 512
};

struct Access {
  // Writes of ALUs, loads and branches, except to address 39.
  std::array<Write, 2> write;
  std::size_t writes = 0;

  // Addresses on the read ports, even if the ALUs do not use the value.
  std::optional<std::uint8_t> portA, portB;
  bool takesA = false;  // an ALU or the branch uses the value
  bool takesB = false;
  std::uint8_t accumulators = 0;      // bit n: rn is read
  std::uint8_t rotationSources = 0;   // bit n: a MUL operation with rotation reads rn
  bool rotationTakesA = false, rotationTakesB = false;
  bool rotatesByR5 = false;
  bool readsFlags = false;
  bool setsFlags = false;

  bool ends = false;                  // has the program end signal
  bool loadsR4 = false;               // has a signal that loads r4
  std::uint16_t vpm = 0;              // VpmSide
  unsigned uniformReads = 0;          // certain reads, including texture parameters
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

bool isFloat(AddOp op);  // reads its inputs as floats
bool isUnary(AddOp op);

}  // namespace qpu::isa

#endif
