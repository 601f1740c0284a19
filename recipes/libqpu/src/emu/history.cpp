#include "emu/history.hpp"

#include <algorithm>

namespace qpu::emu {
namespace {

constexpr std::uint32_t kLine = 64;

}  // namespace

History::History(const std::vector<Region>& regions, std::size_t qpus)
    : shared_(qpus > 1), regions_(regions.size()) {
  for (std::uint32_t q = 0; q < kQpus; ++q) times_[q][q] = 1;
  for (std::size_t i = 0; i < regions.size(); ++i) {
    Shadow& s = regions_[i];
    s.base = regions[i].start & ~(kLine - 1);
    const std::uint32_t bytes = regions[i].start + regions[i].bytes - s.base;
    s.fetched.resize((bytes + kLine - 1) / kLine);
    s.pages.resize((bytes / 4 + kPageWords) / kPageWords);
  }
}

void History::release(std::uint32_t qpu, Times& at) {
  Times& own = times_[qpu];
  for (std::uint32_t t = 0; t < kThreads; ++t) at[t] = std::max(at[t], own[t]);
  ++own[qpu];
}

void History::acquire(std::uint32_t qpu, const Times& from) {
  Times& own = times_[qpu];
  for (std::uint32_t t = 0; t < kThreads; ++t) own[t] = std::max(own[t], from[t]);
}

void History::start(std::uint32_t qpu, bool load, std::uint32_t instruction) {
  started_[engine(qpu, load)].push_back(instruction);
}

void History::await(std::uint32_t qpu, bool load) {
  const std::uint32_t t = engine(qpu, load);
  times_[qpu][t] = static_cast<std::uint32_t>(started_[t].size());
}

std::uint32_t History::instructionOf(Tag t) const {
  return thread(t) < kQpus ? kUnknown : started_[thread(t)][time(t) - 1];
}

void History::fetch(std::uint32_t region, std::uint32_t address, std::uint32_t bytes) {
  Shadow& s = regions_[region];
  const std::uint32_t last = (address + bytes - 1 - s.base) / kLine;
  for (std::uint32_t line = (address - s.base) / kLine; line <= last; ++line)
    s.fetched[line] = true;
}

Tag History::writer(std::uint32_t region, std::uint32_t address) const {
  const Shadow& s = regions_[region];
  const std::uint32_t word = (address - s.base) / 4;
  const Page* page = s.pages[word / kPageWords].get();
  return page != nullptr ? page->tags[word % kPageWords] : 0;
}

bool History::isStale(std::uint32_t region, std::uint32_t address) const {
  const Shadow& s = regions_[region];
  const std::uint32_t word = (address - s.base) / 4;
  const Page* page = s.pages[word / kPageWords].get();
  return page != nullptr && page->stale[word % kPageWords];
}

Tag History::write(std::uint32_t region, std::uint32_t address, Tag by) {
  Shadow& s = regions_[region];
  s.written = true;
  const std::uint32_t word = (address - s.base) / 4;
  std::unique_ptr<Page>& page = s.pages[word / kPageWords];
  if (page == nullptr) page = std::make_unique<Page>();
  const Tag before = page->tags[word % kPageWords];
  page->tags[word % kPageWords] = by;
  if (s.fetched[(address - s.base) / kLine]) page->stale[word % kPageWords] = true;
  return before;
}

}  // namespace qpu::emu
