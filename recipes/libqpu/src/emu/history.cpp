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

History::Page& History::page(std::uint32_t region, std::uint32_t word) {
  std::unique_ptr<Page>& p = regions_[region].pages[word / kPageWords];
  if (p == nullptr) p = std::make_unique<Page>();
  return *p;
}

bool History::isClean(std::uint32_t region, std::uint32_t address, std::uint32_t words,
                      std::uint32_t qpu) const {
  const Shadow& s = regions_[region];
  const std::uint32_t first = (address - s.base) / 4;
  for (std::uint32_t word = first; word < first + words;) {
    const Page* p = s.pages[word / kPageWords].get();
    const std::uint32_t at = word % kPageWords;
    const std::uint32_t n = std::min(first + words - word, kPageWords - at);
    word += n;
    if (p == nullptr) continue;
    Tag any = 0;
    for (std::uint32_t i = 0; i < n; ++i) any |= p->tags[at + i];
    if (any == 0) continue;
    for (std::uint32_t i = 0; i < n; ++i)
      if (p->stale[at + i] || !isOver(p->tags[at + i], qpu)) return false;
  }
  return true;
}

Tag History::write(std::uint32_t region, std::uint32_t address, std::uint32_t words,
                   std::uint32_t qpu, std::uint32_t& conflict) {
  Shadow& s = regions_[region];
  s.written = true;
  const Tag by = tagOfDma(qpu, false);
  const std::uint32_t first = (address - s.base) / 4;
  for (std::uint32_t word = first; word < first + words; ++word) {
    Page& p = page(region, word);
    Tag& t = p.tags[word % kPageWords];
    if (!mayOverwrite(t, qpu)) {
      conflict = s.base + 4 * word;
      return t;
    }
    t = by;
    if (s.fetched[word / (kLine / 4)]) p.stale[word % kPageWords] = true;
  }
  return 0;
}

bool History::writeVpmRow(std::uint32_t row, std::uint32_t qpu) {
  Tag* const tags = vpm_.data() + std::size_t{kVpmColumns} * row;
  const Tag by = tagOfQpu(qpu);
  Tag last = 0;
  for (std::uint32_t i = 0; i < kVpmColumns; ++i) {
    if (tags[i] != last && !mayOverwrite(tags[i], qpu)) return false;
    last = tags[i];
    tags[i] = by;
  }
  return true;
}

}  // namespace qpu::emu
