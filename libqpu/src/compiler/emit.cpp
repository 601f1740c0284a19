// Emits machine code block by block. Branches are moved up so that instructions from their own
// block fill the delay slots. Reference: Thomas R. Gross and John L. Hennessy, "Optimizing Delayed
// Branches", 1982.
#include "compiler/emit.hpp"

#include <algorithm>
#include <cmath>

#include "compiler/schedule_search.hpp"

namespace qpu::compiler {
namespace {

constexpr int kMostQpus = 12;

isa::BranchCond opposite(isa::BranchCond c) {
  using isa::BranchCond;
  switch (c) {
    case BranchCond::AllZSet: return BranchCond::AnyZClear;
    case BranchCond::AllZClear: return BranchCond::AnyZSet;
    case BranchCond::AnyZSet: return BranchCond::AllZClear;
    case BranchCond::AnyZClear: return BranchCond::AllZSet;
    case BranchCond::AllNSet: return BranchCond::AnyNClear;
    case BranchCond::AllNClear: return BranchCond::AnyNSet;
    case BranchCond::AnyNSet: return BranchCond::AllNClear;
    case BranchCond::AnyNClear: return BranchCond::AllNSet;
    case BranchCond::AllCSet: return BranchCond::AnyCClear;
    case BranchCond::AllCClear: return BranchCond::AnyCSet;
    case BranchCond::AnyCSet: return BranchCond::AllCClear;
    case BranchCond::AnyCClear: return BranchCond::AllCSet;
    default: return c;
  }
}

class Emitter {
 public:
  Emitter(const Function& function, const Options& options) : function_(function), options_(options) {}

  // Returns false if there are not enough registers.
  bool run() {
    live_ = findLiveness(function_);
    homes_ = findHomes(function_, live_, options_.fileRegisters);
    if (homes_.empty() && !live_.globals.empty()) return false;
    search_.emplace(function_, options_, live_, homes_);
    const std::size_t n = function_.blocks.size();
    starts_.resize(n);
    lastWritten_.assign(n, 0);
    isDone_.assign(n, 0);
    predecessors_.resize(n);
    for (std::uint32_t b = 0; b < n; ++b)
      for (const std::uint32_t s : successors(function_.blocks[b])) predecessors_[s].push_back(b);
    for (std::uint32_t b = 0; b < n; ++b) {
      const std::size_t before = slots_.size();
      double stalls = 0;
      if (!emitBlock(b, stalls)) return false;
      cost_ += std::pow(10, std::min(function_.blocks[b].loopDepth, 5U)) *
               (static_cast<double>(slots_.size() - before) + stalls);
    }
    return true;
  }

  Emitted finish() {
    code::Object object;
    for (const Branch& branch : branches_)
      slots_[branch.at].instruction.immediate =
          static_cast<std::uint32_t>((static_cast<std::int64_t>(starts_[branch.target]) -
                                      static_cast<std::int64_t>(branch.at + kDelaySlots + 1)) *
                                     8);
    object.name = function_.name;
    object.parameters = function_.parameters;
    object.uniforms = function_.uniforms;
    object.sites = function_.sites;
    object.words.reserve(slots_.size());
    object.siteOf.reserve(slots_.size());
    for (const Slot& slot : slots_) {
      object.words.push_back(isa::encode(slot.instruction));
      object.siteOf.push_back(slot.site);
    }
    int loading = 0;
    int storing = 0;
    for (const Block& b : function_.blocks)
      for (const Operation& o : b.operations) {
        object.usesSfu |= o.op == Op::Sfu;
        if (o.op == Op::DmaLoadStart) loading += kDmaLoadSetup + kDmaLoadRow;
        if (o.op == Op::DmaStoreStart) storing += kDmaStoreSetup + kDmaStoreRow;
      }
    return {std::move(object), cost_, std::max(loading, storing), false};
  }

 private:
  // Returns the registers that the instruction before the block may write.
  std::uint64_t unreadableAt(std::uint32_t b) const {
    std::uint64_t mask = 0;
    for (const std::uint32_t p : predecessors_[b]) {
      if (isDone_[p] != 0) {
        mask |= lastWritten_[p];
        continue;
      }
      for (const Operation& o : function_.blocks[p].operations)
        if (o.target != Operation::kNone && live_.indexOf[o.target] != Liveness::kLocal)
          mask |= std::uint64_t{1} << homes_[live_.indexOf[o.target]];
    }
    return mask;
  }

  void push(const Slot& slot) { slots_.push_back(slot); }
  void pushNops(std::size_t count) {
    for (std::size_t k = 0; k < count; ++k) push({});
  }

  void pushBranch(isa::BranchCond cond, std::uint32_t target, std::uint32_t site) {
    Slot slot;
    slot.instruction.form = isa::Form::Branch;
    slot.instruction.branchCond = cond;
    slot.instruction.branchRelative = true;
    slot.site = site;
    branches_.push_back({slots_.size(), target});
    push(slot);
  }

  bool emitBlock(std::uint32_t b, double& stalls) {
    const Block& block = function_.blocks[b];
    std::optional<ScheduledBlock> scheduled = search_->run(b, unreadableAt(b));
    if (!scheduled) return false;
    ScheduledBlock& code = *scheduled;
    Surroundings around = search_->surroundings(b);
    around.qpus = kMostQpus;
    stalls = estimate(code, around).stalls;
    isDone_[b] = 1;
    lastWritten_[b] = code.lastWritten;
    if (code.slots.empty()) lastWritten_[b] = unreadableAt(b);
    while (code.slots.size() < static_cast<std::size_t>(code.minimumLength)) {
      code.slots.emplace_back();
      lastWritten_[b] = 0;
    }
    starts_[b] = slots_.size();
    const bool isLast = b + 1 == function_.blocks.size();
    const auto isNext = [&](std::uint32_t target) { return !isLast && target == b + 1; };
    if (block.exit == Block::Exit::End) {
      for (const Slot& s : code.slots) push(s);
      Slot end;
      end.instruction.signal = isa::Signal::End;
      push(end);
      pushNops(2);
      return true;
    }
    if (block.exit == Block::Exit::Jump && isNext(block.next)) {
      for (const Slot& s : code.slots) push(s);
      return true;
    }
    isa::BranchCond cond = isa::BranchCond::Always;
    std::uint32_t taken = block.next;
    bool needsJump = false;
    if (block.exit == Block::Exit::Branch) {
      cond = block.cond;
      taken = block.taken;
      if (isNext(block.taken)) {
        cond = opposite(cond);
        taken = block.next;
      } else {
        needsJump = !isNext(block.next);
      }
    }
    const std::size_t size = code.slots.size();
    const std::size_t at = branchAt(code, cond != isa::BranchCond::Always);
    for (std::size_t k = 0; k < at; ++k) push(code.slots[k]);
    pushBranch(cond, taken, block.site);
    for (std::size_t k = at; k < size; ++k) push(code.slots[k]);
    if (size < at + kDelaySlots) {
      pushNops(at + kDelaySlots - size);
      lastWritten_[b] = 0;
    }
    if (needsJump) {
      pushBranch(isa::BranchCond::Always, block.next, block.site);
      pushNops(kDelaySlots);
    }
    return true;
  }

  struct Branch {
    std::size_t at;
    std::uint32_t target;
  };

  const Function& function_;
  const Options& options_;
  Liveness live_;
  std::vector<Place> homes_;
  std::optional<ScheduleSearch> search_;
  std::vector<std::vector<std::uint32_t>> predecessors_;
  std::vector<std::size_t> starts_;
  std::vector<std::uint64_t> lastWritten_;
  std::vector<char> isDone_;
  std::vector<Branch> branches_;
  std::vector<Slot> slots_;
  double cost_ = 0;
};

}  // namespace

std::optional<Emitted> emitWithoutSpilling(const Function& function, const Options& options) {
  Emitter emitter(function, options);
  if (!emitter.run()) return std::nullopt;
  return emitter.finish();
}

}  // namespace qpu::compiler
