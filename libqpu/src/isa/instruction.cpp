#include "isa/instruction.hpp"

#include <tuple>

namespace qpu::isa {
namespace {

struct Field {
  unsigned low;
  unsigned bits;
};

constexpr Field kSignal{60, 4}, kUnpack{57, 3}, kPm{56, 1}, kPack{52, 4}, kCondAdd{49, 3},
    kCondMul{46, 3}, kSetFlags{45, 1}, kSwap{44, 1}, kWaddrAdd{38, 6}, kWaddrMul{32, 6},
    kOpMul{29, 3}, kOpAdd{24, 5}, kRaddrA{18, 6}, kRaddrB{12, 6}, kAddA{9, 3}, kAddB{6, 3},
    kMulA{3, 3}, kMulB{0, 3}, kImmediate{0, 32};
constexpr Field kBranchZero{56, 4}, kBranchCond{52, 4}, kBranchRelative{51, 1},
    kBranchRegister{50, 1}, kBranchRegisterA{45, 5};

// The values of bits 59:57 for signal 14.
constexpr unsigned kModeAll = 0, kModeSigned = 1, kModeUnsigned = 3, kModeSemaphore = 4;

constexpr Word mask(Field f) { return (Word{1} << f.bits) - 1; }

template <class T>
Word put(Field f, T value) {
  return (static_cast<Word>(value) & mask(f)) << f.low;
}

template <class T>
T get(Word word, Field f) {
  return static_cast<T>((word >> f.low) & mask(f));
}

bool isOperation(unsigned op) {
  return op <= static_cast<unsigned>(AddOp::ItoF) ||
         (op >= static_cast<unsigned>(AddOp::Add) && op <= static_cast<unsigned>(AddOp::Clz)) ||
         op >= static_cast<unsigned>(AddOp::V8AddS);
}

bool isBranchCondition(unsigned cond) {
  return cond <= static_cast<unsigned>(BranchCond::AnyCClear) ||
         cond == static_cast<unsigned>(BranchCond::Always);
}

// Encodes the fields that all forms have.
Word encodeWrites(const Instruction& i) {
  return put(kSwap, i.swap) | put(kWaddrAdd, i.waddrAdd) | put(kWaddrMul, i.waddrMul);
}

void decodeWrites(Word word, Instruction& i) {
  i.swap = get<bool>(word, kSwap);
  i.waddrAdd = get<std::uint8_t>(word, kWaddrAdd);
  i.waddrMul = get<std::uint8_t>(word, kWaddrMul);
}

// Encodes the fields that all forms except branches have.
Word encodeResults(const Instruction& i) {
  return encodeWrites(i) | put(kPm, i.pm) | put(kPack, i.pack) | put(kCondAdd, i.condAdd) |
         put(kCondMul, i.condMul) | put(kSetFlags, i.setFlags);
}

void decodeResults(Word word, Instruction& i) {
  decodeWrites(word, i);
  i.pm = get<bool>(word, kPm);
  i.pack = get<std::uint8_t>(word, kPack);
  i.condAdd = get<Cond>(word, kCondAdd);
  i.condMul = get<Cond>(word, kCondMul);
  i.setFlags = get<bool>(word, kSetFlags);
}

Word encodeAlu(const Instruction& i) {
  return encodeResults(i) | put(kSignal, i.signal) | put(kUnpack, i.unpack) |
         put(kOpMul, i.opMul) | put(kOpAdd, i.opAdd) | put(kRaddrA, i.raddrA) |
         put(kRaddrB, i.raddrB) | put(kAddA, i.addA) | put(kAddB, i.addB) | put(kMulA, i.mulA) |
         put(kMulB, i.mulB);
}

Word encodeBranch(const Instruction& i) {
  return encodeWrites(i) | put(kSignal, Signal::Branch) | put(kBranchCond, i.branchCond) |
         put(kBranchRelative, i.branchRelative) | put(kBranchRegister, i.branchRegister) |
         put(kBranchRegisterA, i.branchRegisterA) | put(kImmediate, i.immediate);
}

Word encodeImmediate(const Instruction& i, unsigned mode) {
  return encodeResults(i) | put(kSignal, Signal::LoadImmediate) | put(kUnpack, mode) |
         put(kImmediate, i.immediate);
}

std::optional<Instruction> decodeAlu(Word word) {
  if (!isOperation(get<unsigned>(word, kOpAdd))) return {};
  Instruction i;
  decodeResults(word, i);
  i.signal = get<Signal>(word, kSignal);
  i.unpack = get<std::uint8_t>(word, kUnpack);
  i.opMul = get<MulOp>(word, kOpMul);
  i.opAdd = get<AddOp>(word, kOpAdd);
  i.raddrA = get<std::uint8_t>(word, kRaddrA);
  i.raddrB = get<std::uint8_t>(word, kRaddrB);
  i.addA = get<Mux>(word, kAddA);
  i.addB = get<Mux>(word, kAddB);
  i.mulA = get<Mux>(word, kMulA);
  i.mulB = get<Mux>(word, kMulB);
  return i;
}

std::optional<Instruction> decodeBranch(Word word) {
  if (get<unsigned>(word, kBranchZero) != 0) return {};
  if (!isBranchCondition(get<unsigned>(word, kBranchCond))) return {};
  Instruction i;
  i.form = Form::Branch;
  decodeWrites(word, i);
  i.branchCond = get<BranchCond>(word, kBranchCond);
  i.branchRelative = get<bool>(word, kBranchRelative);
  i.branchRegister = get<bool>(word, kBranchRegister);
  i.branchRegisterA = get<std::uint8_t>(word, kBranchRegisterA);
  i.immediate = get<std::uint32_t>(word, kImmediate);
  return i;
}

std::optional<Instruction> decodeImmediate(Word word) {
  Instruction i;
  switch (get<unsigned>(word, kUnpack)) {
    case kModeAll: i.form = Form::LoadImmediate; break;
    case kModeSigned: i.form = Form::LoadPerElementSigned; break;
    case kModeUnsigned: i.form = Form::LoadPerElementUnsigned; break;
    case kModeSemaphore: i.form = Form::Semaphore; break;
    default: return {};
  }
  decodeResults(word, i);
  i.immediate = get<std::uint32_t>(word, kImmediate);
  return i;
}

auto fields(const Instruction& i) {
  return std::tie(i.form, i.signal, i.unpack, i.pm, i.pack, i.condAdd, i.condMul, i.setFlags,
                  i.swap, i.waddrAdd, i.waddrMul, i.opAdd, i.opMul, i.raddrA, i.raddrB, i.addA,
                  i.addB, i.mulA, i.mulB, i.immediate, i.branchCond, i.branchRelative,
                  i.branchRegister, i.branchRegisterA);
}

}  // namespace

bool Instruction::operator==(const Instruction& other) const {
  return fields(*this) == fields(other);
}

Word encode(const Instruction& instruction) {
  switch (instruction.form) {
    case Form::Alu: return encodeAlu(instruction);
    case Form::Branch: return encodeBranch(instruction);
    case Form::LoadImmediate: return encodeImmediate(instruction, kModeAll);
    case Form::LoadPerElementSigned: return encodeImmediate(instruction, kModeSigned);
    case Form::LoadPerElementUnsigned: return encodeImmediate(instruction, kModeUnsigned);
    case Form::Semaphore: return encodeImmediate(instruction, kModeSemaphore);
  }
  return 0;
}

std::optional<Instruction> decode(Word word) {
  switch (get<Signal>(word, kSignal)) {
    case Signal::Branch: return decodeBranch(word);
    case Signal::LoadImmediate: return decodeImmediate(word);
    default: return decodeAlu(word);
  }
}

std::uint32_t smallImmediate(std::uint8_t code) {
  constexpr std::uint32_t kOne = 0x3f800000U, kStep = 0x00800000U, kSmallest = 0x3b800000U;
  code &= 63U;
  if (code < 16) return code;
  if (code < 32) return code - 32U;
  if (code < 40) return kOne + (code - 32U) * kStep;
  if (code < 48) return kSmallest + (code - 40U) * kStep;
  return code - 64U;
}

std::optional<std::uint8_t> smallImmediateCode(std::uint32_t bits) {
  for (std::uint8_t code = 0; code < 48; ++code)
    if (smallImmediate(code) == bits) return code;
  return {};
}

}  // namespace qpu::isa
