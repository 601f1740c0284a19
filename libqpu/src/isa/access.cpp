#include "isa/access.hpp"

namespace qpu::isa {
namespace {

void takeMux(Access& a, Mux mux) {
  if (mux == Mux::A)
    a.takesA = true;
  else if (mux == Mux::B)
    a.takesB = true;
  else
    a.accumulators = static_cast<std::uint8_t>(a.accumulators | 1U << static_cast<unsigned>(mux));
}

void addWrite(Access& a, Pipe pipe, const Instruction& i) {
  const bool add = pipe == Pipe::Add;
  const Cond cond = add ? i.condAdd : i.condMul;
  Write w;
  w.pipe = pipe;
  w.address = add ? i.waddrAdd : i.waddrMul;
  w.fileA = add != i.swap;
  w.always = cond == Cond::Always;
  w.never = cond == Cond::Never;
  if (i.form == Form::Branch) {
    w.always = i.branchCond == BranchCond::Always;
    w.never = false;
  }
  if (w.address != address::kNop) a.write.at(a.writes++) = w;
}

bool dependsOnFlags(Cond cond) { return cond != Cond::Always && cond != Cond::Never; }

void rotation(Access& a, const Instruction& i) {
  if (i.signal != Signal::SmallImmediate || i.raddrB < 48) return;
  Access sources;
  takeMux(sources, i.mulA);
  takeMux(sources, i.mulB);
  a.rotationSources = sources.accumulators;
  a.rotationTakesA = sources.takesA;
  a.rotationTakesB = sources.takesB;
  a.rotatesByR5 = i.raddrB == 48;
  if (a.rotatesByR5) a.accumulators = a.accumulators | 1U << 5U;
}

void alu(Access& a, const Instruction& i) {
  a.portA = i.raddrA;
  if (i.signal != Signal::SmallImmediate) a.portB = i.raddrB;
  if (i.opAdd != AddOp::Nop) {
    takeMux(a, i.addA);
    if (!isUnary(i.opAdd)) takeMux(a, i.addB);
    addWrite(a, Pipe::Add, i);
    a.readsFlags = dependsOnFlags(i.condAdd);
  }
  if (i.opMul != MulOp::Nop) {
    takeMux(a, i.mulA);
    takeMux(a, i.mulB);
    rotation(a, i);
    addWrite(a, Pipe::Mul, i);
    a.readsFlags = a.readsFlags || dependsOnFlags(i.condMul);
  }
  // Mux B selects the immediate, not a register from file B.
  if (i.signal == Signal::SmallImmediate) a.takesB = false;
  switch (i.signal) {
    case Signal::LoadCoverage:
    case Signal::LoadColour:
    case Signal::LoadTmu0:
    case Signal::LoadTmu1:
    case Signal::LoadAlpha: a.loadsR4 = true; break;
    case Signal::LoadColourEnd: a.loadsR4 = a.ends = true; break;
    case Signal::End: a.ends = true; break;
    default: break;
  }
}

void branch(Access& a, const Instruction& i) {
  if (i.branchRegister) {
    a.portA = i.branchRegisterA;
    a.takesA = true;
  }
  a.readsFlags = i.branchCond != BranchCond::Always;
  addWrite(a, Pipe::Add, i);
  addWrite(a, Pipe::Mul, i);
}

void load(Access& a, const Instruction& i) {
  a.readsFlags = dependsOnFlags(i.condAdd) || dependsOnFlags(i.condMul);
  addWrite(a, Pipe::Add, i);
  addWrite(a, Pipe::Mul, i);
}

void vpmRead(Access& a, std::optional<std::uint8_t> port, bool fileA) {
  if (!port) return;
  unsigned part = 0;
  if (*port == address::kVpm) part = kVpmRead;
  if (*port == address::kDmaBusy) part = fileA ? kLoadBusy : kStoreBusy;
  if (*port == address::kDmaWait) part = fileA ? kLoadWait : kStoreWait;
  a.vpm = static_cast<std::uint16_t>(a.vpm | part);
}

void vpmWrite(Access& a, const Write& w) {
  unsigned part = 0;
  if (w.address == address::kVpm) part = kVpmWrite;
  if (w.address == address::kVpmSetup) part = w.fileA ? kReadSetup : kWriteSetup;
  if (w.address == address::kDmaAddress) part = w.fileA ? kLoadStart : kStoreStart;
  a.vpm = static_cast<std::uint16_t>(a.vpm | part);
}

}  // namespace

bool Write::isIo() const {
  return address >= 36 && address != address::kR5 && address != address::kNop;
}

Access accessOf(const Instruction& instruction) {
  Access a;
  a.setsFlags = instruction.setFlags;
  switch (instruction.form) {
    case Form::Alu: alu(a, instruction); break;
    case Form::Branch: branch(a, instruction); break;
    default: load(a, instruction); break;
  }
  const auto reads = [&](std::uint8_t address) { return a.portA == address || a.portB == address; };
  if (reads(address::kUniform)) ++a.uniformReads;
  a.varyingRead = reads(kVarying);
  a.mutexRead = reads(address::kMutex);
  vpmRead(a, a.portA, true);
  vpmRead(a, a.portB, false);
  for (const Write& w : a) {
    vpmWrite(a, w);
    if (isTmu(w.address) && !isTmuStart(w.address)) ++a.uniformReads;
  }
  return a;
}

bool isFloat(AddOp op) { return op >= AddOp::FAdd && op <= AddOp::FtoI; }

bool isUnary(AddOp op) {
  return op == AddOp::FtoI || op == AddOp::ItoF || op == AddOp::Not || op == AddOp::Clz;
}

}  // namespace qpu::isa
