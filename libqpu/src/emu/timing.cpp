#include "emu/timing.hpp"

#include <algorithm>
#include <cmath>

namespace qpu::emu {
namespace {

constexpr std::uint32_t kWays = 4;  // associativity of the instruction, uniform and L2 caches
// The number of uses after which reset() restarts the use counter.
constexpr std::uint32_t kManyUses = 1U << 24U;

Ticks ticks(double clocks) {
  return static_cast<Ticks>(std::llround(clocks * (1U << kTickBits)));
}
Clock whole(double clocks) { return static_cast<Clock>(std::llround(clocks)); }
std::uint32_t size(double bytes) { return static_cast<std::uint32_t>(bytes); }

}  // namespace

void Cache::reset(std::uint32_t bytes, std::uint32_t ways) {
  const std::uint32_t lines = bytes / kLineBytes;
  if (lines == ways_.size() && ways == perSet_ && time_ < kManyUses) {
    reset_ = time_;
    return;
  }
  perSet_ = ways;
  sets_ = lines / ways;
  time_ = 0;
  reset_ = 0;
  ways_.assign(lines, Way{});
}

const Clock* Cache::find(std::uint32_t line) {
  Way* const w = set(line);
  for (std::uint32_t i = 0; i < perSet_; ++i)
    if (w[i].line == line && w[i].used > reset_) {
      w[i].used = ++time_;
      return &w[i].arrives;
    }
  return nullptr;
}

void Cache::put(std::uint32_t line, Clock arrives) {
  Way* const w = set(line);
  Way* const oldest = std::min_element(
      w, w + perSet_, [](const Way& a, const Way& b) { return a.used < b.used; });
  *oldest = {line, ++time_, arrives};
}

void Timing::reset(const Board& board) {
  for (Cache& c : code_) c.reset(size(board.icacheBytes), kWays);
  for (Cache& c : uniforms_) c.reset(size(board.uniformCacheBytes), kWays);
  for (Cache& c : l1_) c.reset(size(board.l1Bytes), 1);
  l2_.reset(size(board.l2Bytes), kWays);
  tmus_ = {};
  l2Port_ = {};
  memory_ = {};
  vpmPort_ = {};
  pages_.fill(UINT32_MAX);
  l2Ticks_ = ticks(kLineBytes / board.l2BytesPerClock);
  memoryTicks_ = ticks(kLineBytes / board.memoryBytesPerClock());
  pageTicks_ = ticks(board.clocksOfNs(board.pageMissNs));
  tmuTicks_ = ticks(board.tmuRequestClocks);
  vpmTicks_ = ticks(board.vpmPortClocks);
  tmuL1_ = whole(board.tmuL1Clocks);
  tmuL2_ = whole(board.tmuL2Clocks);
  tmuMemory_ = whole(board.tmuMemoryClocks);
  fetchL2_ = whole(board.fetchL2Clocks);
  fetchMemory_ = whole(board.fetchMemoryClocks);
  vpmSetup_ = whole(board.vpmSetupClocks);
  semaphore_ = whole(board.semaphoreClocks);
  sfu_ = whole(board.sfuClocks);
  const auto ofNs = [&board](double ns) { return ticks(board.clocksOfNs(ns)); };
  stores_ = {ofNs(board.storeNs), ofNs(board.storeBurstNs), ofNs(board.storeWordNs)};
  loads_ = {ofNs(board.loadNs), ofNs(board.loadBurstNs), ofNs(board.loadWordNs)};
  traffic_ = {};
}

// Returns the time at which an access that takes `ticks` begins. Sets `opening` to the additional
// time that opening the page takes.
Ticks Timing::takeMemory(std::uint32_t address, Ticks now, Ticks ticks, Ticks& opening) {
  const std::uint32_t page = address / kPageBytes;
  std::uint32_t& open = pages_[page % kBanks];
  opening = open == page ? 0 : pageTicks_;
  open = page;
  return memory_.takeTicks(now, ticks + opening);
}

// Accesses a cache line in the L2 cache, and fetches the line from memory if it is not there.
// Returns the time at which the line arrives, which is `hit` or `miss` clocks after the start of
// the access.
Clock Timing::l2Line(std::uint32_t line, Clock now, Clock hit, Clock miss) {
  const Clock turn = l2Port_.take(now, l2Ticks_);
  const Clock* const cached = l2_.find(line);
  if (cached != nullptr) return std::max(turn + hit, *cached);
  traffic_.readBytes += kLineBytes;
  Ticks opening = 0;
  const Ticks begin = takeMemory(line * kLineBytes, turn << kTickBits, memoryTicks_, opening);
  const Clock arrives = ((begin + opening) >> kTickBits) + miss;
  l2_.put(line, arrives);
  return arrives;
}

Clock Timing::codeLine(std::uint32_t slice, std::uint32_t line) {
  const Clock* const cached = code_[slice].find(line);
  return cached != nullptr ? *cached : kNever;
}

Clock Timing::fetchCode(std::uint32_t slice, std::uint32_t line, Clock now) {
  const Clock arrives = l2Line(line, now, fetchL2_, fetchMemory_);
  code_[slice].put(line, arrives);
  return arrives;
}

Clock Timing::uniformLine(std::uint32_t slice, std::uint32_t line, Clock now) {
  const Clock* const cached = uniforms_[slice].find(line);
  if (cached != nullptr) return std::max(*cached, now);
  const Clock arrives = l2Line(line, now, fetchL2_, fetchMemory_);
  uniforms_[slice].put(line, arrives);
  return arrives;
}

Clock Timing::tmu(std::uint32_t unit, Clock now, const Vector& addresses) {
  const Clock turn = tmus_[unit].take(now, tmuTicks_);
  Clock all = 0;
  std::uint32_t last = UINT32_MAX;
  for (const std::uint32_t address : addresses.e) {
    const std::uint32_t line = lineOf(Space::Memory, address);
    if (line == last) continue;
    last = line;
    const Clock* const cached = l1_[unit].find(line);
    Clock arrives = 0;
    if (cached != nullptr) {
      arrives = std::max(turn + tmuL1_, *cached);
    } else {
      arrives = l2Line(line, turn, tmuL2_, tmuMemory_);
      l1_[unit].put(line, arrives);
    }
    all = std::max(all, arrives);
  }
  return all;
}

// Transfers a row in bursts of one cache line. DMA is served before the cache lines that the L2
// cache is waiting for. If DMA had to queue behind these cache lines, an engine would wait again
// for each row, and more outstanding loads would slow down stores. It has not been published
// whether the SDRAM controller prefers DMA or cache lines. Each burst occupies the VPM in the same
// way as a vector.
Ticks Timing::dmaRow(bool load, std::uint32_t address, std::uint32_t bytes, Ticks now) {
  const std::uint32_t bursts = (bytes + kLineBytes - 1) / kLineBytes;
  const DmaCosts& c = costs(load);
  const Ticks own = bursts * c.burst + (bytes + 3) / 4 * c.word;
  (load ? traffic_.readBytes : traffic_.writeBytes) += bytes;
  Ticks opening = 0;
  (void)takeMemory(address, now, memoryTicks_ * bytes / kLineBytes, opening);
  (void)vpmPort_.takeTicks(now, bursts * vpmTicks_);
  return now + opening + own;
}

void Engine::start(const Job& job, Clock now) {
  if (jobs_.empty()) next_ = (now << kTickBits) + timing_.dmaSetup(load_);
  jobs_.push_back(job);
}

std::uint32_t Engine::step(Clock& ended) {
  Job& job = jobs_.front();
  const Ticks free = timing_.dmaRow(load_, job.address, job.rowBytes, next_);
  if (--job.rows != 0) {
    job.address += job.pitch;
    next_ = free;
    return kNone;
  }
  const std::uint32_t qpu = job.qpu;
  jobs_.pop_front();
  ended = (free + (1U << kTickBits) - 1) >> kTickBits;
  next_ = jobs_.empty() ? kNever : free + timing_.dmaSetup(load_);
  return qpu;
}

}  // namespace qpu::emu
