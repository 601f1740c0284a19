#include "compiler/schedule_write.hpp"

#include <algorithm>

namespace qpu::compiler {
namespace {

namespace address = isa::address;
using isa::Signal;

// Sets the site, the read ports and the small-immediate signal.
void writeCommon(const Graph& graph, const Bundle& bundle, Slot& slot) {
  isa::Instruction& i = slot.instruction;
  std::uint32_t first = kNone;
  for (const Candidate* candidate : bundle) {
    const std::uint32_t n = candidate->node;
    if (n != kNone && n < first && graph.nodes[n].site != code::Object::kNoSite) {
      first = n;
      slot.site = graph.nodes[n].site;
    }
    if (candidate->portA != address::kNop) i.raddrA = candidate->portA;
    if (candidate->portB != address::kNop) i.raddrB = candidate->portB;
    if (candidate->small >= 0) i.signal = Signal::SmallImmediate;
  }
}

}  // namespace

Slot InstructionWriter::write(const Bundle& bundle) {
  Slot slot;
  lastWritten_ = 0;
  if (bundle.count == 0) return slot;
  writeCommon(state_.graph, bundle, slot);
  std::array<const Candidate*, 2> alus{};
  unsigned count = 0;
  for (const Candidate* candidate : bundle)
    if (candidate->pipes != 0 || candidate->fillsInstruction) alus[count++] = candidate;
  if (count == 2 && !inAddAndMul(*alus[0], *alus[1]) && inAddAndMul(*alus[1], *alus[0]))
    std::swap(alus[0], alus[1]);
  std::array<std::uint8_t, 2> files{};
  if (count != 0) files = files_.choose(alus, files_.freeAfter(bundle, Candidate()));
  // A value that is read for the last time leaves its register before the results are placed.
  for (const Candidate* candidate : bundle) readOperands(*candidate);
  std::array<bool, 2> inAdd{true, false};
  if (count == 1) inAdd[0] = alus[0]->fillsInstruction || (alus[0]->pipes & kAddPipe) != 0;
  for (unsigned k = 0; k < count; ++k) {
    const std::uint8_t target = writeResult(*alus[k], files[k]);
    writePipe(slot.instruction, *alus[k], inAdd[k], target);
    if (files[k] == (inAdd[k] ? kToB : kToA)) slot.instruction.swap = true;
  }
  for (const Candidate* candidate : bundle) {
    if (candidate->isCopy()) continue;
    const Node& node = state_.graph.nodes[candidate->node];
    if (node.form != Node::Form::Receive) continue;
    slot.instruction.signal = node.unit == 0 ? Signal::LoadTmu0 : Signal::LoadTmu1;
    if (state_.isNeeded(node.target)) putFixed(node.target, kR4, 1);
  }
  return slot;
}

void InstructionWriter::readOperands(const Candidate& candidate) {
  if (!candidate.isCopy()) {
    const Node& node = state_.graph.nodes[candidate.node];
    for (const std::uint32_t v : candidate.reads) {
      if (v == kNone) continue;
      ValueState& value = state_.values[v];
      --value.reads;
      for (std::size_t pipe = 0; pipe < 2; ++pipe) {
        if (!BlockState::readsInPipe(node, pipe)) continue;
        --value.byPipe[pipe];
        const Place p = state_.countedAt(v);
        if (isFile(p)) --state_.fileReads[pipe][isFileA(p) ? 0 : 1];
      }
      if (node.rotate != 0 && !node.quadSource && v == node.a.number) --value.rotations;
      if (!state_.isNeeded(v)) state_.release(v);
    }
  }
  if (candidate.relocates) {
    const std::uint32_t v = candidate.value;
    state_.countReads(v, state_.countedAt(v), -1);
    state_.vacate(state_.values[v].main);
    state_.values[v].main = kNowhere;
    state_.dropCopy(v);
    state_.countReads(v, state_.countedAt(v), 1);
  }
}

// Puts the result into its register. Returns the instruction's write address for this register.
std::uint8_t InstructionWriter::writeResult(const Candidate& candidate, std::uint8_t file) {
  Place p = candidate.fixed;
  std::uint32_t v = candidate.value;
  if (!candidate.isCopy() && !state_.graph.nodes[candidate.node].isLiveOutCopy) {
    const Node& node = state_.graph.nodes[candidate.node];
    v = node.target;
    if (node.result == kR4 || node.result == kR5) {
      if (state_.isNeeded(v)) putFixed(v, node.result, node.result == kR4 ? kSfuLatency : 1);
      return node.address;
    }
    if (node.address != address::kNop) return node.address;
    if (p == kNowhere && !candidate.choosesPlace) return address::kNop;
  }
  if (candidate.isCopy() && !state_.isNeeded(v)) return address::kNop;
  if (candidate.choosesPlace) p = files_.take(file, candidate);
  if (!candidate.isCopy() && state_.graph.nodes[candidate.node].a.kind == Source::Kind::ReadEither)
    state_.lastInput = p;
  if (candidate.isCopy() && !candidate.relocates)
    putCopy(v, p, candidate);
  else
    putMain(v, p, candidate);
  state_.readableAt[p] = state_.cycle + (isFile(p) ? 2 : 1);
  if (isFile(p)) lastWritten_ |= std::uint64_t{1} << p;
  return addressOf(p);
}

void InstructionWriter::putCopy(std::uint32_t v, Place p, const Candidate& candidate) {
  state_.dropCopy(v);
  state_.occupy(p, v);
  state_.values[v].copy = p;
  state_.values[v].copyFor = candidate.copyFor;
}

void InstructionWriter::putMain(std::uint32_t v, Place p, const Candidate& candidate) {
  // The update makes an earlier copy of the value invalid.
  state_.dropCopy(v);
  state_.occupy(p, v);
  state_.countReads(v, state_.countedAt(v), -1);
  state_.values[v].main = p;
  state_.countReads(v, p, 1);
  state_.values[v].copyFor = candidate.isCopy() ? candidate.copyFor : kNone;
  if (isFile(p) && !state_.pressure.isCounted(v) && p != state_.graph.values[v].home)
    state_.pressure.count(v, state_.oldest);
}

// r4 and r5 do not belong to a file, so reads from them are not counted.
void InstructionWriter::putFixed(std::uint32_t v, Place p, int latency) {
  state_.countReads(v, state_.countedAt(v), -1);
  state_.occupy(p, v);
  state_.values[v].main = p;
  state_.readableAt[p] = state_.cycle + latency;
}

std::uint8_t InstructionWriter::addressOf(Place p) {
  return isAccumulator(p) ? static_cast<std::uint8_t>(address::kR0 + (p - kR0))
                          : static_cast<std::uint8_t>(p % kFileB);
}

void InstructionWriter::writePipe(isa::Instruction& i, const Candidate& candidate, bool inAdd,
                                  std::uint8_t target) const {
  isa::Cond cond = isa::Cond::Always;
  isa::AddOp addOp = isa::AddOp::Or;
  isa::MulOp mulOp = isa::MulOp::V8Min;
  if (!candidate.isCopy()) {
    const Node& node = state_.graph.nodes[candidate.node];
    switch (node.form) {
      case Node::Form::Load: i.form = isa::Form::LoadImmediate; break;
      case Node::Form::LoadSigned: i.form = isa::Form::LoadPerElementSigned; break;
      case Node::Form::LoadUnsigned: i.form = isa::Form::LoadPerElementUnsigned; break;
      case Node::Form::Semaphore:
        i.form = isa::Form::Semaphore;
        i.immediate = node.constant;
        return;
      default: break;
    }
    if (candidate.fillsInstruction) i.immediate = node.constant;
    cond = node.cond;
    addOp = node.add;
    mulOp = node.mul;
    i.setFlags |= node.setsFlags;
  }
  if (candidate.fillsInstruction) {
    i.condAdd = cond;
    i.waddrAdd = target;
  } else if (inAdd) {
    i.opAdd = addOp;
    i.condAdd = cond;
    i.waddrAdd = target;
    i.addA = candidate.a;
    i.addB = candidate.b;
  } else {
    i.opMul = mulOp;
    i.condMul = cond;
    i.waddrMul = target;
    i.mulA = candidate.a;
    i.mulB = candidate.b;
  }
}

}  // namespace qpu::compiler
