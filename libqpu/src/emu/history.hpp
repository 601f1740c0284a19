// Who has written what in this launch, and in which order: vector clocks through
// semaphores, the mutex and the waits for DMA. Threads are the QPUs and the DMA
// engines on behalf of each, for a store is done only when it has been waited for.
#ifndef QPU_SRC_EMU_HISTORY_HPP
#define QPU_SRC_EMU_HISTORY_HPP

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "emu/emulator.hpp"
#include "emu/vpm.hpp"

namespace qpu::emu {

// Empty, with room for a few elements at most.
template <typename T>
void empty(std::vector<T>& v) {
  constexpr std::size_t few = 1024;
  v.clear();
  if (v.capacity() > few) v.shrink_to_fit();
}

// A write: thread and its time then. 0 is none.
using Tag = std::uint32_t;

class History {
 public:
  static constexpr std::uint32_t kQpus = 12;
  static constexpr std::uint32_t kThreads = 3 * kQpus;
  using Times = std::array<std::uint32_t, kThreads>;

  // Nothing has been written.
  void reset(const std::vector<Region>& regions, std::size_t qpus);
  // Forgets all, and gives back what a large launch took of memory.
  void clear();

  // Order.
  void release(std::uint32_t qpu, Times& at);
  void acquire(std::uint32_t qpu, const Times& from);
  void start(std::uint32_t qpu, bool load, std::uint32_t instruction);
  void await(std::uint32_t qpu, bool load);

  Tag tagOfQpu(std::uint32_t qpu) const { return tag(qpu, times_[qpu][qpu]); }
  Tag tagOfDma(std::uint32_t qpu, bool load) const {
    const std::uint32_t t = engine(qpu, load);
    return tag(t, static_cast<std::uint32_t>(started_[t].size()));
  }
  // Whether the write is over for the QPU, and whether it may write there too:
  // its own writes are always in order.
  bool isOver(Tag t, std::uint32_t qpu) const {
    return t == 0 || times_[qpu][thread(t)] >= time(t);
  }
  bool mayOverwrite(Tag t, std::uint32_t qpu) const {
    return isOver(t, qpu) || qpuOf(t) == qpu;
  }
  static std::uint32_t qpuOf(Tag t) { return thread(t) % kQpus; }
  // The instruction that started the DMA which wrote, kUnknown for a QPU's own writes.
  static constexpr std::uint32_t kUnknown = UINT32_MAX;
  std::uint32_t instructionOf(Tag t) const;

  // Memory. Addresses lie in the region.
  bool isWritten(std::uint32_t region) const { return regions_[region].written; }
  void fetch(std::uint32_t region, std::uint32_t address, std::uint32_t bytes);
  Tag writer(std::uint32_t region, std::uint32_t address) const;
  // Written after a cache had fetched its line.
  bool isStale(std::uint32_t region, std::uint32_t address) const;
  // Whether the caches have all of these words as they are.
  bool isClean(std::uint32_t region, std::uint32_t address, std::uint32_t words,
               std::uint32_t qpu) const;
  // Writes by a QPU's DMA. Should a word have a write that the QPU must not write
  // over, the rest is left, `conflict` is that word's address and the result its
  // tag; otherwise 0.
  Tag write(std::uint32_t region, std::uint32_t address, std::uint32_t words, std::uint32_t qpu,
            std::uint32_t& conflict);

  // The VPM's words.
  Tag& vpm(std::uint32_t word) { return vpm_[word]; }
  // Notes that a QPU writes a whole row; false when there is a word it must not.
  bool writeVpmRow(std::uint32_t row, std::uint32_t qpu);
  bool isShared() const { return shared_; }  // by several QPUs

 private:
  static constexpr unsigned kTimeBits = 26;
  static constexpr std::uint32_t kPageWords = 1024;
  static constexpr std::uint32_t kPageLines = kPageWords / 16;
  static_assert(kPageLines == 64, "a bit of PageNote::fetched each");
  struct Page {
    std::array<Tag, kPageWords> tags{};
    std::array<bool, kPageWords> stale{};
  };
  struct PageNote {
    std::uint64_t fetched = 0;  // lines, a bit each
    std::unique_ptr<Page> page;  // null before the first write
  };
  struct Shadow {
    std::uint32_t base = 0;   // of the first line
    std::uint32_t words = 0;  // from there
    bool written = false;
    std::vector<PageNote> pages;  // none before the first access
  };

  // Null when nothing was written there.
  static const Page* find(const Shadow& s, std::uint32_t word) {
    return s.written ? s.pages[word / kPageWords].page.get() : nullptr;
  }
  std::vector<PageNote>& touch(std::uint32_t region) {
    Shadow& s = regions_[region];
    if (s.pages.empty()) open(region);
    return s.pages;
  }
  void open(std::uint32_t region);
  Page& make(PageNote& note);
  static Tag tag(std::uint32_t thread, std::uint32_t time) { return thread << kTimeBits | time; }
  static std::uint32_t thread(Tag t) { return t >> kTimeBits; }
  static std::uint32_t time(Tag t) { return t & ((1U << kTimeBits) - 1U); }
  static std::uint32_t engine(std::uint32_t qpu, bool load) {
    return qpu + (load ? 2 : 1) * kQpus;
  }

  bool shared_ = false;
  std::array<Times, kQpus> times_{};
  std::array<std::vector<std::uint32_t>, kThreads> started_;  // instructions of DMAs
  std::vector<Shadow> regions_;
  std::vector<std::uint32_t> opened_;         // regions with pages
  std::vector<std::unique_ptr<Page>> spare_;  // blank
  std::array<Tag, kVpmWords> vpm_{};
};

}  // namespace qpu::emu

#endif
