#include "emu/program.hpp"

#include <algorithm>
#include <map>
#include <string>

#include "error_facts.hpp"

namespace qpu::emu {
namespace {

using isa::AddOp;
using isa::Cond;
using isa::Form;
using isa::Instruction;
using isa::MulOp;
using isa::Mux;
using isa::Signal;
namespace address = isa::address;

constexpr std::uint8_t kFirstIo = 32;
constexpr std::uint8_t kVarying = 35;
constexpr std::uint8_t kRotateByR5 = 48;
constexpr std::uint32_t kInstructionsPerLine = 8;
constexpr std::uint32_t kWordBytes = 8;
constexpr std::uint32_t kEndReserved = 1U << 14U;  // bit 14, for ra14 and rb14
constexpr std::uint32_t kNoTarget = UINT32_MAX;
// Registers, accumulators and flags are undefined at the start. The emulator initialises them to
// this arbitrary value, so that a kernel that depends on undefined values is likely to fail.
constexpr std::uint32_t kUndefined = 0xdeadbeefU;

bool isRotation(const Instruction& i) {
  return i.form == Form::Alu && i.signal == Signal::SmallImmediate && i.raddrB >= kRotateByR5 &&
         i.opMul != MulOp::Nop;
}

bool isTmu(unsigned a) { return a >= address::kTmu0S; }
bool isSfu(unsigned a) { return a >= address::kSfuRecip && a <= address::kSfuLog; }
bool isVpm(unsigned a) { return a >= address::kVpm && a <= address::kDmaAddress; }

// Returns true if a user program can write to this address. The addresses of registers and
// accumulators are not included.
bool canWrite(unsigned a) {
  return (a >= address::kTmuNoSwap && a <= address::kUniformsAddress) || a >= address::kVpm;
}

// Returns true if both pipes write to the same accumulator or peripheral.
bool bothWriteOne(const Instruction& i) {
  if (i.form == Form::Branch) return false;
  if (i.form == Form::Alu && (i.opAdd == AddOp::Nop || i.opMul == MulOp::Nop)) return false;
  if (i.waddrAdd != i.waddrMul) return false;
  if (i.waddrAdd < kFirstIo || i.waddrAdd == address::kNop) return false;
  if (i.condAdd == Cond::Never || i.condMul == Cond::Never) return false;
  // At these addresses, the two files have different peripherals.
  return i.waddrAdd != address::kVpmSetup && i.waddrAdd != address::kDmaAddress;
}

struct Reads {
  bool a = false, b = false;
  std::uint32_t accumulators = 0;
  void add(Mux m) {
    if (m == Mux::A)
      a = true;
    else if (m == Mux::B)
      b = true;
    else
      accumulators |= 1U << static_cast<unsigned>(m);
  }
};

Reads addReads(const Instruction& i) {
  Reads r;
  if (i.opAdd == AddOp::Nop) return r;
  r.add(i.addA);
  if (readsB(i.opAdd)) r.add(i.addB);
  return r;
}
Reads mulReads(const Instruction& i) {
  Reads r;
  if (i.opMul == MulOp::Nop) return r;
  r.add(i.mulA);
  r.add(i.mulB);
  return r;
}

class Inspector {
 public:
  explicit Inspector(const Instruction& i) : i_(i) {
    switch (i.form) {
      case Form::Branch: branch(); break;
      case Form::Alu:
        alu();
        results();
        break;
      case Form::Semaphore:
        ++exclusive_;
        results();
        break;
      default: results(); break;
    }
    if (exclusive_ > 1)
      fault("one instruction contains more than one of these: TMU write, TMU load, SFU write, mutex "
            "acquire, semaphore");
    const bool readAndWrite = vpmReads_ == 1 && vpmWrites_ == 1 && vpmOthers_ == 0;
    if (vpmReads_ + vpmWrites_ + vpmOthers_ > 1 && !readAndWrite)
      fault("only VPM_READ and VPM_WRITE can be combined in one instruction");
    if (t_.touchesVpm && t_.loadsR4 && !t_.writesSfu)
      fault("a TMU load and an access to the VPM or its DMA are in one instruction");
    if (t_.ends) {
      if ((t_.writesA | t_.writesB) != 0)
        fault("the instruction with the program end writes a register of file A or B");
    }
  }

  Traits traits() const { return t_; }

 private:
  void fault(const char* rule) {
    if (t_.fault == nullptr) t_.fault = rule;
  }

  void branch() {
    t_.branches = true;
    if (i_.branchRegister) t_.readsA |= 1U << i_.branchRegisterA;
    written(addWritesA(i_), i_.waddrAdd, true);
    written(mulWritesA(i_), i_.waddrMul, true);
    for (const std::uint8_t a : {i_.waddrAdd, i_.waddrMul})
      if (a >= address::kTmuNoSwap && a != address::kNop)
        fault("a branch writes its link to a peripheral");
  }

  void alu() {
    const Reads add = addReads(i_);
    const Reads mul = mulReads(i_);
    const bool immediate = i_.signal == Signal::SmallImmediate;
    t_.accumulatorsRead = add.accumulators | mul.accumulators;
    port(i_.raddrA, add.a || mul.a, t_.readsA);
    if (!immediate) port(i_.raddrB, add.b || mul.b, t_.readsB);
    if (!immediate && i_.raddrA == i_.raddrB &&
        (i_.raddrA == address::kUniform || i_.raddrA == address::kVpm ||
         i_.raddrA == address::kMutex))
      fault("both ports read the same peripheral; whether this reads one value or two is not documented");
    if (i_.unpack != 0 && !i_.pm && i_.raddrA >= kFirstIo && (add.a || mul.a))
      fault("the value of a peripheral is unpacked");
    if (isRotation(i_)) {
      constexpr std::uint32_t rotatable = 0x2f;  // r0..r3, r5
      t_.rotated = mul.accumulators & rotatable;
      t_.rotatesByR5 = i_.raddrB == kRotateByR5;
    }
    switch (i_.signal) {
      case Signal::None:
      case Signal::SmallImmediate: break;
      case Signal::End: t_.ends = true; break;
      case Signal::LoadTmu0:
      case Signal::LoadTmu1:
        t_.loadsR4 = true;
        ++exclusive_;
        break;
      default: fault("the signal is not available to user programs");
    }
  }

  void port(std::uint8_t a, bool consumed, std::uint32_t& registers) {
    if (a < kFirstIo) {
      if (consumed) registers |= 1U << a;
      return;
    }
    switch (a) {
      case address::kUniform: t_.readsUniform = true; return;
      case address::kNop:  // the value on this port is unknown
      case address::kElementNumber: return;
      case address::kVpm:
        ++vpmReads_;
        t_.touchesVpm = true;
        return;
      case address::kDmaBusy:
      case address::kDmaWait:
        ++vpmOthers_;
        t_.touchesVpm = true;
        return;
      case address::kMutex: ++exclusive_; return;
      case kVarying: t_.readsVarying = true; [[fallthrough]];
      default: fault("the read address is not available to user programs");
    }
  }

  void results() {
    const bool alu = i_.form == Form::Alu;
    const bool packsA = i_.pack != 0 && !i_.pm;
    if (i_.pack != 0 && i_.pm) {
      constexpr unsigned reserved = 0xff06;  // bits for modes 1, 2 and 8..15
      if ((reserved >> i_.pack & 1U) != 0) fault("the pack mode is reserved");
    }
    if (!alu || i_.opAdd != AddOp::Nop)
      result(addWritesA(i_), i_.waddrAdd, i_.condAdd, packsA && addWritesA(i_));
    if (!alu || i_.opMul != MulOp::Nop)
      result(mulWritesA(i_), i_.waddrMul, i_.condMul,
             i_.pack != 0 && (i_.pm || mulWritesA(i_)));
    // Writing equal values is harmless. With r5 or packing, however, the values can differ even if
    // the operands are equal.
    if (bothWriteOne(i_) && (i_.waddrAdd == address::kR5 || i_.pack != 0))
      fault("both ALUs write the same accumulator or peripheral");
  }

  void result(bool fileA, std::uint8_t a, Cond cond, bool packs) {
    const bool io = a >= address::kTmuNoSwap && a != address::kR5 && a != address::kNop;
    if (io && a != address::kHostInterrupt && cond != Cond::Always)
      fault("a peripheral is written under a condition, but the condition has no effect");
    if (io && !canWrite(a)) fault("the write address is not available to user programs");
    if (packs && cond != Cond::Never && a != address::kNop &&
        (io || (!i_.pm && a >= kFirstIo)))
      fault("a value that is written to an accumulator or a peripheral is packed");
    written(fileA, a, cond != Cond::Never);
    if (isTmu(a)) {
      t_.writesTmu = true;
      ++exclusive_;
      if (a != address::kTmu0S && a != address::kTmu1S)
        fault("a write to T, R or B of a TMU turns the request into a texture request");
    }
    if (isSfu(a)) {
      t_.writesSfu = true;
      t_.loadsR4 = true;
      ++exclusive_;
    }
    if (isVpm(a)) {
      t_.touchesVpm = true;
      ++(a == address::kVpm ? vpmWrites_ : vpmOthers_);
    }
    if (a == address::kTmuNoSwap) t_.writesNoSwap = true;
    if (a == address::kUniformsAddress) t_.writesUniformsAddress = true;
  }

  void written(bool fileA, std::uint8_t a, bool happens) {
    if (!happens) return;
    if (a < kFirstIo)
      (fileA ? t_.writesA : t_.writesB) |= 1U << a;
    else if (a < address::kTmuNoSwap)
      t_.accumulatorsWritten |= 1U << (a - kFirstIo);
    else if (a == address::kR5)
      t_.accumulatorsWritten |= 1U << 5U;
  }

  const Instruction& i_;
  Traits t_;
  int exclusive_ = 0, vpmReads_ = 0, vpmWrites_ = 0, vpmOthers_ = 0;
};

// Returns the rule that instruction `later` breaks if it executes `distance` instructions after
// `earlier`, or null if no rule is broken.
const char* broken(const Traits& earlier, const Traits& later, std::uint32_t distance) {
  if (distance == 1) {
    if ((earlier.writesA & later.readsA) != 0 || (earlier.writesB & later.readsB) != 0)
      return "a register of file A or B is read in the instruction after the one that writes it";
  }
  if (distance <= 2) {
    if (earlier.writesSfu) {
      if ((later.accumulatorsRead >> 4U & 1U) != 0)
        return "r4 is read within two instructions after an SFU write, before it contains the result";
      if (later.loadsR4)
        return "r4 is loaded within two instructions after an SFU write, before it contains the "
               "result";
    }
    if (earlier.writesNoSwap && later.writesTmu)
      return "a TMU is written less than three instructions after TMU_NOSWAP";
    if (earlier.writesUniformsAddress && later.readsUniform)
      return "a uniform is read less than three instructions after UNIFORMS_ADDRESS is written";
    if (earlier.ends) {
      if (later.branches || later.ends)
        return "a branch or a program end is in the two instructions after a program end";
      if (later.readsUniform || later.readsVarying)
        return "a uniform is read in the last three instructions";
      if (later.touchesVpm) return "the VPM or its DMA is accessed in the last three instructions";
      if (((later.readsA | later.readsB | later.writesA | later.writesB) & kEndReserved) != 0)
        return "ra14 or rb14 is used in the last three instructions";
    }
  }
  if (earlier.branches) {
    if (later.branches) return "a branch is in the delay slots of a branch";
    if (later.ends) return "a program end is in the delay slots of a branch";
  }
  return nullptr;
}

const char* brokenAlone(const Traits& t) {
  if (t.fault != nullptr) return t.fault;
  if (!t.ends) return nullptr;
  Traits end;
  end.ends = true;
  Traits self = t;
  self.ends = false;
  return broken(end, self, 2);
}

// Maximum distance between the two instructions that a rule concerns.
constexpr std::uint32_t kLongest = 3;

class Preparation {
 public:
  explicit Preparation(Program& program) : program_(program) {}

  void run() {
    const auto& all = program_.instructions;
    for (std::uint32_t at = 0; at < program_.count(); ++at) {
      const Instruction& i = all[at];
      Op& op = program_.ops[at];
      if (at % kInstructionsPerLine == 0) op.before |= need::kLine;
      switch (i.form) {
        case Form::Branch: branch(i, at, op); break;
        case Form::Alu: alu(i, op); break;
        default: immediate(i, op); break;
      }
      results(i, op);
      if (bothWriteOne(i)) op.after |= need::kBothWrite;
      rotations(i, at);
      if (i.form == Form::Semaphore) op.before |= need::kSemaphore | need::kOrder;
      if (i.form == Form::Branch)
        mark(at, 3, need::kSlot);
      else if (i.form == Form::Alu && i.signal == Signal::End)
        mark(at, 2, need::kLast);
    }
  }

  // Returns the number of a constant vector, whose elements can differ from each other.
  std::uint16_t constant(const Vector& v) {
    const auto known = constants_.find(v.e);
    if (known != constants_.end()) return known->second;
    const std::size_t number = program_.vectors.size();
    if (number > UINT16_MAX)
      detail::raise<ExecutionError>("the program has more than " +
                                    std::to_string(number - slot::kConstants) +
                                    " different constants, the limit of the emulator");
    program_.vectors.push_back(v);
    constants_.emplace(v.e, static_cast<std::uint16_t>(number));
    return static_cast<std::uint16_t>(number);
  }

 private:
  void mark(std::uint32_t at, std::uint32_t distance, std::uint16_t what) {
    if (at + distance < program_.count()) program_.ops[at + distance].after |= what;
  }

  // Marks rotations that can execute directly after a write to their operand, even across a jump.
  void rotations(const Instruction& i, std::uint32_t at) {
    const std::vector<Traits>& traits = program_.traits;
    if (at > 0 && rotatedTooSoon(traits[at - 1], traits[at]) != 0) {
      program_.ops[at - 1].after |= need::kKeepOld;
      program_.ops[at].before |= need::kRotatesNew;
    }
    const std::uint32_t last = at + 3;  // the last delay slot
    if (i.form == Form::Branch && last < program_.count() &&
        traits[last].accumulatorsWritten != 0)
      program_.ops[last].after |= need::kKeepOld;
  }

  std::uint16_t operand(const Instruction& i, Mux mux) {
    const std::uint8_t from = mux == Mux::A ? i.raddrA : i.raddrB;
    const bool immediate = mux == Mux::B && i.signal == Signal::SmallImmediate;
    if (mux >= Mux::A && from == address::kNop && !immediate)
      return constant(interp::splat(kUndefined));
    switch (mux) {
      case Mux::A:
        if (i.unpack != 0 && !i.pm) return slot::kPortA;
        if (i.raddrA < kFirstIo)
          return static_cast<std::uint16_t>(slot::kFileA + i.raddrA);
        return i.raddrA == address::kElementNumber ? slot::kElementNumber : slot::kPortA;
      case Mux::B:
        if (i.signal == Signal::SmallImmediate)
          return constant(interp::splat(isa::smallImmediate(i.raddrB)));
        if (i.raddrB < kFirstIo)
          return static_cast<std::uint16_t>(slot::kFileB + i.raddrB);
        return i.raddrB == address::kQpuNumber ? slot::kQpuNumber : slot::kPortB;
      case Mux::R4:
        if (i.unpack != 0 && i.pm) return slot::kUnpackedR4;
        [[fallthrough]];
      default:
        return static_cast<std::uint16_t>(slot::kAccumulators + static_cast<unsigned>(mux));
    }
  }

  static std::uint16_t portNeeds(std::uint8_t a, std::uint16_t port) {
    switch (a) {
      case address::kUniform: return port;
      case address::kVpm:
      case address::kDmaBusy:
      case address::kDmaWait:
      case address::kMutex: return port | need::kOrder;
      default: return 0;
    }
  }

  void alu(const Instruction& i, Op& op) {
    const bool immediate = i.signal == Signal::SmallImmediate;
    op.before |= portNeeds(i.raddrA, need::kPortA);
    if (!immediate) op.before |= portNeeds(i.raddrB, need::kPortB);
    op.add = static_cast<std::uint8_t>(i.opAdd);
    op.mul = i.opMul;
    if (i.opAdd != AddOp::Nop) {
      op.addA = operand(i, i.addA);
      op.addB = readsB(i.opAdd) ? operand(i, i.addB) : op.addA;
      if (op.addB >= slot::kConstants) {
        if (i.opAdd == AddOp::Shr) op.add = kShrBy;
        if (i.opAdd == AddOp::Asr) op.add = kAsrBy;
        if (i.opAdd == AddOp::Shl) op.add = kShlBy;
      }
    }
    if (i.opMul != MulOp::Nop) {
      op.mulA = operand(i, i.mulA);
      op.mulB = operand(i, i.mulB);
    }
    const Reads add = addReads(i);
    const Reads mul = mulReads(i);
    const bool unpacks =
        i.pm ? ((add.accumulators | mul.accumulators) >> 4U & 1U) != 0 : add.a || mul.a;
    if (i.unpack != 0 && unpacks) op.before |= need::kUnpack;
    if (isRotation(i)) op.after |= need::kRotate;
    if (i.signal == Signal::LoadTmu0 || i.signal == Signal::LoadTmu1) {
      op.before |= need::kTmuLoad;
      op.after |= need::kR4;
    }
    if (i.signal == Signal::End) op.after |= need::kEnd;
  }

  // Loads an immediate. The immediate is the result of both ALUs.
  void immediate(const Instruction& i, Op& op) {
    Vector v = interp::splat(i.immediate);
    if (i.form == Form::LoadPerElementSigned || i.form == Form::LoadPerElementUnsigned)
      for (unsigned e = 0; e < kElements; ++e) {
        const std::uint32_t low = i.immediate >> e & 1U;
        const std::uint32_t high = i.immediate >> (16 + e) & 1U;
        v.e[e] = i.form == Form::LoadPerElementSigned ? low - 2 * high : low + 2 * high;
      }
    op.addA = op.addB = op.mulA = op.mulB = constant(v);
    if (i.condAdd != Cond::Never) op.add = static_cast<std::uint8_t>(AddOp::Or);
    if (i.condMul != Cond::Never) op.mul = MulOp::V8Min;
  }

  // Prepares a branch. Op::addA is the number of the vector that contains the link address.
  void branch(const Instruction& i, std::uint32_t at, Op& op) {
    op.after |= need::kBranch;
    if (i.waddrAdd != address::kNop || i.waddrMul != address::kNop)
      op.addA = constant(interp::splat(address_ + (at + 4) * kWordBytes));
  }

  static std::uint16_t target(bool fileA, std::uint8_t a) {
    if (a < kFirstIo) return static_cast<std::uint16_t>((fileA ? slot::kFileA : slot::kFileB) + a);
    if (a < address::kTmuNoSwap)
      return static_cast<std::uint16_t>(slot::kAccumulators + a - kFirstIo);
    return slot::kNowhere;
  }

  static void results(const Instruction& i, Op& op) {
    const bool isBranch = i.form == Form::Branch;
    const bool adds = isBranch || op.add != 0;
    const bool multiplies = isBranch || op.mul != MulOp::Nop;
    if (adds) result(addWritesA(i), i.waddrAdd, isBranch ? Cond::Always : i.condAdd, op.addTarget, op);
    if (multiplies)
      result(mulWritesA(i), i.waddrMul, isBranch ? Cond::Always : i.condMul, op.mulTarget, op);
    if (isBranch) return;
    if (i.pack != 0) op.after |= need::kPack;
    if (i.setFlags && (adds || multiplies)) op.after |= need::kFlags;
  }

  static void result(bool fileA, std::uint8_t a, Cond cond, std::uint16_t& target_, Op& op) {
    target_ = target(fileA, a);
    if (cond != Cond::Always) op.after |= need::kCondition;
    if (a < address::kTmuNoSwap || a == address::kNop) return;
    op.after |= need::kWriteIo;
    const bool local = a == address::kR5 || isSfu(a) || a == address::kUniformsAddress ||
                       a == address::kTmuNoSwap || a == address::kVpmSetup;
    if (!local) op.before |= need::kOrder;
  }

 public:
  std::uint32_t address_ = 0;

 private:
  Program& program_;
  std::map<std::array<std::uint32_t, kElements>, std::uint16_t> constants_;
};

}  // namespace

std::uint32_t rotatedTooSoon(const Traits& earlier, const Traits& later) {
  return earlier.accumulatorsWritten & (later.rotated | (later.rotatesByR5 ? 1U << 5U : 0U));
}

bool isFloat(AddOp op) { return op >= AddOp::FAdd && op <= AddOp::FtoI; }
bool givesFloat(AddOp op) { return isFloat(op) ? op != AddOp::FtoI : op == AddOp::ItoF; }
bool readsB(AddOp op) {
  return op != AddOp::FtoI && op != AddOp::ItoF && op != AddOp::Not && op != AddOp::Clz;
}

Program::Program(const isa::Word* words, std::size_t size, std::uint32_t address)
    : ops(size + 1),
      instructions(size),
      traits(size),
      vectors(slot::kConstants, interp::splat(kUndefined)),
      goodTargets(size, kNoTarget) {
  for (std::uint32_t e = 0; e < kElements; ++e) vectors[slot::kElementNumber].e[e] = e;
  for (std::uint32_t at = 0; at < size; ++at) {
    const auto decoded = isa::decode(words[at]);
    if (decoded) {
      instructions[at] = *decoded;
      traits[at] = Inspector(*decoded).traits();
    } else {
      traits[at].fault = "the word is not a valid instruction";
    }
  }
  Preparation preparation(*this);
  preparation.address_ = address;
  preparation.run();
  ops[size].before = need::kOffEnd;
  for (std::uint32_t at = 0; at < size; ++at) {
    const char* rule = brokenAlone(traits[at]);
    std::uint32_t distance = 0;
    while (rule == nullptr && distance < std::min(at, kLongest)) {
      ++distance;
      rule = broken(traits[at - distance], traits[at], distance);
    }
    if (rule == nullptr) continue;
    faults.push_back({at, distance, rule});
    ops[at].before |= need::kFault;
  }
  for (std::uint32_t at = 0; at < size; ++at) {
    const Instruction& i = instructions[at];
    if (!traits[at].branches || i.branchRegister) continue;
    const std::uint32_t offset =
        i.branchRelative ? i.immediate + (at + 4) * kWordBytes : i.immediate - address;
    std::uint32_t brokenBy = 0;
    if (offset % kWordBytes == 0 && faultOfJump(at, offset / kWordBytes, brokenBy) == nullptr)
      goodTargets[at] = offset / kWordBytes;
  }
}

const Fault* Program::faultAt(std::uint32_t at, std::uint32_t sequence) const {
  const auto found =
      std::lower_bound(faults.begin(), faults.end(), at,
                       [](const Fault& f, std::uint32_t n) { return f.instruction < n; });
  if (found == faults.end() || found->instruction != at) return nullptr;
  return found->distance <= sequence ? &*found : nullptr;
}

// Checks a jump. The last two delay slots are the two instructions that execute before the jump's
// target.
const char* Program::faultOfJump(std::uint32_t at, std::uint32_t target,
                                 std::uint32_t& brokenBy) const {
  if (goodTargets[at] == target) return nullptr;
  for (std::uint32_t distance = 1; distance < kLongest; ++distance)
    for (std::uint32_t past = 0; past < distance; ++past) {
      const std::uint32_t earlier = at + kLongest + 1 - (distance - past);
      brokenBy = target + past;
      if (earlier >= count() || brokenBy >= count()) continue;
      const char* rule = broken(traits[earlier], traits[brokenBy], distance);
      if (rule != nullptr) return rule;
    }
  return nullptr;
}

}  // namespace qpu::emu
