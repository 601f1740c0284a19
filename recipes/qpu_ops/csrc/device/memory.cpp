#include "memory.h"

#include <pthread.h>
#include <qpu/backend.h>
#include <qpu/error.h>
#include <qpu/shared_array.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <sstream>
#include <system_error>
#include <utility>
#include <vector>

#include "trace.h"

namespace torch_qpu {
namespace {

constexpr std::size_t kPage = 4096;
// Tensors that are smaller than kSmall bytes share segments of kSmall bytes.
constexpr std::size_t kSmall = std::size_t{1} << 20;

std::size_t rounded(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

const char* setting(const char* name) {
  const char* const value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): only read
  return value == nullptr ? "" : value;
}

std::string mib(std::size_t bytes) {
  std::ostringstream text;
  text.precision(1);
  text << std::fixed << static_cast<double>(bytes) / (1 << 20) << " MiB";
  return text.str();
}

// A single allocation from libqpu, which is divided into blocks.
struct Segment {
  explicit Segment(std::size_t bytes, bool is_small)
      : words(bytes / sizeof(float)), size(bytes), small(is_small) {}
  qpu::SharedArray<float> words;
  std::size_t size;
  bool small;
};

struct Block {
  std::size_t bytes = 0;
  Segment* segment = nullptr;
  bool used = false;
};

class Pool {
 public:
  // The pool is never destroyed, because tensors with static storage duration may outlive any
  // other static object.
  static Pool& instance() {
    static Pool* const pool = new Pool;
    return *pool;
  }

  // Locked during take(), and locked before the other mutex.
  std::mutex take_mutex;
  // Protects the members. Not held while libqpu allocates memory, because libqpu may then call
  // release_unused().
  std::mutex mutex;

  void* take(std::size_t bytes) {
    const std::lock_guard<std::mutex> alone(take_mutex);
    std::unique_lock<std::mutex> lock(mutex);
    const bool caching = caching_;
    // Without caching, an array has exactly the size of its tensor. libqpu's interpreter can then
    // detect an access one word past the end.
    const std::size_t wanted = rounded(bytes, caching ? kAlignment : sizeof(float));
    const bool small = caching && wanted < kSmall;
    auto found = free_.end();
    if (caching) {
      for (found = free_.lower_bound({wanted, 0}); found != free_.end(); ++found) {
        if (blocks_.at(found->second).segment->small == small) break;
      }
    }
    if (found == free_.end()) {
      grow(lock, wanted, small, bytes);
      found = free_.lower_bound({wanted, 0});
      while (blocks_.at(found->second).segment->small != small) ++found;
    }
    const std::uintptr_t start = found->second;
    free_.erase(found);
    Block& block = blocks_.at(start);
    if (caching && block.bytes - wanted >= kAlignment) {
      blocks_[start + wanted] = {block.bytes - wanted, block.segment, false};
      free_.insert({block.bytes - wanted, start + wanted});
      block.bytes = wanted;
    }
    block.used = true;
    allocated_ += block.bytes;
    allocated_peak_ = std::max(allocated_peak_, allocated_);
    ++allocations_;
    return reinterpret_cast<void*>(start);  // NOLINT(performance-no-int-to-ptr): found by address
  }

  void give(void* memory) {
    auto at = blocks_.find(reinterpret_cast<std::uintptr_t>(memory));
    if (at == blocks_.end() || !at->second.used) return;
    at->second.used = false;
    allocated_ -= at->second.bytes;
    ++frees_;
    if (at != blocks_.begin()) {
      const auto before = std::prev(at);
      if (!before->second.used && before->second.segment == at->second.segment) {
        free_.erase({before->second.bytes, before->first});
        before->second.bytes += at->second.bytes;
        blocks_.erase(at);
        at = before;
      }
    }
    const auto after = std::next(at);
    if (after != blocks_.end() && !after->second.used &&
        after->second.segment == at->second.segment) {
      free_.erase({after->second.bytes, after->first});
      at->second.bytes += after->second.bytes;
      blocks_.erase(after);
    }
    free_.insert({at->second.bytes, at->first});
    if (!caching_) trim();
  }

  // Releases the segments that contain no tensor. Returns true if there were any.
  bool trim() {
    const std::size_t before = segments_.size();
    for (auto at = blocks_.begin(); at != blocks_.end();) {
      Segment* const segment = at->second.segment;
      if (at->second.used || at->second.bytes != segment->size) {
        ++at;
        continue;
      }
      free_.erase({at->second.bytes, at->first});
      at = blocks_.erase(at);
      reserved_ -= segment->size;
      segments_.erase(std::find_if(segments_.begin(), segments_.end(),
                                   [segment](const auto& s) { return s.get() == segment; }));
    }
    return segments_.size() < before;
  }

  // libqpu calls this function if it cannot allocate memory for an array or a kernel.
  static void release_unused() {
    Pool& pool = instance();
    const std::lock_guard<std::mutex> lock(pool.mutex);
    if (pool.trim()) ++pool.retries_;
  }

  bool owns(const void* memory) const {
    const auto address = reinterpret_cast<std::uintptr_t>(memory);
    auto after = blocks_.upper_bound(address);
    if (after == blocks_.begin()) return false;
    const auto& [start, block] = *std::prev(after);
    return block.used && address - start < block.bytes;
  }

  std::map<std::string, std::int64_t> statistics() const {
    const auto whole = [](std::size_t n) { return static_cast<std::int64_t>(n); };
    return {{"allocated_bytes.current", whole(allocated_)},
            {"allocated_bytes.peak", whole(allocated_peak_)},
            {"reserved_bytes.current", whole(reserved_)},
            {"reserved_bytes.peak", whole(reserved_peak_)},
            {"segments.current", whole(segments_.size())},
            {"segments.allocated", whole(segment_allocations_)},
            {"blocks.free", whole(free_.size())},
            {"allocations", whole(allocations_)},
            {"frees", whole(frees_)},
            {"retries", whole(retries_)},
            {"out_of_memory", whole(failures_)},
            {"limit_bytes", whole(limit)}};
  }
  void reset_peaks() {
    allocated_peak_ = allocated_;
    reserved_peak_ = reserved_;
  }

  std::size_t limit = 0;
  bool in_bad_fork = false;

 private:
  Pool() : caching_(std::strcmp(setting("QPU_TORCH_CACHING"), "0") != 0) {}

  void grow(std::unique_lock<std::mutex>& lock, std::size_t wanted, bool small,
            std::size_t asked) {
    if (in_bad_fork) {
      throw std::runtime_error(
          "the QPUs were opened before this process was forked and belong to its parent; start "
          "processes with multiprocessing's method 'spawn', or fork before the first qpu tensor");
    }
    const std::size_t size = !caching_ ? wanted : small ? kSmall : rounded(wanted, kPage);
    const auto is_too_much = [&] {
      return limit != 0 && (size > limit || reserved_ > limit - size);
    };
    if (is_too_much() && trim()) ++retries_;
    std::string why = "the limit of " + mib(limit) + " is reached";
    if (!is_too_much()) {
      std::unique_ptr<Segment> segment;
      lock.unlock();
      try {
        segment = std::make_unique<Segment>(size, small);
      } catch (const qpu::AllocationError& fault) {
        why = fault.what();
      }
      lock.lock();
      if (segment) {
        add(std::move(segment));
        return;
      }
    }
    ++failures_;
    throw OutOfMemory("QPU out of memory: tried to allocate " + mib(asked) + "; tensors hold " +
                      mib(allocated_) + " of " + mib(reserved_) + " reserved by the device; " +
                      why +
                      ". Free tensors, use smaller batches, or give the GPU more memory "
                      "(gpu_mem in config.txt)");
  }

  void add(std::unique_ptr<Segment> segment) {
    const auto start = reinterpret_cast<std::uintptr_t>(segment->words.data());
    blocks_[start] = {segment->size, segment.get(), false};
    free_.insert({segment->size, start});
    reserved_ += segment->size;
    reserved_peak_ = std::max(reserved_peak_, reserved_);
    ++segment_allocations_;
    segments_.push_back(std::move(segment));
  }

  const bool caching_;
  std::vector<std::unique_ptr<Segment>> segments_;
  std::map<std::uintptr_t, Block> blocks_;
  std::set<std::pair<std::size_t, std::uintptr_t>> free_;
  std::size_t allocated_ = 0, allocated_peak_ = 0;
  std::size_t reserved_ = 0, reserved_peak_ = 0;
  std::size_t allocations_ = 0, frees_ = 0, segment_allocations_ = 0;
  std::size_t retries_ = 0, failures_ = 0;
};

bool on_hardware() { return std::strncmp(qpu::backend().name, "vc4-", 4) == 0; }

std::atomic<bool> used{false};

void before_fork() {
  device_mutex().lock();
  lock_counts();
  Pool::instance().take_mutex.lock();
  Pool::instance().mutex.lock();
}
void after_fork_in_parent() {
  Pool::instance().mutex.unlock();
  Pool::instance().take_mutex.unlock();
  unlock_counts();
  device_mutex().unlock();
}
void after_fork_in_child() {
  // fork() copies host memory for the child, but GPU memory still belongs to the parent.
  if (used && !is_plain_memory()) Pool::instance().in_bad_fork = true;
  after_fork_in_parent();
}

}  // namespace

void* allocate(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  used = true;
  return Pool::instance().take(bytes);
}

void release(void* memory) noexcept {
  if (memory == nullptr) return;
  try {
    Pool& pool = Pool::instance();
    const std::lock_guard<std::mutex> lock(pool.mutex);
    if (!pool.in_bad_fork) pool.give(memory);
  } catch (const std::exception&) {
    return;
  }
}

bool owns(const void* memory) {
  Pool& pool = Pool::instance();
  const std::lock_guard<std::mutex> lock(pool.mutex);
  return pool.owns(memory);
}

void release_cached() {
  Pool& pool = Pool::instance();
  const std::lock_guard<std::mutex> lock(pool.mutex);
  pool.trim();
}

void set_limit(std::size_t bytes) {
  Pool& pool = Pool::instance();
  const std::lock_guard<std::mutex> lock(pool.mutex);
  pool.limit = bytes;
}

std::size_t limit() {
  Pool& pool = Pool::instance();
  const std::lock_guard<std::mutex> lock(pool.mutex);
  return pool.limit;
}

bool is_plain_memory() {
  static const bool plain = std::strcmp(setting("QPU_TORCH_COPY"), "1") != 0 && !on_hardware();
  return plain;
}

void copy_words(void* to, const void* from, std::size_t bytes) {
  qpu::detail::copyWords(to, from, (bytes + 3) / 4);
}

std::map<std::string, std::int64_t> memory_statistics() {
  Pool& pool = Pool::instance();
  const std::lock_guard<std::mutex> lock(pool.mutex);
  return pool.statistics();
}

void reset_peaks() {
  Pool& pool = Pool::instance();
  const std::lock_guard<std::mutex> lock(pool.mutex);
  pool.reset_peaks();
}

std::mutex& device_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

void install_handlers() {
  qpu::onAllocationFailure(Pool::release_unused);
  const int fault = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  if (fault != 0) throw std::system_error(fault, std::generic_category(), "pthread_atfork");
}

bool in_bad_fork() {
  Pool& pool = Pool::instance();
  const std::lock_guard<std::mutex> lock(pool.mutex);
  return pool.in_bad_fork;
}

}  // namespace torch_qpu
