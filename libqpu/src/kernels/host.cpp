#include "kernels/host.hpp"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "error_facts.hpp"
#include "mem/heap.hpp"
#include "runtime/backends.hpp"

namespace qpu::kernels {
namespace {

// Arrays that no call is currently using, sorted by size.
struct Pool {
  std::mutex mutex;
  std::vector<std::unique_ptr<SharedArray<float>>> free;

  Pool() { onAllocationFailure(release); }

  static Pool& instance() {
    // The pool is never destroyed, because the heap is never destroyed either.
    static Pool* const pool = new Pool;
    return *pool;
  }

  static void release() {
    Pool& pool = instance();
    const std::lock_guard<std::mutex> lock(pool.mutex);
    pool.free.clear();
  }
};

constexpr std::size_t kMaxPooled = 8;
constexpr std::size_t kLeastWords = 1024;

// Returns true if the array is in GPU memory. An array stays in the memory of the backend that
// was selected when it was allocated.
bool isOnDevice(const SharedArray<float>& a) {
  const auto table = detail::Heap::instance().table();
  const detail::Block* const block = table->find(a.getAddress());
  return block != nullptr && block->device;
}

}  // namespace

void fail(const char* name, const std::string& what) {
  detail::raise<ArgumentError>("kernels::" + std::string(name) + ": " + what, {name, name, -1, 0});
}

bool onHardware() {
  const runtime::Kind kind = runtime::requireBackend();
  return kind == runtime::Kind::Registers || kind == runtime::Kind::Mailbox;
}

void requireSize(const char* name, const char* what, std::int64_t value, std::int64_t least) {
  if (value < least)
    fail(name, std::string(what) + " is " + std::to_string(value) + ", but must be at least " +
                   std::to_string(least));
}

void requireFactor(const char* name, const char* what, std::int64_t value) {
  constexpr std::int64_t most = (1 << 24) - 1;
  if (value > most)
    fail(name, std::string(what) + " is " + std::to_string(value) + ", but must be at most " +
                   std::to_string(most));
}

void requireRange(const char* name, const char* what, Floats at, std::int64_t count) {
  if (count == 0) return;
  const std::uint32_t address = at.address();
  if (address == 0) fail(name, std::string(what) + " is null");
  if ((address & 3U) != 0)
    fail(name, std::string(what) + " is at " + detail::hex(address) +
                   ", which is not a multiple of 4");
  const auto table = detail::Heap::instance().table();
  const detail::Block* block = table->find(address);
  const std::int64_t room =
      block == nullptr ? 0 : (std::int64_t{block->bytes} - (address - block->start)) / 4;
  if (room < count)
    fail(name, std::string(what) + ": " + std::to_string(count) + " elements from " +
                   detail::hex(address) + " are not in one SharedArray; " +
                   (block == nullptr
                        ? table->nearest(address)
                        : "the array ends after " + std::to_string(room) + " elements"));
  if (onHardware() && block != nullptr && !block->device)
    fail(name, std::string(what) +
                   " was allocated while no hardware backend was selected; set QPU_BACKEND "
                   "before allocating arrays");
}

void requireMatrix(const char* name, const char* what, const Matrix& matrix, int m, int n) {
  if (m == 0 || n == 0) return;
  if (matrix.rowStride < 0 || matrix.columnStride < 0)
    fail(name, std::string(what) + " has a stride below 0");
  requireRange(name, what, matrix.data,
               std::int64_t{m - 1} * matrix.rowStride + std::int64_t{n - 1} * matrix.columnStride +
                   1);
}

Scratch::Scratch(std::size_t words) {
  Pool& pool = Pool::instance();
  {
    const std::lock_guard<std::mutex> lock(pool.mutex);
    const bool onDevice = onHardware();
    const auto fit = std::find_if(pool.free.begin(), pool.free.end(), [&](const auto& a) {
      return a->size() >= words && isOnDevice(*a) == onDevice;
    });
    if (fit != pool.free.end()) {
      array_ = std::move(*fit);
      pool.free.erase(fit);
      return;
    }
  }
  array_ = std::make_unique<SharedArray<float>>(std::max(words, kLeastWords));
}

Scratch::~Scratch() {
  Pool& pool = Pool::instance();
  const std::lock_guard<std::mutex> lock(pool.mutex);
  const auto place = std::upper_bound(
      pool.free.begin(), pool.free.end(), array_,
      [](const auto& a, const auto& b) { return a->size() < b->size(); });
  pool.free.insert(place, std::move(array_));
  if (pool.free.size() > kMaxPooled) pool.free.erase(pool.free.begin());
}

Floats Scratch::floats(std::size_t first) const { return array_->pointer(first); }
BusPointer<int> Scratch::ints(std::size_t first) const {
  return BusPointer<int>::fromAddress(array_->pointer(first).address());
}
const float* Scratch::readFloats() const { return array_->data(); }
int* Scratch::hostInts() const { return reinterpret_cast<int*>(array_->data()); }

}  // namespace qpu::kernels
