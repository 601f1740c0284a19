#include "emu/machine.hpp"

#include <algorithm>
#include <memory>
#include <utility>

#include "emu/failure.hpp"

namespace qpu::emu {
namespace {

using isa::AddOp;
using isa::BranchCond;
using isa::Cond;
using isa::Form;
using isa::Instruction;
using isa::MulOp;

constexpr Clock kInstructionClocks = 4;
constexpr std::uint32_t kNoJump = UINT32_MAX;
constexpr std::uint32_t kWordBytes = 8;
constexpr std::uint32_t kDelaySlots = 3;

Mask holds(Cond cond, const Qpu& q) {
  switch (cond) {
    case Cond::Never: return 0;
    case Cond::Always: return kAllElements;
    case Cond::ZSet: return q.z;
    case Cond::ZClear: return ~q.z & kAllElements;
    case Cond::NSet: return q.n;
    case Cond::NClear: return ~q.n & kAllElements;
    case Cond::CSet: return q.c;
    case Cond::CClear: return ~q.c & kAllElements;
  }
  return 0;
}

bool taken(BranchCond cond, const Qpu& q) {
  switch (cond) {
    case BranchCond::AllZSet: return q.z == kAllElements;
    case BranchCond::AllZClear: return q.z == 0;
    case BranchCond::AnyZSet: return q.z != 0;
    case BranchCond::AnyZClear: return q.z != kAllElements;
    case BranchCond::AllNSet: return q.n == kAllElements;
    case BranchCond::AllNClear: return q.n == 0;
    case BranchCond::AnyNSet: return q.n != 0;
    case BranchCond::AnyNClear: return q.n != kAllElements;
    case BranchCond::AllCSet: return q.c == kAllElements;
    case BranchCond::AllCClear: return q.c == 0;
    case BranchCond::AnyCSet: return q.c != 0;
    case BranchCond::AnyCClear: return q.c != kAllElements;
    case BranchCond::Always: return true;
  }
  return false;
}

}  // namespace

void Machine::reset(const Launch& launch, const Program& program) {
  launch_ = &launch;
  program_ = &program;
  memory_.reset(launch_->memory);
  history_.reset(launch_->memory, launch_->uniforms.size());
  timing_.reset(launch_->board != nullptr ? *launch_->board : kDefaultBoard);
  loads_.reset();
  stores_.reset();
  vpm_ = {};
  semaphores_ = {};
  released_ = {};
  mutexHolder_ = nullptr;
  mutexReleased_ = {};
  horizon_ = 0;
  poisons_.clear();
  warned_.clear();
  report_ = {};
  if (launch_->profile) report_.perInstruction.resize(launch_->count);
  const std::vector<Vector>& vectors = program_->vectors;
  qpus_.assign(launch_->uniforms.size(), Qpu());
  vectors_.resize(std::max(vectors_.size(), qpus_.size() * vectors.size()));
  for (std::size_t n = 0; n < qpus_.size(); ++n) {
    Qpu& q = qpus_[n];
    q.number = static_cast<std::uint32_t>(n);
    q.v = vectors_.data() + n * vectors.size();
    std::copy(vectors.begin(), vectors.end(), q.v);
    q.v[slot::kQpuNumber] = interp::splat(q.number);
    q.uniforms.given = true;
    q.uniforms.words = launch_->uniforms[n].data();
    q.uniforms.count = static_cast<std::uint32_t>(launch_->uniforms[n].size());
    q.careful = launch_->profile;
    q.fetches = true;
  }
}

Report Machine::run() {
  std::size_t running = qpus_.size();
  while (running != 0) {
    // The keys of the next two actors: `first` belongs to the actor that acts next, and `second` to
    // the actor after it.
    std::uint64_t first = key(loads_.next() == kNever ? kNever >> 4U : loads_.next(), kLoadEngine);
    std::uint64_t second =
        key(stores_.next() == kNever ? kNever >> 4U : stores_.next(), kStoreEngine);
    if (second < first) std::swap(first, second);
    for (const Qpu& q : qpus_) {
      if (q.state != State::Ready) continue;
      const std::uint64_t k = key(q.clock, q.number);
      if (k < first) {
        second = first;
        first = k;
      } else if (k < second) {
        second = k;
      }
    }
    if (first >> 4U == kNever >> 4U) deadlock();
    const auto actor = static_cast<std::uint32_t>(first & 15U);
    if (actor >= kLoadEngine) {
      stepEngine(actor == kLoadEngine);
      continue;
    }
    Qpu& q = qpus_[actor];
    horizon_ = second;
    q.leave = false;
    if (q.fetches && !fetch(q, q.next)) continue;
    if (q.careful)
      execute<true>(q);
    else
      execute<false>(q);
    if (q.state == State::Ended) --running;
  }
  requireBalancedSemaphores();
  for (const Qpu& q : qpus_) {
    report_.instructions += q.executed;
    report_.clocks = std::max(report_.clocks, q.clock);
  }
  report_.memoryReadBytes = timing_.traffic().readBytes;
  report_.memoryWriteBytes = timing_.traffic().writeBytes;
  history_.clear();
  empty(poisons_);
  return std::move(report_);
}

void Machine::stepEngine(bool load) {
  Clock ended = 0;
  const std::uint32_t number = (load ? loads_ : stores_).step(ended);
  if (number == Engine::kNone) return;
  Qpu& q = qpus_[number];
  Dma& dma = load ? q.load : q.store;
  dma.running = false;
  dma.ended = ended;
  if (q.state == (load ? State::AtLoadWait : State::AtStoreWait)) {
    q.state = State::Ready;
    stall(q, q.next, ended, report_.stalledOnVpm);
  }
}

// Runs q until another actor must act first.
template <bool Careful>
void Machine::execute(Qpu& q) {
  const Op* const ops = program_->ops.data();
  Vector* const v = q.v;
  std::uint32_t at = q.next;
  for (;;) {
    const Op& op = ops[at];
    if (op.before != 0) {
      q.next = at;
      if (!before(q, op, at)) return;
    }
    if constexpr (Careful)
      if (q.poisoned != 0) followPoison(q, op, at);
    Vector x, y;
    if (op.add != 0) add(op.add, v[op.addA], v[op.addB], x);
    if (op.mul != MulOp::Nop) multiply(op.mul, v[op.mulA], v[op.mulB], y);
    if constexpr (Careful)
      if (launch_->profile) ++report_.perInstruction[at].executed;
    ++q.executed;
    if (op.after == 0) {
      q.clock += kInstructionClocks;
      if (op.add != 0) v[op.addTarget] = x;
      if (op.mul != MulOp::Nop) v[op.mulTarget] = y;
      ++at;
      continue;
    }
    q.next = at + 1;
    after(q, op, at, x, y);
    if (q.leave) return;
    at = q.next;
    if constexpr (Careful) {
      if (q.poisoned == 0 && !launch_->profile) {
        q.careful = false;
        return;
      }
    }
  }
}

// Performs all actions that precede the ALU operations. Returns false, without side effects, if q
// cannot execute the instruction yet.
bool Machine::before(Qpu& q, const Op& op, std::uint32_t at) {
  const std::uint16_t needs = op.before;
  if ((needs & need::kOffEnd) != 0)
    fail<ExecutionError>(q, at, "execution continues past the last instruction of the program");
  if ((needs & need::kLine) != 0 && !fetch(q, at)) return false;
  if ((needs & ~need::kLine) == 0) return true;
  if ((needs & need::kFault) != 0) {
    const Fault* fault = program_->faultAt(at, at - q.flow);
    if (fault != nullptr)
      fail<ExecutionError>(
          q, at,
          fault->rule + (fault->distance == 0 ? std::string()
                                              : "; preceding instruction: " + describe(at - fault->distance)));
  }
  if ((needs & need::kRotatesNew) != 0 && at != q.flow) {
    const char* const rule = rotatesChanged(q, at, at - 1);
    if (rule != nullptr)
      fail<ExecutionError>(q, at, std::string(rule) + "; preceding instruction: " + describe(at - 1));
  }
  if ((needs & need::kOrder) != 0 && !ordered(q)) return false;
  const Instruction& i = program_->instructions[at];
  if (!canProceed(q, op, i)) return false;
  if ((needs & need::kPortA) != 0) readPort(q, i.raddrA, true, at);
  if ((needs & need::kPortB) != 0) readPort(q, i.raddrB, false, at);
  if ((needs & need::kUnpack) != 0) unpackInput(q, i);
  if ((needs & need::kTmuLoad) != 0) {
    const RequestQueue& queue = q.tmu[i.signal == isa::Signal::LoadTmu1 ? 1 : 0];
    if (queue.count == 0)
      fail<ExecutionError>(q, at, "a result is loaded from a TMU without an outstanding request");
    stall(q, at, queue.ring[queue.oldest].arrives, report_.stalledOnTmu);
  }
  return true;
}

// Returns true if the instruction can execute without waiting.
bool Machine::canProceed(Qpu& q, const Op& op, const Instruction& i) {
  if (launch_->lenient && !passEarlierDma(q, op, i)) return false;
  if ((op.before & need::kSemaphore) != 0) return passSemaphore(q, i);
  const bool readsA = (op.before & need::kPortA) != 0;
  const bool readsB = (op.before & need::kPortB) != 0;
  if (!readsA && !readsB) return true;
  namespace address = isa::address;
  const auto reads = [&](std::uint8_t a) {
    return (readsA && i.raddrA == a) || (readsB && i.raddrB == a);
  };
  if (reads(address::kUniform) && uniformNeedsOrder(q) && !ordered(q)) return false;
  if (reads(address::kMutex)) return passMutex(q);
  if (readsA && i.raddrA == address::kDmaWait) return passDma(q, q.load, State::AtLoadWait);
  if (readsB && i.raddrB == address::kDmaWait) return passDma(q, q.store, State::AtStoreWait);
  return true;
}

// Fetches the cache line that contains instruction `at`. Returns false if the line must come from
// the L2 cache and other actors must act first.
bool Machine::fetch(Qpu& q, std::uint32_t at) {
  const std::uint32_t line =
      lineOf(Space::Code, launch_->codeAddress % kLineBytes + at * kWordBytes);
  if (line == q.line) {
    q.fetches = false;
    return true;
  }
  Clock arrives = timing_.codeLine(slice(q), line);
  if (arrives == kNever) {
    if (!ordered(q)) return false;
    arrives = timing_.fetchCode(slice(q), line, q.clock);
  }
  q.line = line;
  q.fetches = false;
  if (arrives > q.clock) stall(q, at, arrives, report_.stalledOnOther);
  return true;
}

void Machine::unpackInput(Qpu& q, const Instruction& i) {
  if (i.pm) {
    q.v[slot::kUnpackedR4] = unpack(i.unpack, q.v[slot::kR4], true);
    return;
  }
  const auto reads = [](isa::Mux m) { return m == isa::Mux::A; };
  const bool byAdd = isFloat(i.opAdd) && (reads(i.addA) || (readsB(i.opAdd) && reads(i.addB)));
  const bool byMul = i.opMul == MulOp::FMul && (reads(i.mulA) || reads(i.mulB));
  q.v[slot::kPortA] = unpack(i.unpack, q.v[slot::kFileA + i.raddrA], byAdd || byMul);
}

// Performs all actions that follow the ALU operations, except writes of plain registers.
void Machine::after(Qpu& q, const Op& op, std::uint32_t at, Vector& x, Vector& y) {
  const Instruction& i = program_->instructions[at];
  const std::uint16_t needs = op.after;
  if ((needs & need::kKeepOld) != 0)
    std::copy_n(q.v + slot::kAccumulators, q.old.size(), q.old.begin());
  if ((needs & need::kBranch) != 0) {
    branch(q, op, at);
  } else {
    Mask whereX = kAllElements;
    Mask whereY = kAllElements;
    if ((needs & need::kCondition) != 0) {
      whereX = holds(i.condAdd, q);
      whereY = holds(i.condMul, q);
    }
    if ((needs & need::kRotate) != 0) {
      const auto isFull = [](isa::Mux m) { return m <= isa::Mux::R3; };
      const unsigned n = i.raddrB == 48 ? q.v[slot::kR5].e[0] & 15U : i.raddrB - 48U;
      rotate(y, n, isFull(i.mulA) && isFull(i.mulB));
    }
    if ((needs & need::kFlags) != 0) setFlags(q, op, i, x, y, whereX, whereY);
    if ((needs & need::kBothWrite) != 0) requireEqual(q, at, x, y, whereX | whereY);
    if ((needs & (need::kCondition | need::kPack | need::kWriteIo)) == 0) {
      if (op.add != 0) q.v[op.addTarget] = x;
      if (op.mul != MulOp::Nop) q.v[op.mulTarget] = y;
    } else {
      writeResults(q, op, at, x, y, whereX, whereY);
    }
  }
  if ((needs & need::kR4) != 0) receive(q, i.signal == isa::Signal::LoadTmu1 ? 1 : 0);
  q.clock += kInstructionClocks;
  if ((needs & need::kEnd) != 0) q.ending = true;
  if ((needs & need::kSlot) != 0 && q.jump != kNoJump) jump(q, at);
  if ((needs & need::kLast) != 0 && q.ending) end(q, at);
}

void Machine::writeResults(Qpu& q, const Op& op, std::uint32_t at, const Vector& x,
                           const Vector& y, Mask whereX, Mask whereY) {
  const Instruction& i = program_->instructions[at];
  const bool adds = op.add != 0;
  const bool multiplies = op.mul != MulOp::Nop;
  const bool alu = i.form == Form::Alu;
  const bool packs = (op.after & need::kPack) != 0;
  Vector packedX;
  Vector packedY;
  const Vector* toX = &x;
  const Vector* toY = &y;
  if (packs && adds && !i.pm && addWritesA(i)) {
    const AddOp operation = alu ? i.opAdd : AddOp::Or;
    packedX = packA(i.pack, x, q.v[op.addTarget],
                    {givesFloat(operation), operation, &q.v[op.addA], &q.v[op.addB]});
    toX = &packedX;
  }
  if (packs && multiplies && i.pm) {
    packedY = packColour(i.pack, y, q.v[op.mulTarget]);
    toY = &packedY;
  } else if (packs && multiplies && mulWritesA(i)) {
    packedY = packA(i.pack, y, q.v[op.mulTarget],
                    {alu && i.opMul == MulOp::FMul, AddOp::Nop, nullptr, nullptr});
    toY = &packedY;
  }
  const auto put = [&](bool fileA, std::uint8_t address, std::uint16_t target, const Vector& value,
                       Mask where) {
    if (target != slot::kNowhere)
      write(q.v[target], value, where);
    else if (address != isa::address::kNop)
      writeIo(q, at, fileA, address, value, where);
  };
  if (adds) put(addWritesA(i), i.waddrAdd, op.addTarget, *toX, whereX);
  // If both ALUs write to the same peripheral, the peripheral is written only once.
  const bool written = (op.after & need::kBothWrite) != 0 && op.mulTarget == slot::kNowhere &&
                       i.waddrMul != isa::address::kHostInterrupt;
  if (multiplies && !written) put(mulWritesA(i), i.waddrMul, op.mulTarget, *toY, whereY);
}

// Sets the flags from the result of the ADD ALU, or of the MUL ALU if the ADD ALU does nothing.
// Changes the flags of only those elements for which the condition holds.
void Machine::setFlags(Qpu& q, const Op& op, const Instruction& i, const Vector& x,
                       const Vector& y, Mask whereX, Mask whereY) {
  const bool alu = i.form == Form::Alu;
  const bool ofAdd = op.add != 0;
  const Vector& r = ofAdd ? x : y;
  const Mask where = ofAdd ? whereX : whereY;
  Mask c = 0;
  if (alu && ofAdd) c = carry(i.opAdd, q.v[op.addA], q.v[op.addB], r);
  if (alu && !ofAdd) c = carry(i.opMul, q.v[op.mulA], q.v[op.mulB]);
  q.n = (q.n & ~where) | (negative(r) & where);
  q.z = (q.z & ~where) | (zero(r) & where);
  q.c = (q.c & ~where) | (c & where);
}

void Machine::branch(Qpu& q, const Op& op, std::uint32_t at) {
  const Instruction& i = program_->instructions[at];
  if (!taken(i.branchCond, q)) return;
  std::uint32_t address = i.immediate;
  const std::uint32_t base = launch_->codeAddress;
  if (i.branchRelative) address += base + (at + 1 + kDelaySlots) * kWordBytes;
  if (i.branchRegister) {
    const Vector& r = q.v[slot::kFileA + i.branchRegisterA];
    for (const std::uint32_t e : r.e)
      if (e != r.e[0])
        fail<ExecutionError>(q, at,
                             "the elements of the branch target register differ; it is not known "
                             "which element the hardware uses");
    address += r.e[0];
  }
  const std::uint32_t offset = address - base;
  if (offset % kWordBytes != 0 || offset / kWordBytes >= program_->count())
    fail<ExecutionError>(q, at,
                         "the branch target " + detail::hex(address) +
                             " is not an instruction of the program");
  for (const std::uint16_t target : {op.addTarget, op.mulTarget})
    if (target != slot::kNowhere) q.v[target] = q.v[op.addA];
  q.jump = offset / kWordBytes;
  q.jumpedAt = at;
}

// Performs a jump after its last delay slot.
void Machine::jump(Qpu& q, std::uint32_t at) {
  if (launch_->limit != 0 && q.executed > launch_->limit)
    fail<ExecutionError>(q, at,
                         "the program does not end: this QPU has executed " +
                             std::to_string(q.executed) + " instructions, the limit is " +
                             std::to_string(launch_->limit));
  if (launch_->clockLimit != 0 && q.clock > launch_->clockLimit) failTimeOut(q, at);
  std::uint32_t broken = q.jump;
  const bool hasOld = (program_->ops[at].after & need::kKeepOld) != 0;
  const char* rule = hasOld ? rotatesChanged(q, q.jump, at) : nullptr;
  if (rule == nullptr) rule = program_->faultOfJump(q.jumpedAt, q.jump, broken);
  if (rule != nullptr)
    fail<ExecutionError>(q, broken,
                         std::string(rule) + "; reached by the jump from " + describe(q.jumpedAt));
  q.next = q.jump;
  q.flow = q.jump;
  q.jump = kNoJump;
  if (q.ending) fail<ExecutionError>(q, at, "a branch is taken while the program ends");
  if (!fetch(q, q.next)) {
    q.fetches = true;
    q.leave = true;
  }
}

void Machine::end(Qpu& q, std::uint32_t at) {
  if (!q.load.awaited || !q.store.awaited)
    fail<ExecutionError>(q, at,
                         std::string("the program ends without waiting for a DMA ") +
                             (q.load.awaited ? "store" : "load") + ", which was started by " +
                             describe((q.load.awaited ? q.store : q.load).startedAt));
  if (q.reads.left != 0)
    fail<ExecutionError>(q, at,
                         "the program ends before reading " + std::to_string(q.reads.left) +
                             " vectors of its VPM read setup");
  for (const RequestQueue& queue : q.tmu)
    if (queue.count != 0)
      fail<ExecutionError>(q, at,
                           "the program ends with " + std::to_string(queue.count) +
                               " results in a TMU that were not loaded; the next program would "
                               "receive them");
  if (mutexHolder_ == &q) fail<ExecutionError>(q, at, "the program ends while it holds the mutex");
  q.state = State::Ended;
  q.leave = true;
}

void Machine::stall(Qpu& q, std::uint32_t at, Clock until, std::uint64_t& counter) {
  if (until <= q.clock) return;
  const Clock clocks = until - q.clock;
  q.clock = until;
  counter += clocks;
  if (launch_->profile) report_.perInstruction[at].stalled += clocks;
}

std::shared_ptr<const Program> prepare(const isa::Word* words, std::size_t count,
                                       std::uint32_t codeAddress) {
  return std::make_shared<const Program>(words, count, codeAddress);
}

namespace {

// The machine that this thread's last launch used. The next launch reuses this machine, because
// constructing a machine takes longer than running a small kernel. The variable is a plain pointer
// because static objects can launch kernels after the thread-local objects have been destroyed.
thread_local Machine* spare = nullptr;

struct SpareKeeper {
  bool keeps = false;
  ~SpareKeeper() { delete std::exchange(spare, nullptr); }
};
thread_local SpareKeeper keeper;

}  // namespace

Report run(const Launch& launch) {
  const std::size_t qpus = launch.uniforms.size();
  if (qpus < 1 || qpus > History::kQpus)
    detail::raise<ArgumentError>("a launch on " + std::to_string(qpus) +
                                 " QPUs: their number must be 1..12, with one uniform stream per QPU");
  std::shared_ptr<const Program> made;
  if (launch.program == nullptr) made = prepare(launch.words, launch.count, launch.codeAddress);
  // The machine is kept only if the launch succeeds. A failed launch therefore cannot affect the
  // next launch.
  std::unique_ptr<Machine> machine(std::exchange(spare, nullptr));
  if (machine == nullptr) machine = std::make_unique<Machine>();
  machine->reset(launch, made != nullptr ? *made : *launch.program);
  Report report;
  {
    [[maybe_unused]] const QpuRounding rounding;
    report = machine->run();
  }
  keeper.keeps = true;
  spare = machine.release();
  return report;
}

}  // namespace qpu::emu
