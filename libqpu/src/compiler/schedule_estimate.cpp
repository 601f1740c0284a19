#include "compiler/schedule_estimate.hpp"

#include <algorithm>
#include <deque>
#include <vector>

#include "isa/access.hpp"

namespace qpu::compiler {
namespace {

// The four QPUs of a slice share its TMUs. Each request is assumed to wait for one request from
// another QPU.
constexpr int kRequestTime = kTmuLatency + kTmuRequest;
constexpr int kSlowRequestTime = kSlowTmuLatency + kSlowTmuRequest;
constexpr int kIterations = 12;  // number of loop iterations to simulate; the first half is not counted

struct Event {
  enum class Kind : std::uint8_t { Request, Receive, StoreStart, StoreWait, LoadStart, LoadWait };
  Kind kind;
  std::uint8_t unit;
  int at;
};

// `branch` is the index of the slot before which the branch is inserted.
std::vector<Event> eventsOf(const ScheduledBlock& block, std::size_t branch) {
  std::vector<Event> events;
  for (std::size_t i = 0; i < block.slots.size(); ++i) {
    const isa::Instruction& instruction = block.slots[i].instruction;
    const isa::Access access = isa::accessOf(instruction);
    const auto add = [&](Event::Kind kind, unsigned unit = 0) {
      events.push_back({kind, static_cast<std::uint8_t>(unit), static_cast<int>(i) + (i >= branch ? 1 : 0)});
    };
    if ((access.vpm & isa::kStoreWait) != 0) add(Event::Kind::StoreWait);
    if ((access.vpm & isa::kLoadWait) != 0) add(Event::Kind::LoadWait);
    if (instruction.signal == isa::Signal::LoadTmu0) add(Event::Kind::Receive, 0);
    if (instruction.signal == isa::Signal::LoadTmu1) add(Event::Kind::Receive, 1);
    for (const isa::Write& w : access)
      if (isa::isTmuStart(w.address)) add(Event::Kind::Request, w.address == isa::address::kTmu0S ? 0 : 1);
    if ((access.vpm & isa::kStoreStart) != 0) add(Event::Kind::StoreStart);
    if ((access.vpm & isa::kLoadStart) != 0) add(Event::Kind::LoadStart);
  }
  return events;
}

// Returns the number of rows per transfer. The vectors that the block writes to the VPM, or reads
// from the VPM, are assumed to be distributed equally among the transfers.
int rowsOf(const ScheduledBlock& block, isa::VpmSide vector, isa::VpmSide start) {
  int vectors = 0;
  int transfers = 0;
  for (const Slot& slot : block.slots) {
    const std::uint16_t vpm = isa::accessOf(slot.instruction).vpm;
    vectors += (vpm & vector) != 0 ? 1 : 0;
    transfers += (vpm & start) != 0 ? 1 : 0;
  }
  return transfers == 0 ? 1 : std::max(1, vectors / transfers);
}

struct Costs {
  int request, store, load;
};

// Returns the number of instructions for which the QPU stalls during one execution of the block.
double stallsOf(const std::vector<Event>& events, int size, const std::array<std::uint32_t, 2>& inFlight, bool repeats,
                const Costs& costs) {
  if (events.empty()) return 0;
  std::array<std::deque<int>, 2> arrives;
  std::array<int, 2> last{};
  for (std::size_t u = 0; u < 2; ++u) arrives[u].assign(std::min(inFlight[u], kTmuDepth), 0);
  int stored = 0;
  int loaded = 0;
  int stalled = 0;  // the stalls up to the current event
  int half = 0;
  const int iterations = repeats ? kIterations : 1;
  for (int iteration = 0; iteration < iterations; ++iteration) {
    if (iteration == iterations / 2) half = stalled;
    for (const Event& e : events) {
      int now = iteration * size + e.at + stalled;
      const auto waitFor = [&](int until) {
        stalled += std::max(0, until - now);
        now = std::max(now, until);
      };
      switch (e.kind) {
        case Event::Kind::Request:
          last[e.unit] = std::max(now + costs.request, last[e.unit] + kTmuRequest);
          arrives[e.unit].push_back(last[e.unit]);
          break;
        case Event::Kind::Receive:
          if (arrives[e.unit].empty()) break;
          waitFor(arrives[e.unit].front());
          arrives[e.unit].pop_front();
          break;
        case Event::Kind::StoreStart: stored = std::max(now, stored) + costs.store; break;
        case Event::Kind::StoreWait: waitFor(stored); break;
        case Event::Kind::LoadStart: loaded = std::max(now, loaded) + costs.load; break;
        case Event::Kind::LoadWait: waitFor(loaded); break;
      }
    }
  }
  const int counted = iterations - iterations / 2;
  return static_cast<double>(stalled - half) / counted;
}

}  // namespace

std::size_t branchAt(const ScheduledBlock& block, bool isConditional) {
  const std::size_t size = block.slots.size();
  const std::size_t at = size > kDelaySlots ? size - kDelaySlots : 0;
  return isConditional ? std::max(at, static_cast<std::size_t>(block.flagsAt + 1)) : at;
}

Estimate estimate(const ScheduledBlock& block, const Surroundings& around) {
  std::size_t size = block.slots.size();
  std::size_t branch = size;
  if (around.branches) {
    branch = branchAt(block, true);
    size = std::max(size, branch + kDelaySlots) + 1;
  }
  const std::vector<Event> events = eventsOf(block, branch);
  const int store =
      around.qpus * (kDmaStoreSetup + rowsOf(block, isa::kVpmWrite, isa::kStoreStart) * kDmaStoreRow);
  const int load = around.qpus * (kDmaLoadSetup + rowsOf(block, isa::kVpmRead, isa::kLoadStart) * kDmaLoadRow);
  const auto stallsWith = [&](int request) {
    return stallsOf(events, static_cast<int>(size), around.inFlight, around.repeats, {request, store, load});
  };
  const auto instructions = static_cast<double>(size);
  const double stalls = stallsWith(kRequestTime);
  return {instructions + stalls, stalls, instructions + stallsWith(kSlowRequestTime)};
}

}  // namespace qpu::compiler
