#include "compiler/schedule_files.hpp"

#include <algorithm>

namespace qpu::compiler {
namespace {

namespace address = isa::address;

constexpr int kManyFree = 16;       // with this many free registers, results need not be placed in home registers
constexpr int kAlternateCost = 4;   // the same as the cost of placing two operands of an operation in one file
constexpr unsigned kUsersChecked = 4;

std::size_t indexOf(std::uint8_t file) { return file == kToA ? 0 : file == kToB ? 1 : 2; }

}  // namespace

void Bundle::add(const Candidate& candidate) {
  candidates[count++] = &candidate;
  if (candidate.pipes != 0) ++alus;
  if (candidate.portA != address::kNop) portA = candidate.portA;
  if (candidate.portB != address::kNop) portB = candidate.portB;
  if (candidate.small >= 0) small = candidate.small;
  exclusive |= candidate.exclusive;
  receives |= candidate.takesR4 && candidate.pipes == 0;
  isFull |= candidate.fillsInstruction;
}

FreeRegisters FileChooser::freeAfter(const Bundle& bundle, const Candidate& extra) const {
  FreeRegisters free{state_.freeA, state_.freeB, state_.availableAccumulators(), state_.occupant[kR4] == kNone,
                     state_.occupant[kR5] == kNone};
  std::array<std::uint32_t, 8> read{};
  unsigned count = 0;
  const auto collect = [&](const Candidate& candidate) {
    for (const std::uint32_t v : candidate.reads)
      if (v != kNone) read[count++] = v;
    if (candidate.relocates) addFree(free, state_.values[candidate.value].main);
  };
  for (const Candidate* candidate : bundle) collect(*candidate);
  collect(extra);
  for (unsigned k = 0; k < count; ++k) {
    const std::uint32_t v = read[k];
    if (state_.values[v].updates != 0 || state_.graph.values[v].liveOut) continue;
    const auto times = std::count(read.begin(), read.begin() + count, v);
    if (static_cast<std::uint32_t>(times) < state_.values[v].reads) continue;
    addFree(free, state_.values[v].main);
    addFree(free, state_.values[v].copy);
  }
  return free;
}

void FileChooser::addFree(FreeRegisters& free, Place p) const {
  if (p == kNowhere) return;
  if (isFileA(p)) free.a |= registerBit(p) & state_.poolA;
  if (isFileB(p)) free.b |= registerBit(p) & state_.poolB;
  if (isAccumulator(p)) free.accumulators |= 1U << (p - kR0);
  free.r4 |= p == kR4;
  free.r5 |= p == kR5;
}

Place FileChooser::openHome(const Candidate& candidate) const {
  const Value& v = state_.graph.values[valueOf(candidate)];
  if (v.home == kNowhere || v.liveOut) return kNowhere;
  const std::uint32_t occupant = state_.occupant[v.home];
  if (occupant == kNone) return v.home;
  const bool dies = (occupant == candidate.reads[0] || occupant == candidate.reads[1]) &&
                    state_.values[occupant].reads == 1 && state_.values[occupant].updates == 0 &&
                    !state_.graph.values[occupant].liveOut;
  return dies ? v.home : kNowhere;
}

std::uint8_t FileChooser::choices(const Candidate& candidate, const FreeRegisters& free) const {
  if (!candidate.choosesPlace) return candidate.files;
  const Place home = openHome(candidate);
  // The home register is not suitable if the value is copied for an operation that cannot read
  // this register.
  const bool canGoHome =
      home != kNowhere && (candidate.files == 0 || (candidate.files & fileOf(home)) != 0);
  if (canGoHome && !candidate.prefersAccumulator && state_.freeRegisters() < kManyFree) return fileOf(home);
  const auto open = static_cast<std::uint8_t>((free.a != 0 ? kToA : 0) | (free.b != 0 ? kToB : 0) |
                                              (free.accumulators != 0 ? kToNeither : 0) |
                                              (home != kNowhere ? fileOf(home) : 0));
  return candidate.files == 0 ? open : static_cast<std::uint8_t>(open & candidate.files);
}

bool FileChooser::canPair(const Candidate& p, std::uint8_t x, const Candidate& q, std::uint8_t y,
                          const FreeRegisters& free) {
  if (x == y && x != kToNeither) return false;
  if (x == kToNeither && y == kToNeither && p.choosesPlace && q.choosesPlace)
    return (free.accumulators & (free.accumulators - 1)) != 0;
  return true;
}

std::array<int, 3> FileChooser::costs(const Candidate& candidate) const {
  const std::uint32_t v = valueOf(candidate);
  std::array<int, 3> cost{2, 2, 9};
  const Value& value = state_.graph.values[v];
  if (candidate.isCopy() && candidate.copyFor != kNone) cost[2] = 0;
  if (state_.values[v].rotations != 0) cost[2] = -10;
  else if (value.updates == 0 && state_.isShortLived(v)) cost[2] = 0;
  unsigned checked = 0;
  for (const std::uint32_t u : state_.users(v)) {
    if (state_.nodes[u].done) continue;
    if (++checked > kUsersChecked) break;
    const Node& node = state_.graph.nodes[u];
    for (const Source* s : {&node.a, &node.b}) {
      if (s->kind == Source::Kind::Small) cost[1] += 4;
      if (!s->isValue() || s->number == v || state_.values[s->number].copy != kNowhere) continue;
      const Place p = state_.values[s->number].main;
      if (p == kNowhere) continue;
      if (isFileA(p)) cost[0] += 4;
      if (isFileB(p)) cost[1] += 4;
    }
    if (node.quadSource) cost[1] += 4;
  }
  // An instruction reads at most one register from each file. A MUL-pipe read from one file
  // should therefore be paired with an ADD-pipe read from the other file.
  std::array<int, 2> partners{};
  for (std::size_t file = 0; file < 2; ++file) {
    if (state_.values[v].byPipe[1] != 0) partners[file] += state_.fileReads[0][1 - file] - state_.fileReads[1][file];
    if (state_.values[v].byPipe[0] != 0) partners[file] += state_.fileReads[1][1 - file] - state_.fileReads[0][file];
  }
  if (partners[0] < partners[1]) cost[0] += 2;
  if (partners[1] < partners[0]) cost[1] += 2;
  // Vectors that are read from the VPM one after the other are often used together.
  if (state_.options.alternateFiles && isFile(state_.lastInput) && !candidate.isCopy() &&
      state_.graph.nodes[candidate.node].a.kind == Source::Kind::ReadEither)
    cost[isFileA(state_.lastInput) ? 0 : 1] += kAlternateCost;
  const int a = __builtin_popcount(state_.freeA);
  const int b = __builtin_popcount(state_.freeB);
  if (a < b) ++cost[0];
  if (b < a) ++cost[1];
  // The home register costs nothing, because it is reserved for this value.
  const Place home = openHome(candidate);
  if (home != kNowhere && a + b < kManyFree) cost[isFileA(home) ? 0 : 1] -= 6;
  return cost;
}

std::array<std::uint8_t, 2> FileChooser::choose(const std::array<const Candidate*, 2>& alus,
                                                const FreeRegisters& free) const {
  std::array<std::array<int, 3>, 2> cost{};
  std::array<std::uint8_t, 2> open{};
  for (std::size_t k = 0; k < 2; ++k) {
    if (alus[k] == nullptr) continue;
    open[k] = choices(*alus[k], free);
    if (alus[k]->choosesPlace) cost[k] = costs(*alus[k]);
  }
  std::array<std::uint8_t, 2> best{};
  int least = INT32_MAX;
  for (const std::uint8_t x : kFiles) {
    if ((open[0] & x) == 0) continue;
    if (alus[1] == nullptr) {
      if (cost[0][indexOf(x)] < least) {
        least = cost[0][indexOf(x)];
        best = {x, 0};
      }
      continue;
    }
    for (const std::uint8_t y : kFiles) {
      if ((open[1] & y) == 0 || !canPair(*alus[0], x, *alus[1], y, free)) continue;
      const int sum = cost[0][indexOf(x)] + cost[1][indexOf(y)];
      if (sum < least) {
        least = sum;
        best = {x, y};
      }
    }
  }
  return best;
}

Place FileChooser::take(std::uint8_t file, const Candidate& candidate) {
  if (file == kToNeither) {
    for (Place p = kR0; p < kR4; ++p)
      if (state_.occupant[p] == kNone) return p;
    for (Place p = kR0; p < kR4; ++p) {
      if (!state_.isDroppable(p)) continue;
      state_.dropCopy(state_.occupant[p]);
      return p;
    }
    return kNowhere;
  }
  // Prefer the home register, because other values cannot use it.
  const Value& v = state_.graph.values[valueOf(candidate)];
  if (v.home != kNowhere && !v.liveOut && fileOf(v.home) == file && state_.occupant[v.home] == kNone)
    return v.home;
  const std::uint32_t free = file == kToA ? state_.freeA : state_.freeB;
  return static_cast<Place>((file == kToA ? 0 : kFileB) + __builtin_ctz(free));
}

}  // namespace qpu::compiler
