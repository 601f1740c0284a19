#include "isa/flow.hpp"

namespace qpu::isa {
namespace {

constexpr unsigned kTmuDepth = 4;

bool widen(bool& mine, bool other) {
  const bool changed = other && !mine;
  mine = mine || other;
  return changed;
}

bool widen(Counts& mine, Counts other) {
  const Counts before = mine;
  mine |= other;
  return mine != before;
}

template <std::size_t N>
bool widen(std::array<Cell, N>& mine, const std::array<Cell, N>& other) {
  bool changed = false;
  for (std::size_t n = 0; n < N; ++n) changed = mine[n].join(other[n]) || changed;
  return changed;
}

class Step {
 public:
  Step(State& state, const Instruction& i, const Access& access, bool twoTmus,
       const Report& report)
      : s_(state), i_(i), a_(access), twoTmus_(twoTmus), report_(report) {}

  void run() {
    s_.wroteReadSetup = false;
    checkReads();
    std::array<Cell, 2> results{result(Pipe::Add), result(Pipe::Mul)};
    for (const Write& w : a_) ioWrite(w, results.at(static_cast<std::size_t>(w.pipe)));
    for (const Write& w : a_) registerWrite(w, results.at(static_cast<std::size_t>(w.pipe)));
    if (a_.setsFlags) s_.flagsUndefined = false;
    if (i_.form == Form::Alu) signal();
    if (hasSfuWrite()) s_.accumulators[4] = Cell::varying();
  }

 private:
  void report(RuleId rule, const std::string& detail = {}) const {
    if (report_) report_(rule, detail);
  }

  // Returns true if the result is always 0 because the operation combines a register with itself.
  static bool clears(AddOp op, Mux a, Mux b) {
    return a == b && (op == AddOp::Xor || op == AddOp::Sub || op == AddOp::V8SubS);
  }

  bool addClears() const { return clears(i_.opAdd, i_.addA, i_.addB); }
  bool mulClears() const { return i_.opMul == MulOp::V8SubS && i_.mulA == i_.mulB; }

  void checkReads() {
    if (a_.readsFlags && s_.flagsUndefined) report(RuleId::Uninitialised, "flags");
    if (i_.form == Form::Branch) {
      if (a_.takesA) checkDefined(s_.fileA.at(*a_.portA), "ra", *a_.portA);
    } else if (i_.form == Form::Alu) {
      if (i_.opAdd != AddOp::Nop && !addClears()) {
        checkOperand(i_.addA);
        if (!isUnary(i_.opAdd) && i_.addB != i_.addA) checkOperand(i_.addB);
      }
      if (i_.opMul != MulOp::Nop && !mulClears()) {
        checkOperand(i_.mulA);
        if (i_.mulB != i_.mulA) checkOperand(i_.mulB);
      }
      if (a_.rotatesByR5) checkOperand(Mux::R5);
    }
    if ((a_.vpm & kVpmRead) != 0) vpmRead();
    // A program may read BUSY to wait for the transfer.
    if ((a_.vpm & (kLoadWait | kLoadBusy)) != 0) s_.mayLoad = false;
    if ((a_.vpm & (kStoreWait | kStoreBusy)) != 0) s_.mayStore = false;
    if (a_.mutexRead) s_.mayHoldMutex = true;
  }

  void checkOperand(Mux mux) const {
    const auto number = static_cast<std::size_t>(mux);
    if (mux == Mux::A) {
      if (*a_.portA < 32) checkDefined(s_.fileA.at(*a_.portA), "ra", *a_.portA);
    } else if (mux == Mux::B) {
      if (a_.portB && *a_.portB < 32) checkDefined(s_.fileB.at(*a_.portB), "rb", *a_.portB);
    } else {
      checkDefined(s_.accumulators.at(number), "r", number);
    }
  }

  void checkDefined(const Cell& cell, const char* name, std::size_t number) const {
    if (cell.mayBeUndefined()) report(RuleId::Uninitialised, name + std::to_string(number));
  }

  Cell value(Mux mux) const {
    const auto known = [](const Cell& c) { return c.isConstant() ? c : Cell::varying(); };
    if (mux == Mux::A) {
      const bool plain = *a_.portA < 32 && (i_.unpack == 0 || i_.pm);
      return plain ? known(s_.fileA.at(*a_.portA)) : Cell::varying();
    }
    if (mux == Mux::B) {
      if (i_.signal == Signal::SmallImmediate) return Cell::constant(smallImmediate(i_.raddrB));
      return *a_.portB < 32 ? known(s_.fileB.at(*a_.portB)) : Cell::varying();
    }
    return known(s_.accumulators.at(static_cast<std::size_t>(mux)));
  }

  Cell result(Pipe pipe) const {
    switch (i_.form) {
      case Form::LoadImmediate:
      case Form::Semaphore: return Cell::constant(i_.immediate);
      case Form::Alu: return pipe == Pipe::Add ? addResult() : mulResult();
      default: return Cell::varying();
    }
  }

  Cell addResult() const {
    if (i_.opAdd == AddOp::Nop) return Cell::varying();
    if (addClears()) return Cell::constant(0);
    const Cell a = value(i_.addA);
    const Cell b = value(i_.addB);
    if (!a.isConstant() || !b.isConstant()) return Cell::varying();
    const std::uint32_t x = a.bits();
    const std::uint32_t y = b.bits();
    switch (i_.opAdd) {
      case AddOp::Add: return Cell::constant(x + y);
      case AddOp::Sub: return Cell::constant(x - y);
      case AddOp::And: return Cell::constant(x & y);
      case AddOp::Or: return Cell::constant(x | y);
      case AddOp::Xor: return Cell::constant(x ^ y);
      case AddOp::Shl: return Cell::constant(x << (y & 31U));
      case AddOp::Shr: return Cell::constant(x >> (y & 31U));
      default: return Cell::varying();
    }
  }

  Cell mulResult() const {
    if (mulClears()) return Cell::constant(0);
    const bool copies = i_.opMul == MulOp::V8Min || i_.opMul == MulOp::V8Max;
    return copies && i_.mulA == i_.mulB ? value(i_.mulA) : Cell::varying();
  }

  bool packs(const Write& w) const {
    return i_.form != Form::Branch && i_.pack != 0 && (i_.pm ? w.pipe == Pipe::Mul : w.fileA);
  }

  void registerWrite(const Write& w, const Cell& written) {
    if (!w.isRegister() && !w.isAccumulator()) return;
    Cell& cell = w.address < 32 ? (w.fileA ? s_.fileA : s_.fileB).at(w.address)
                 : w.isR5()     ? s_.accumulators[5]
                                : s_.accumulators.at(w.address - address::kR0);
    const bool same = cell.isConstant() && written.isConstant() && cell.bits() == written.bits();
    cell = !packs(w) && (w.always || same) ? written : Cell::varying();
  }

  bool hasSfuWrite() const {
    bool found = false;
    for (const Write& w : a_) found = found || isSfu(w.address);
    return found;
  }

  void ioWrite(const Write& w, const Cell& written) {
    if (w.address < 36) return;
    const Cell known = packs(w) ? Cell::varying() : written;
    switch (w.address) {
      case address::kTmuNoSwap: s_.mayMissNoSwap = known.isConstant() && known.bits() == 0; break;
      case address::kVpm:
        if (s_.mayMissWriteSetup) report(RuleId::VpmWriteSetup);
        break;
      case address::kVpmSetup: setup(known, w.fileA); break;
      case address::kDmaAddress: w.fileA ? startLoad() : startStore(); break;
      case address::kMutex: s_.mayHoldMutex = false; break;
      default:
        if (isTmu(w.address)) tmuWrite(w.address);
        break;
    }
  }

  void tmuWrite(std::uint8_t address) {
    if (twoTmus_ && s_.mayMissNoSwap) report(RuleId::TmuSwap);
    if (!isTmuStart(address)) return;
    Counts& counts = s_.tmu.at(address == address::kTmu0S ? 0 : 1);
    constexpr Counts kAll = (2U << kTmuDepth) - 1;
    const Counts after = counts << 1U & kAll;
    if (after == 0) report(RuleId::TmuDepth);
    counts = after == 0 ? 1U << kTmuDepth : after;
  }

  void signal() {
    if (a_.loadsR4) s_.accumulators[4] = Cell::varying();
    if (i_.signal != Signal::LoadTmu0 && i_.signal != Signal::LoadTmu1) return;
    Counts& counts = s_.tmu.at(i_.signal == Signal::LoadTmu0 ? 0 : 1);
    const Counts after = counts >> 1U;
    if (after == 0) report(RuleId::TmuEmpty);
    counts = after == 0 ? 1 : after;
  }

  void vpmRead() {
    if (s_.vpmReads == 0) return;
    const Counts after = s_.vpmReads >> 1U;
    if (after == 0) report(RuleId::VpmReadEmpty);
    s_.vpmReads = after == 0 ? 1 : after;
  }

  void setup(const Cell& word, bool readSide) {
    if (!word.isConstant()) return unknownSetup(readSide);
    if (const char* const fault = setupFault(word.bits(), readSide))
      report(RuleId::SetupWord, fault);
    switch (setupKind(word.bits(), readSide)) {
      case Setup::VpmRead: readSetup(word.bits()); break;
      case Setup::VpmWrite: s_.mayMissWriteSetup = false; break;
      case Setup::DmaLoad:
        s_.mayMissLoadSetup = false;
        s_.loadSetup = word;
        break;
      case Setup::DmaStore: s_.mayMissStoreSetup = false; break;
      default: break;
    }
  }

  // Handles a setup word that is not known. The word may be any valid setup for this address.
  void unknownSetup(bool readSide) {
    if (readSide) {
      s_.wroteReadSetup = true;
      s_.vpmReads = 0;
      s_.mayMissLoadSetup = false;
      s_.loadSetup = Cell::varying();
    } else {
      s_.mayMissWriteSetup = s_.mayMissStoreSetup = false;
    }
  }

  void readSetup(std::uint32_t word) {
    if (s_.vpmReads != 0 && (s_.vpmReads & 1U) == 0) report(RuleId::VpmReadOutstanding);
    s_.vpmReads = 1U << setupVectors(word);
    s_.wroteReadSetup = true;
    if (!s_.mayLoad || !s_.loadSetup.isConstant()) return;
    if ((vectorWords(word) & loadWords(s_.loadSetup.bits())).any()) report(RuleId::DmaLoadRead);
  }

  void startLoad() {
    if (s_.mayMissLoadSetup) report(RuleId::DmaLoadSetup);
    if (s_.mayLoad) report(RuleId::DmaLoadOverlap);
    s_.mayLoad = true;
  }

  void startStore() {
    if (s_.mayMissStoreSetup) report(RuleId::DmaStoreSetup);
    if (s_.mayStore) report(RuleId::DmaStoreOverlap);
    s_.mayStore = true;
  }

  State& s_;
  const Instruction& i_;
  const Access& a_;
  bool twoTmus_;
  const Report& report_;
};

}  // namespace

bool Cell::join(const Cell& other) {
  bool changed = widen(mayBeUndefined_, other.mayBeUndefined_);
  if (kind_ == Kind::Varying || other.kind_ == Kind::Nothing) return changed;
  if (kind_ == Kind::Nothing) {
    kind_ = other.kind_;
    bits_ = other.bits_;
    return true;
  }
  if (other.kind_ == Kind::Constant && other.bits_ == bits_) return changed;
  kind_ = Kind::Varying;
  return true;
}

bool State::join(const State& other) {
  bool changed = widen(fileA, other.fileA);
  changed = widen(fileB, other.fileB) || changed;
  changed = widen(accumulators, other.accumulators) || changed;
  changed = widen(flagsUndefined, other.flagsUndefined) || changed;
  changed = widen(tmu[0], other.tmu[0]) || changed;
  changed = widen(tmu[1], other.tmu[1]) || changed;
  changed = widen(mayMissNoSwap, other.mayMissNoSwap) || changed;
  if (vpmReads != 0) {
    // If the number is unknown on one path, it is unknown after the paths join.
    const Counts joined = other.vpmReads == 0 ? 0 : vpmReads | other.vpmReads;
    changed = changed || joined != vpmReads;
    vpmReads = joined;
  }
  changed = widen(mayMissWriteSetup, other.mayMissWriteSetup) || changed;
  changed = widen(mayMissLoadSetup, other.mayMissLoadSetup) || changed;
  changed = widen(mayMissStoreSetup, other.mayMissStoreSetup) || changed;
  changed = loadSetup.join(other.loadSetup) || changed;
  changed = widen(mayLoad, other.mayLoad) || changed;
  changed = widen(mayStore, other.mayStore) || changed;
  return widen(mayHoldMutex, other.mayHoldMutex) || changed;
}

void step(State& state, const Instruction& instruction, const Access& access, bool twoTmus,
          const Report& report) {
  Step(state, instruction, access, twoTmus, report).run();
}

void finish(const State& state, const Report& report) {
  if ((state.tmu[0] & 1U) == 0) report(RuleId::TmuLeft, "TMU0");
  if ((state.tmu[1] & 1U) == 0) report(RuleId::TmuLeft, "TMU1");
  if (state.vpmReads != 0 && (state.vpmReads & 1U) == 0) report(RuleId::VpmReadLeft, "");
  if (state.mayLoad) report(RuleId::DmaLeft, "load");
  if (state.mayStore) report(RuleId::DmaLeft, "store");
  if (state.mayHoldMutex) report(RuleId::MutexLeft, "");
}

}  // namespace qpu::isa
