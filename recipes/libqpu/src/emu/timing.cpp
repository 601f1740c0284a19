#include "emu/timing.hpp"

#include <algorithm>
#include <cmath>

namespace qpu::emu {
namespace {

constexpr std::uint32_t kWays = 4;  // of instruction, uniform and L2 cache
// Uses after which the count of them begins anew with the next launch.
constexpr std::uint32_t kManyUses = 1U << 24U;

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

std::uint64_t Channel::ticks(double clocks) {
  return static_cast<std::uint64_t>(std::llround(clocks * (1U << kBits)));
}

void Timing::reset(const Board& board) {
  board_ = &board;
  for (Cache& c : code_) c.reset(board.icacheBytes, kWays);
  for (Cache& c : uniforms_) c.reset(board.uniformCacheBytes, kWays);
  for (Cache& c : l1_) c.reset(board.l1Bytes, 1);
  l2_.reset(board.l2Bytes, kWays);
  tmus_ = {};
  l2Port_ = {};
  memory_ = {};
  l2Ticks_ = Channel::ticks(kLineBytes / board.l2BytesPerClock);
  memoryTicks_ = Channel::ticks(kLineBytes / board.memoryBytesPerClock);
  tmuTicks_ = Channel::ticks(board.tmuRequestClocks);
  traffic_ = {};
}

// A line that the L2 fetches or has: when it arrives, `hit` or `miss` clocks
// after its turn.
Clock Timing::l2Line(std::uint32_t line, Clock now, Clock hit, Clock miss) {
  const Clock turn = l2Port_.take(now, l2Ticks_);
  const Clock* const there = l2_.find(line);
  if (there != nullptr) return std::max(turn + hit, *there);
  traffic_.readBytes += kLineBytes;
  const Clock arrives = memory_.take(turn, memoryTicks_) + miss;
  l2_.put(line, arrives);
  return arrives;
}

Clock Timing::codeLine(std::uint32_t slice, std::uint32_t line) {
  const Clock* const there = code_[slice].find(line);
  return there != nullptr ? *there : kNever;
}

Clock Timing::fetchCode(std::uint32_t slice, std::uint32_t line, Clock now) {
  const Clock arrives = l2Line(line, now, board_->fetchL2Clocks, board_->fetchMemoryClocks);
  code_[slice].put(line, arrives);
  return arrives;
}

Clock Timing::uniformLine(std::uint32_t slice, std::uint32_t line, Clock now) {
  const Clock* const there = uniforms_[slice].find(line);
  if (there != nullptr) return std::max(*there, now);
  const Clock arrives = l2Line(line, now, board_->fetchL2Clocks, board_->fetchMemoryClocks);
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
    const Clock* const there = l1_[unit].find(line);
    Clock arrives = 0;
    if (there != nullptr) {
      arrives = std::max(turn + board_->tmuL1Clocks, *there);
    } else {
      arrives = l2Line(line, turn, board_->tmuL2Clocks, board_->tmuMemoryClocks);
      l1_[unit].put(line, arrives);
    }
    all = std::max(all, arrives);
  }
  return all;
}

// A row moves in bursts of a line; its share of the memory's time comes on top
// when others keep that busy.
Clock Timing::dmaRow(bool load, std::uint32_t bytes, Clock now) {
  const std::uint32_t bursts = (bytes + kLineBytes - 1) / kLineBytes;
  const Clock own = Clock{bursts} * (load ? board_->dmaLoadRowClocks : board_->dmaStoreRowClocks);
  (load ? traffic_.readBytes : traffic_.writeBytes) += bytes;
  const Clock begin = memory_.take(now, memoryTicks_ * bytes / kLineBytes);
  return std::max(begin, now) + own;
}

void Engine::start(std::uint32_t qpu, std::uint32_t rows, std::uint32_t rowBytes, Clock now) {
  if (jobs_.empty()) next_ = now + timing_.dmaSetup(load_);
  jobs_.push_back({qpu, rows, rowBytes});
}

std::uint32_t Engine::step(Clock& ended) {
  Job& job = jobs_.front();
  const Clock free = timing_.dmaRow(load_, job.rowBytes, next_);
  if (--job.rows != 0) {
    next_ = free;
    return kNone;
  }
  const std::uint32_t qpu = job.qpu;
  jobs_.pop_front();
  ended = free;
  next_ = jobs_.empty() ? kNever : free + timing_.dmaSetup(load_);
  return qpu;
}

}  // namespace qpu::emu
