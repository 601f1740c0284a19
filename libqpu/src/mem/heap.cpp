#include "mem/heap.hpp"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "error_facts.hpp"
#include "qpu/shared_array.h"
#include "runtime/backends.hpp"
#include "runtime/machine.hpp"
#include "runtime/words.hpp"

namespace qpu::detail {
namespace {

// The range of bus addresses for arrays. The range is in the uncached alias of the VideoCore's 1 GB
// of memory, which contains the GPU memory of a Pi 2 or Pi 3. The first and the last 64 KB stay
// free, so that a small offset from null, or from the end of the address space, does not lead into
// an array.
constexpr std::uint32_t kFirst = 0xC0010000U;
constexpr std::uint32_t kLimit = 0xFFFF0000U;
constexpr std::uint32_t kAlignment = 64;
// The gap between adjacent arrays. An access past the end of an array therefore does not reach the
// next array.
constexpr std::uint32_t kGuard = 4096;

constexpr std::uint32_t alignUp(std::uint32_t n) {
  return (n + kAlignment - 1) & ~(kAlignment - 1);
}

bool startsAfter(std::uint32_t address, const std::shared_ptr<const Block>& block) {
  return address < block->start;
}

std::string text(const Block& b) {
  return "the SharedArray of " + std::to_string(b.bytes / 4) + " elements at " + hex(b.start) +
         ".." + hex(b.start + b.bytes - 1);
}

// The functions that onAllocationFailure() has registered.
struct Releasers {
  std::mutex mutex;
  std::vector<void (*)()> all;

  static Releasers& instance() {
    // The object is never destroyed, because the heap is never destroyed either.
    static auto* const releasers = new Releasers;
    return *releasers;
  }
};

}  // namespace

void releaseUnused() {
  thread_local bool active = false;
  if (active) return;
  Releasers& releasers = Releasers::instance();
  std::vector<void (*)()> all;
  {
    const std::lock_guard<std::mutex> lock(releasers.mutex);
    all = releasers.all;
  }
  active = true;
  for (void (*const release)() : all) release();
  active = false;
}

const Block* Table::find(std::uint32_t address) const {
  const auto after = std::upper_bound(blocks.begin(), blocks.end(), address, startsAfter);
  if (after == blocks.begin()) return nullptr;
  const Block& b = **(after - 1);
  return address - b.start < b.bytes ? &b : nullptr;
}

std::string Table::nearest(std::uint32_t address) const {
  if (blocks.empty()) return "there is no live SharedArray";
  const auto after = std::upper_bound(blocks.begin(), blocks.end(), address, startsAfter);
  const Block* below = after == blocks.begin() ? nullptr : (after - 1)->get();
  const Block* above = after == blocks.end() ? nullptr : after->get();
  const std::uint32_t before = above != nullptr ? above->start - address : UINT32_MAX;
  if (below != nullptr) {
    const std::uint32_t past = address - below->start - below->bytes;
    if (above == nullptr || past <= before)
      return "the nearest is " + text(*below) + "; the address is " + std::to_string(past) +
             " bytes past its end";
  }
  if (above == nullptr) return {};  // unreachable: the table is not empty
  return "the nearest is " + text(*above) + "; the address is " + std::to_string(before) +
         " bytes before its start";
}

Heap& Heap::instance() {
  static Heap* const heap = new Heap;
  return *heap;
}

Heap::Heap() : table_(std::make_shared<const Table>()), next_(kFirst) {}

// Finds a free range with the next-fit strategy. Next-fit reuses an address as late as possible, so
// that a stale pointer rarely refers to another array.
std::uint32_t Heap::place(const Table& table, std::uint32_t bytes) const {
  const std::uint32_t need = alignUp(bytes);
  for (const std::uint32_t from : {next_, kFirst}) {
    std::uint32_t at = from;
    for (const auto& b : table.blocks) {
      const std::uint32_t free = alignUp(b->start + b->bytes) + kGuard;
      if (free <= at) continue;
      if (b->start >= at && b->start - at >= need + kGuard) return at;
      at = std::max(at, free);
    }
    if (at <= kLimit && kLimit - at >= need) return at;
  }
  return 0;
}

std::shared_ptr<const Block> Heap::allocate(std::size_t count) {
  const std::string what = "SharedArray of " + std::to_string(count) + " elements: ";
  if (count == 0)
    raise<AllocationError>(what + "the length must be at least 1");
  constexpr std::size_t most = (kLimit - kFirst) / 4;
  if (count > most)
    raise<AllocationError>(what + "the QPUs can address at most " + std::to_string(most) +
                           " elements in total (1 GB of bus addresses)");
  return allocateOrRelease([&] { return tryAllocate(count, what); });
}

std::shared_ptr<const Block> Heap::tryAllocate(std::size_t count, const std::string& what) {
  const auto block = std::make_shared<Block>();
  block->bytes = static_cast<std::uint32_t>(4 * count);
  const runtime::Choice& choice = runtime::currentChoice();
  block->device = choice.name != nullptr && (choice.kind == runtime::Kind::Registers ||
                                             choice.kind == runtime::Kind::Mailbox);
  if (block->device)
    takeDeviceMemory(*block, what);
  else
    takeHostMemory(*block, what);

  const std::lock_guard<std::mutex> lock(mutex_);
  if (!block->device) {
    block->start = place(*table_, block->bytes);
    if (block->start == 0)
      raise<AllocationError>(what + "there is no free range of " + std::to_string(block->bytes) +
                             " bytes between " + std::to_string(table_->blocks.size()) +
                             " live arrays in 1 GB of bus addresses; release some arrays");
  }
  const auto grown = std::make_shared<Table>(*table_);
  const auto next = std::upper_bound(grown->blocks.begin(), grown->blocks.end(), block->start,
                                     startsAfter);
  const bool overlaps =
      (next != grown->blocks.end() && (*next)->start - block->start < block->bytes) ||
      (next != grown->blocks.begin() && block->start - (*(next - 1))->start < (*(next - 1))->bytes);
  if (overlaps)
    raise<AllocationError>(what + "GPU memory at " + hex(block->start) +
                           " overlaps an array that was allocated before QPU_BACKEND changed; set "
                           "QPU_BACKEND before allocating the first array");
  grown->blocks.insert(next, block);
  table_ = grown;
  if (!block->device) next_ = alignUp(block->start + block->bytes) + kGuard;
  return block;
}

void Heap::takeHostMemory(Block& block, const std::string& what) {
  // For large blocks, calloc() returns zeroed memory without writing to its pages.
  std::size_t room = std::size_t{block.bytes} + kAlignment;
  block.memory.reset(std::calloc(1, room), std::free);
  void* host = block.memory.get();
  if (host == nullptr || std::align(kAlignment, block.bytes, host, room) == nullptr)
    raise<AllocationError>(what + "the host cannot allocate " + std::to_string(block.bytes) +
                           " bytes");
  block.host = static_cast<unsigned char*>(host);
}

void Heap::takeDeviceMemory(Block& block, const std::string& what) {
  const runtime::Opened& opened = runtime::openDevice();
  if (!opened.device) raise<AllocationError>(what + opened.fault);
  const std::shared_ptr<runtime::GpuMemory> memory = opened.device->allocate(block.bytes, what);
  block.host = memory->host();
  block.start = memory->bus();
  block.memory = memory;
  runtime::clearDeviceWords(block.host, block.bytes / 4);
  usesDevice_ = true;
}

void Heap::release(const Block* block) noexcept {
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto shrunk = std::make_shared<Table>(*table_);
    auto& blocks = shrunk->blocks;
    blocks.erase(std::remove_if(blocks.begin(), blocks.end(),
                                [block](const auto& b) { return b.get() == block; }),
                 blocks.end());
    table_ = shrunk;
  } catch (const std::bad_alloc&) {
    // The block stays in the table, so its memory leaks, but no address becomes invalid.
    return;
  }
}

std::shared_ptr<const Table> Heap::table() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return table_;
}

}  // namespace qpu::detail

namespace qpu {

void onAllocationFailure(void (*release)()) {
  detail::Releasers& releasers = detail::Releasers::instance();
  const std::lock_guard<std::mutex> lock(releasers.mutex);
  releasers.all.push_back(release);
}

}  // namespace qpu
