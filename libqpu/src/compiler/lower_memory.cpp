#include "compiler/lower_memory.hpp"

#include <utility>

#include "compiler/vpm_layout.hpp"
#include "error_facts.hpp"

namespace qpu::compiler {

using detail::Statement;
using ir::kNone;
using ir::Value;
using isa::AddOp;
using Pending = MemoryState::Pending;

void LinearSum::add(const ir::Graph& graph, Value v, std::uint32_t factor, int depth) {
  constexpr int kDeepest = 8;
  const ir::Instruction& i = graph.values[v];
  const bool isAlu = i.kind == ir::Kind::Alu && depth < kDeepest;
  if (i.kind == ir::Kind::Constant || i.kind == ir::Kind::Literal) {
    constant += factor * i.bits;
  } else if (isAlu && (i.add == AddOp::Add || i.add == AddOp::Sub)) {
    add(graph, i.a, factor, depth + 1);
    add(graph, i.b, i.add == AddOp::Add ? factor : 0U - factor, depth + 1);
  } else if (isAlu && i.add == AddOp::Shl && graph.isConstant(i.b)) {
    add(graph, i.a, factor << (graph.values[i.b].bits & 31U), depth + 1);
  } else {
    std::uint32_t& n = times[v];
    n += factor;
    if (n == 0) times.erase(v);
  }
}

MemoryLowering::MemoryLowering(LowerContext& context) : c_(context) {
  if (c_.facts.vpmByHand) byHand_ = analyseVpm(c_.source);
}

void MemoryLowering::fail(const Statement& s, const std::string& what) const {
  detail::raise<CompileError>("kernel '" + c_.source.name + "': " + c_.source.describe(s.site) + ": " + what,
                              {c_.source.name, s.site.construct, -1, 0});
}

std::uint32_t MemoryLowering::mostMerged() const {
  return c_.facts.loads ? vpm::kMostMergedWithLoads : vpm::kMostMerged;
}

Value MemoryLowering::with(std::uint32_t word, Value field) {
  return c_.builder.alu(AddOp::Or, field, c_.builder.constant(word));
}

void MemoryLowering::prepare() {
  const Value me = c_.graph.qpuNumber;
  const auto shifted = [&](std::uint32_t by) {
    return c_.builder.alu(AddOp::Shl, me, c_.builder.constant(by));
  };
  const auto plus = [&](Value a, std::uint32_t b) {
    return c_.builder.alu(AddOp::Add, a, c_.builder.constant(b));
  };
  if (c_.facts.vpmByHand) {
    const auto minus = [&](std::uint32_t a, Value b) {
      return c_.builder.alu(AddOp::Sub, c_.builder.constant(a), b);
    };
    c_.hidden(Hidden::WriteWindow) = minus(vpm::writeRows(vpm::kHandRow, 0), me);
    c_.hidden(Hidden::StoreSetup) =
        minus(vpm::storeRow(vpm::kHandRow), shifted(vpm::kStoreRowShift));
    loadSetup_ = minus(vpm::loadRow(vpm::kHandRow), shifted(vpm::kLoadRowShift));
    readWindow_ = minus(vpm::readRow(vpm::kHandRow), me);
    return;
  }
  if (c_.mergesStores) {
    const std::uint32_t shift = mostMerged() == 4 ? 2 : 1;
    c_.hidden(Hidden::WriteWindow) = plus(shifted(shift), vpm::writeRows(0, 1));
    c_.hidden(Hidden::StoreSetup) = shifted(vpm::kStoreRowShift + shift);
    c_.builder.effect(Op::VpmWriteSetup, c_.builder.constant(vpm::kNoStoreGap));
  } else if (c_.facts.stores) {
    const Value window = plus(me, vpm::writeRows(vpm::kStoreRow, vpm::kStoreRowDistance));
    if (c_.graph.keepsWriteWindow) c_.builder.effect(Op::VpmWriteSetup, window);
    c_.hidden(Hidden::WriteWindow) = window;
    c_.hidden(Hidden::StoreSetup) =
        plus(shifted(vpm::kStoreRowShift), vpm::storeRow(vpm::kStoreRow));
  }
  if (c_.facts.loads && c_.facts.stores) {
    const std::uint32_t row = c_.mergesStores ? vpm::kMergingLoadRow : vpm::kLoadRow;
    loadSetup_ = plus(shifted(vpm::kLoadRowShift), vpm::loadRow(row));
    readWindow_ = plus(me, vpm::readRow(row));
  }
}

void MemoryLowering::setUp(Op op, Hidden which, Value word) {
  c_.builder.effect(op, word);
  c_.hidden(which) = word;
}

// After each vector, the hardware advances the address by the window's stride, modulo 64 rows.
void MemoryLowering::advanceWindow() {
  const Value old = c_.hidden(Hidden::HandWriteWindow);
  const Value mask = c_.builder.constant(63);
  const Value stride =
      c_.builder.alu(AddOp::And, c_.builder.alu(AddOp::Shr, old, c_.builder.constant(12)), mask);
  const Value moved = c_.builder.alu(AddOp::Add, old, stride);
  c_.hidden(Hidden::HandWriteWindow) = c_.builder.alu(
      AddOp::Xor, old, c_.builder.alu(AddOp::And, c_.builder.alu(AddOp::Xor, old, moved), mask));
}

void MemoryLowering::waitForStore() {
  if (state.pending == Pending::None) return;
  c_.builder.effect(Op::DmaStoreWait);
  state.pending = Pending::None;
}

// Records a store of 16 words. Returns true if the store is deferred, so that the next store can be
// merged with it.
bool MemoryLowering::mergeStore(const Statement& s, Value value, Value address) {
  if (!c_.optimise || c_.facts.vpmByHand || s.limit != detail::kNoExpression) {
    flushStores();
    return false;
  }
  LinearSum here;
  here.add(c_.graph, address, 1);
  const bool follows = stores_.count != 0 && stores_.end == here;
  if (follows) foundAdjacent_ = true;
  if (!follows || stores_.count == mostMerged()) flushStores();
  if (stores_.count == 0) stores_.address = address;
  ++stores_.count;
  constexpr std::uint32_t vectorBytes = 64;
  here.constant += vectorBytes;
  stores_.end = std::move(here);
  if (!c_.mergesStores) return false;
  stores_.vectors.push_back(value);
  stores_.sites.push_back(c_.site);
  stores_.wait = stores_.wait || s.wait;
  return true;
}

void MemoryLowering::flushStores() {
  if (stores_.count == 0) return;
  const Stores stores = std::move(stores_);
  stores_ = Stores();
  if (!c_.mergesStores) return;
  const std::uint32_t after = c_.site;
  c_.builder.site(stores.sites.front());
  waitForStore();
  c_.builder.effect(Op::VpmWriteSetup, c_.hidden(Hidden::WriteWindow));
  for (std::size_t i = 0; i < stores.vectors.size(); ++i) {
    c_.builder.site(stores.sites[i]);
    c_.builder.effect(Op::VpmWrite, stores.vectors[i]);
  }
  c_.builder.site(stores.sites.front());
  c_.builder.effect(Op::VpmWriteSetup,
                    c_.builder.alu(AddOp::Add, c_.hidden(Hidden::StoreSetup),
                                   c_.builder.constant(vpm::storeRows(stores.count))));
  c_.builder.effect(Op::DmaStoreStart, stores.address);
  c_.builder.site(after);
  state.pending = stores.wait ? Pending::StoreToWaitFor : Pending::Store;
  state.stored = true;
}

void MemoryLowering::store(const Statement& s, Value value, Value address, Value limit) {
  if (mergeStore(s, value, address)) return;
  Value& setup = c_.hidden(Hidden::StoreSetup);
  Value word = setup;
  if (limit != kNone) {
    // Subtracts the number of words that are not stored from the 16 words in the setup.
    const Value missing =
        c_.builder.alu(AddOp::Sub, c_.builder.constant(16), limit);
    word = c_.builder.alu(
        AddOp::Sub, setup,
        c_.builder.alu(AddOp::Shl, missing, c_.builder.constant(vpm::kStoreDepthShift)));
  }
  Value& window = c_.hidden(Hidden::WriteWindow);
  if (c_.mergesStores) word = c_.builder.alu(AddOp::Add, word, c_.builder.constant(vpm::storeRows(1)));
  if (c_.facts.vpmByHand || c_.mergesStores) waitForStore();
  if (!c_.graph.keepsWriteWindow) c_.builder.effect(Op::VpmWriteSetup, window);
  c_.builder.effect(Op::VpmWrite, value);
  waitForStore();
  c_.builder.effect(Op::VpmWriteSetup, word);
  c_.builder.effect(Op::DmaStoreStart, address);
  if (!c_.facts.vpmByHand && !c_.mergesStores) {
    // Selects the other VPM row for the next store.
    const auto exchange = [&](Value& v, std::uint32_t shift) {
      v = c_.builder.alu(AddOp::Xor, v, c_.builder.constant(vpm::kStoreRowDistance << shift));
    };
    exchange(setup, vpm::kStoreRowShift);
    exchange(window, 0);
  }
  state.pending = s.wait ? Pending::StoreToWaitFor : Pending::Store;
  state.stored = true;
  if (s.wait && !c_.optimise) waitForStore();
  if (!c_.facts.vpmByHand) return;
  const VpmNeeds& needs = byHand_.needs[s.site.number];
  if (needs.writeWindow)
    c_.builder.effect(Op::VpmWriteSetup, c_.hidden(Hidden::HandWriteWindow));
  if (needs.storeSetup) {
    waitForStore();
    c_.builder.effect(Op::VpmWriteSetup, c_.hidden(Hidden::HandStoreSetup));
  }
}

// The TMU caches do not contain data that was stored during the same run. A load therefore goes
// through the VPM in two cases: if it follows a store by this QPU, or if a semaphore orders it
// after a store by another QPU.
Value MemoryLowering::load(const Statement& s, Value address) {
  flushStores();
  const bool stale = state.stored || (c_.facts.stores && state.acquired);
  if (!stale) {
    // Consecutive loads alternate between the TMUs, unless gathers use only TMU 0.
    loadUnit_ ^= 1U;
    const bool shared = !c_.facts.gathers || c_.gathers.usesBothTmus;
    return c_.builder.load(address, shared ? loadUnit_ : std::uint8_t{1});
  }
  if (c_.facts.vpmByHand && byHand_.unread[s.site.number])
    fail(s,
         "the load may read memory that an earlier store has changed, so it goes through the VPM. "
         "Before this load, read all vectors that vpmSetupRead has announced");
  waitForStore();
  // The kernel's own DMA load may still be in progress. A second load must not start before the
  // first load ends.
  if (c_.facts.vpmByHand) c_.builder.effect(Op::DmaLoadWait);
  c_.builder.effect(Op::VpmReadSetup, loadSetup_);
  c_.builder.effect(Op::DmaLoadStart, address);
  c_.builder.effect(Op::DmaLoadWait);
  c_.builder.effect(Op::VpmReadSetup, readWindow_);
  const Value words = c_.builder.effect(Op::VpmRead);
  if (c_.facts.vpmByHand && byHand_.needs[s.site.number].loadSetup)
    c_.builder.effect(Op::VpmReadSetup, c_.hidden(Hidden::HandLoadSetup));
  return words;
}

}  // namespace qpu::compiler
