#include <cstring>
#include <utility>

#include "error_facts.hpp"
#include "mem/heap.hpp"
#include "qpu/shared_array.h"
#include "runtime/words.hpp"

namespace qpu::detail {

SharedWords::SharedWords(std::size_t count) : SharedWords() {
  const std::shared_ptr<const Block> block = Heap::instance().allocate(count);
  block_ = block.get();  // the heap's table keeps the block alive
  words_ = reinterpret_cast<std::uint32_t*>(block->host);
  count_ = count;
  address_ = block->start;
}

SharedWords::SharedWords(SharedWords&& other) noexcept
    : block_(std::exchange(other.block_, nullptr)),
      words_(std::exchange(other.words_, nullptr)),
      count_(std::exchange(other.count_, 0)),
      address_(std::exchange(other.address_, 0)) {}

SharedWords& SharedWords::operator=(SharedWords&& other) noexcept {
  if (this == &other) return *this;
  if (block_ != nullptr) Heap::instance().release(block_);
  block_ = std::exchange(other.block_, nullptr);
  words_ = std::exchange(other.words_, nullptr);
  count_ = std::exchange(other.count_, 0);
  address_ = std::exchange(other.address_, 0);
  return *this;
}

SharedWords::~SharedWords() {
  if (block_ != nullptr) Heap::instance().release(block_);
}

void SharedWords::outOfRange(std::size_t first, std::size_t n, const char* what) const {
  const std::string range =
      n == 1 ? "element " + std::to_string(first) + " is"
             : std::to_string(n) + " elements from element " + std::to_string(first) + " are";
  raise<ArgumentError>("SharedArray " + std::string(what) + ": " + range +
                           " not inside the array of " + std::to_string(count_) + " elements",
                       {"", what, -1, 0});
}

std::uint32_t busAddress(const void* host) {
  if (host == nullptr) return 0;
  const auto table = Heap::instance().table();
  const auto at = reinterpret_cast<std::uintptr_t>(host);
  // As in C++, the address one past the end of a block is a valid pointer. If another block
  // starts at this address, the pointer refers to that block.
  for (const std::uint32_t past : {0U, 1U})
    for (const auto& b : table->blocks) {
      const auto start = reinterpret_cast<std::uintptr_t>(b->host);
      if (at >= start && at - start < b->bytes + past)
        return b->start + static_cast<std::uint32_t>(at - start);
    }
  const auto bus = static_cast<std::uint32_t>(at);
  if (bus == at && table->find(bus) != nullptr) return bus;
  raise<ArgumentError>("a SharedArray of pointers accepts only pointers into live SharedArrays");
}

void* hostAddress(std::uint32_t bus) {
  if (bus == 0) return nullptr;
  const auto table = Heap::instance().table();
  const Block* b = table->find(bus);
  if (b == nullptr)
    raise<ArgumentError>("bus address " + hex(bus) + " is not in a live SharedArray; " +
                         table->nearest(bus));
  return b->host + (bus - b->start);
}

void copyWords(void* to, const void* from, std::size_t count) noexcept {
  if (count == 0) return;
  if (Heap::instance().usesDevice())
    runtime::copyDeviceWords(to, from, count);
  else
    std::memcpy(to, from, 4 * count);
}

}  // namespace qpu::detail
