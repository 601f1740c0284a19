#include "emu/history.hpp"

#include <algorithm>

namespace qpu::emu {
namespace {

constexpr std::uint32_t kLine = 64;
constexpr std::uint32_t kLineWords = kLine / 4;
constexpr std::size_t kSparePages = 64;

}  // namespace

void History::clear() {
  for (const std::uint32_t r : opened_)
    for (PageNote& note : regions_[r].pages)
      if (note.page != nullptr && spare_.size() < kSparePages) {
        *note.page = Page();
        spare_.push_back(std::move(note.page));
      }
  for (const std::uint32_t r : opened_) empty(regions_[r].pages);
  opened_.clear();
  for (auto& s : started_) empty(s);
}

void History::reset(const std::vector<Region>& regions, std::size_t qpus) {
  clear();
  shared_ = qpus > 1;
  times_ = {};
  for (std::uint32_t q = 0; q < kQpus; ++q) times_[q][q] = 1;
  vpm_ = {};
  regions_.resize(regions.size());
  for (std::size_t i = 0; i < regions.size(); ++i) {
    Shadow& s = regions_[i];
    s.base = regions[i].start & ~(kLine - 1);
    s.words = (regions[i].start + regions[i].bytes - s.base + 3) / 4;
    s.written = false;
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

void History::open(std::uint32_t region) {
  opened_.push_back(region);
  regions_[region].pages.resize(regions_[region].words / kPageWords + 1);
}

void History::fetch(std::uint32_t region, std::uint32_t address, std::uint32_t bytes) {
  std::vector<PageNote>& pages = touch(region);
  const std::uint32_t base = regions_[region].base;
  const std::uint32_t last = (address + bytes - 1 - base) / kLine;
  for (std::uint32_t line = (address - base) / kLine; line <= last; ++line)
    pages[line / kPageLines].fetched |= std::uint64_t{1} << line % kPageLines;
}

Tag History::writer(std::uint32_t region, std::uint32_t address) const {
  const Shadow& s = regions_[region];
  const std::uint32_t word = (address - s.base) / 4;
  const Page* const page = find(s, word);
  return page != nullptr ? page->tags[word % kPageWords] : 0;
}

bool History::isStale(std::uint32_t region, std::uint32_t address) const {
  const Shadow& s = regions_[region];
  const std::uint32_t word = (address - s.base) / 4;
  const Page* const page = find(s, word);
  return page != nullptr && page->stale[word % kPageWords];
}

History::Page& History::make(PageNote& note) {
  if (spare_.empty()) {
    note.page = std::make_unique<Page>();
  } else {
    note.page = std::move(spare_.back());
    spare_.pop_back();
  }
  return *note.page;
}

bool History::isClean(std::uint32_t region, std::uint32_t address, std::uint32_t words,
                      std::uint32_t qpu) const {
  const Shadow& s = regions_[region];
  const std::uint32_t first = (address - s.base) / 4;
  for (std::uint32_t word = first; word < first + words;) {
    const Page* const p = find(s, word);
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
  std::vector<PageNote>& pages = touch(region);
  Shadow& s = regions_[region];
  s.written = true;
  const Tag by = tagOfDma(qpu, false);
  const std::uint32_t first = (address - s.base) / 4;
  for (std::uint32_t word = first; word < first + words; ++word) {
    PageNote& note = pages[word / kPageWords];
    Page& p = note.page != nullptr ? *note.page : make(note);
    Tag& t = p.tags[word % kPageWords];
    if (!mayOverwrite(t, qpu)) {
      conflict = s.base + 4 * word;
      return t;
    }
    t = by;
    const std::uint32_t line = word / kLineWords % kPageLines;
    if ((note.fetched >> line & 1U) != 0) p.stale[word % kPageWords] = true;
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
