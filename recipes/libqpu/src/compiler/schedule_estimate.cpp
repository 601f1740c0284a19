#include "compiler/schedule_estimate.hpp"

#include <algorithm>
#include <deque>
#include <vector>

#include "isa/access.hpp"

namespace qpu::compiler {
namespace {

// In instructions of 4 clocks, as the emulator's model has them for a QPU that has memory and DMA for itself.
constexpr int kRequestTakes = 36;
constexpr int kRequestEvery = 4;   // of one TMU: 16 words, one a clock
constexpr int kStoreTakes = 57;
constexpr int kLoadTakes = 20;
constexpr int kRuns = 12;          // of what repeats; the first half is not counted

struct Event {
  enum class Kind : std::uint8_t { Request, Receive, StoreStart, StoreWait, LoadStart, LoadWait };
  Kind kind;
  std::uint8_t unit;
  int at;
};

std::vector<Event> eventsOf(const ScheduledBlock& block) {
  std::vector<Event> events;
  for (std::size_t i = 0; i < block.slots.size(); ++i) {
    const isa::Instruction& instruction = block.slots[i].instruction;
    const isa::Access access = isa::accessOf(instruction);
    const auto add = [&](Event::Kind kind, unsigned unit = 0) {
      events.push_back({kind, static_cast<std::uint8_t>(unit), static_cast<int>(i)});
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

}  // namespace

double estimate(const ScheduledBlock& block, const std::array<std::uint32_t, 2>& inFlight, bool repeats) {
  const std::vector<Event> events = eventsOf(block);
  const int size = static_cast<int>(block.slots.size());
  if (events.empty()) return size;
  std::array<std::deque<int>, 2> arrives;
  std::array<int, 2> last{};
  for (std::size_t u = 0; u < 2; ++u) arrives[u].assign(std::min(inFlight[u], kTmuDepth), 0);
  int stored = 0;
  int loaded = 0;
  int waited = 0;  // so far
  int half = 0;
  const int runs = repeats ? kRuns : 1;
  for (int run = 0; run < runs; ++run) {
    if (run == runs / 2) half = waited;
    for (const Event& e : events) {
      int now = run * size + e.at + waited;
      const auto waitFor = [&](int until) {
        waited += std::max(0, until - now);
        now = std::max(now, until);
      };
      switch (e.kind) {
        case Event::Kind::Request:
          last[e.unit] = std::max(now + kRequestTakes, last[e.unit] + kRequestEvery);
          arrives[e.unit].push_back(last[e.unit]);
          break;
        case Event::Kind::Receive:
          if (arrives[e.unit].empty()) break;
          waitFor(arrives[e.unit].front());
          arrives[e.unit].pop_front();
          break;
        case Event::Kind::StoreStart: stored = std::max(now, stored) + kStoreTakes; break;
        case Event::Kind::StoreWait: waitFor(stored); break;
        case Event::Kind::LoadStart: loaded = std::max(now, loaded) + kLoadTakes; break;
        case Event::Kind::LoadWait: waitFor(loaded); break;
      }
    }
  }
  return size + static_cast<double>(waited - half) / (runs - runs / 2);
}

}  // namespace qpu::compiler
