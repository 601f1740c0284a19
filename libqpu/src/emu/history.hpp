// Records which thread wrote each word in the current launch. Vector clocks order the writes.
// Semaphores, the mutex and waits for DMA synchronise these clocks. Each QPU, its DMA load engine
// and its DMA store engine count as separate threads, because a DMA store is complete only after a
// wait.
#ifndef QPU_SRC_EMU_HISTORY_HPP
#define QPU_SRC_EMU_HISTORY_HPP

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "emu/emulator.hpp"
#include "emu/vpm.hpp"

namespace qpu::emu {

// Clears v. If v is large, also releases its memory.
template <typename T>
void empty(std::vector<T>& v) {
  constexpr std::size_t few = 1024;
  v.clear();
  if (v.capacity() > few) v.shrink_to_fit();
}

// Identifies a write by the thread that performed it and by the thread's time at the write. 0 means
// that nothing was written.
using Tag = std::uint32_t;

class History {
 public:
  static constexpr std::uint32_t kQpus = 12;
  static constexpr std::uint32_t kThreads = 3 * kQpus;
  using Times = std::array<std::uint32_t, kThreads>;

  // Starts a launch, in which no word has been written yet.
  void reset(const std::vector<Region>& regions, std::size_t qpus);
  // Clears everything. Releases the memory if the launch was large.
  void clear();

  // release(), acquire() and await() synchronise threads. start() records the start of a DMA
  // transfer.
  void release(std::uint32_t qpu, Times& at);
  void acquire(std::uint32_t qpu, const Times& from);
  void start(std::uint32_t qpu, bool load, std::uint32_t instruction);
  void await(std::uint32_t qpu, bool load);

  Tag tagOfQpu(std::uint32_t qpu) const { return tag(qpu, times_[qpu][qpu]); }
  Tag tagOfDma(std::uint32_t qpu, bool load) const {
    const std::uint32_t t = engine(qpu, load);
    return tag(t, static_cast<std::uint32_t>(started_[t].size()));
  }
  // isOver() returns true if the write happened before the QPU's current time. mayOverwrite()
  // returns true if the QPU can overwrite the word. The QPU's own writes are always in order.
  bool isOver(Tag t, std::uint32_t qpu) const {
    return t == 0 || times_[qpu][thread(t)] >= time(t);
  }
  bool mayOverwrite(Tag t, std::uint32_t qpu) const {
    return isOver(t, qpu) || qpuOf(t) == qpu;
  }
  static std::uint32_t qpuOf(Tag t) { return thread(t) % kQpus; }
  // Returns the instruction that started the DMA transfer, or kUnknown if the QPU itself performed
  // the write.
  static constexpr std::uint32_t kUnknown = UINT32_MAX;
  std::uint32_t instructionOf(Tag t) const;

  // Accesses to memory. Each address must be in the region with the given number.
  bool isWritten(std::uint32_t region) const { return regions_[region].written; }
  void fetch(std::uint32_t region, std::uint32_t address, std::uint32_t bytes);
  Tag writer(std::uint32_t region, std::uint32_t address) const;
  // Returns true if the word was written after a cache fetched its cache line.
  bool isStale(std::uint32_t region, std::uint32_t address) const;
  // Returns true if the caches hold the current values of all these words.
  bool isClean(std::uint32_t region, std::uint32_t address, std::uint32_t words,
               std::uint32_t qpu) const;
  // Records a DMA write that QPU number `qpu` started, and returns 0. If the QPU must not overwrite
  // one of the words, returns that word's tag and sets `conflict` to its address. The words after
  // the conflicting word are not recorded.
  Tag write(std::uint32_t region, std::uint32_t address, std::uint32_t words, std::uint32_t qpu,
            std::uint32_t& conflict);

  // Returns the tag of a VPM word.
  Tag& vpm(std::uint32_t word) { return vpm_[word]; }
  // Records that a QPU writes a complete row of the VPM. Returns false if the QPU must not
  // overwrite one of the words.
  bool writeVpmRow(std::uint32_t row, std::uint32_t qpu);
  bool isShared() const { return shared_; }  // returns true if there are several QPUs

 private:
  static constexpr unsigned kTimeBits = 26;
  static constexpr std::uint32_t kPageWords = 1024;
  static constexpr std::uint32_t kPageLines = kPageWords / 16;
  static_assert(kPageLines == 64, "PageNote::fetched must have one bit per cache line");
  struct Page {
    std::array<Tag, kPageWords> tags{};
    std::array<bool, kPageWords> stale{};
  };
  struct PageNote {
    std::uint64_t fetched = 0;  // one bit per cache line
    std::unique_ptr<Page> page;  // null before the first write
  };
  struct Shadow {
    std::uint32_t base = 0;   // address of the first cache line
    std::uint32_t words = 0;  // number of words from `base`
    bool written = false;
    std::vector<PageNote> pages;  // empty before the first access
  };

  // Returns the page (kPageWords words) that contains the word, or null if nothing has been written
  // to this page.
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
  // Instructions that started DMA transfers.
  std::array<std::vector<std::uint32_t>, kThreads> started_;
  std::vector<Shadow> regions_;
  std::vector<std::uint32_t> opened_;         // regions that have pages
  std::vector<std::unique_ptr<Page>> spare_;  // cleared pages for reuse
  std::array<Tag, kVpmWords> vpm_{};
};

}  // namespace qpu::emu

#endif
