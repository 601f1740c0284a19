// The emulator's error messages.
#include <algorithm>

#include "emu/failure.hpp"
#include "isa/text.hpp"

namespace qpu::emu {
const code::Site* Machine::siteOf(std::uint32_t at) const {
  const code::Object* object = launch_->object;
  if (object == nullptr || at >= object->siteOf.size()) return nullptr;
  const std::uint32_t site = object->siteOf[at];
  return site < object->sites.size() ? &object->sites[site] : nullptr;
}

std::string Machine::kernel() const {
  return launch_->object != nullptr ? launch_->object->name : std::string();
}

std::string Machine::describe(std::uint32_t at) const {
  std::string text = "instruction " + std::to_string(at);
  if (at < program_->count()) text += " (" + isa::disassemble(launch_->words[at]) + ")";
  const code::Site* site = siteOf(at);
  if (site != nullptr) text += " of " + site->description;
  return text;
}

std::string Machine::messagePrefix(const Qpu& q, std::uint32_t at) const {
  return "kernel '" + kernel() + "', QPU " + std::to_string(q.number) + ", " + describe(at) + ": ";
}

detail::ErrorFacts Machine::facts(const Qpu& q, std::uint32_t at, std::uint32_t address) const {
  const code::Site* site = siteOf(at);
  return {kernel(), site != nullptr ? site->construct : std::string(),
          static_cast<int>(q.number), address};
}

void Machine::failOutside(const Qpu& q, std::uint32_t at, std::uint32_t address,
                          const std::string& what) const {
  fail<BoundsError>(q, at,
                    what + " bus address " + detail::hex(address) +
                        ", outside of every SharedArray; " + memory_.nearest(address),
                    address);
}

void Machine::failTimeOut(const Qpu& q, std::uint32_t at) const {
  const Board& board = launch_->board != nullptr ? *launch_->board : kDefaultBoard;
  constexpr double kMilliseconds = 1e3;
  const auto time = static_cast<std::uint64_t>(static_cast<double>(launch_->clockLimit) *
                                               kMilliseconds / board.clockHz);
  fail<ExecutionError>(q, at,
                       "the kernel has not finished within " + std::to_string(time) + " ms (" +
                           std::to_string(launch_->clockLimit) + " clocks of the modelled " +
                           board.name + "). It loops forever, or QPU_TIMEOUT_MS is too low");
}

void Machine::reportUncertain(const Qpu& q, std::uint32_t at, const std::string& what,
                    const std::string& assumed) {
  if (!launch_->lenient)
    fail<ExecutionError>(q, at, what + ". With QPU_EMULATOR=lenient this is a warning");
  if (std::find(warned_.begin(), warned_.end(), at) != warned_.end()) return;
  warned_.push_back(at);
  report_.warnings.push_back(messagePrefix(q, at) + what + "; assumed: " + assumed);
}

std::string Machine::describeWriter(Tag writer) const {
  const std::string qpu = "QPU " + std::to_string(History::qpuOf(writer));
  const std::uint32_t at = history_.instructionOf(writer);
  return at == History::kUnknown ? qpu : qpu + ", " + describe(at);
}

std::string Machine::describe(const Poison& p) const {
  std::string where = "bus address " + detail::hex(p.address) + ", ";
  switch (p.kind) {
    case Poison::Kind::Outside:
      return where + "outside of every SharedArray; " + memory_.nearest(p.address);
    case Poison::Kind::Stale:
      return where + "written by " + describeWriter(p.writer) +
             " after a cache had fetched its cache line, so hardware can still return the old "
             "data; read the data by DMA, or in another launch";
    case Poison::Kind::Unordered:
      return where + "which might not have been written yet by " + describeWriter(p.writer) +
             ": the accesses are not ordered by a wait for that DMA store, a semaphore or the mutex";
  }
  return where;
}

void Machine::failPoisoned(const Qpu& q, std::uint32_t at, PoisonNumber number) const {
  const Poison& p = poisons_[number - 1U];
  const std::string text = "element " + std::to_string(p.element) +
                           " of a vector that was received and is used by " + describe(at) +
                           " came from " + describe(p);
  if (p.kind == Poison::Kind::Outside) fail<BoundsError>(q, p.instruction, text, p.address);
  fail<ExecutionError>(q, p.instruction, text, p.address);
}

void Machine::deadlock() const {
  std::string text;
  for (const Qpu& q : qpus_) {
    if (q.state == State::Ended) continue;
    text += text.empty() ? "" : "; ";
    text += "QPU " + std::to_string(q.number) + " in " + describe(q.next);
    if (q.state == State::AtSemaphore)
      text += " for semaphore " + std::to_string(q.awaited) + ", which is " +
              std::to_string(semaphores_[q.awaited]);
    else
      text += " for the mutex, which QPU " + std::to_string(mutexHolder_->number) + " holds";
  }
  detail::raise<DeadlockError>(
      "kernel '" + kernel() + "': deadlock; every QPU that has not finished is waiting: " + text,
      {kernel(), "semaphore", -1, 0});
}

void Machine::requireBalancedSemaphores() const {
  for (std::size_t i = 0; i < semaphores_.size(); ++i)
    if (semaphores_[i] != 0)
      detail::raise<ExecutionError>(
          "kernel '" + kernel() + "': semaphore " + std::to_string(i) + " is " +
              std::to_string(semaphores_[i]) +
              " at the end, but must be 0; on hardware, the next kernel would start with this "
              "value",
          {kernel(), "semaphore", -1, 0});
}

}  // namespace qpu::emu
