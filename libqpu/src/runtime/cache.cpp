#include "runtime/cache.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <elf.h>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <link.h>
#include <mutex>
#include <optional>
#include <sys/stat.h>
#include <unistd.h>
#include <unordered_map>
#include <vector>

#include "code/serialise.hpp"
#include "error_facts.hpp"
#include "runtime/sha256.hpp"
#include "version.hpp"

namespace qpu::runtime {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostInMemory = 512;
constexpr const char* kExtension = ".qpuo";

class Writer {
 public:
  void number(std::uint64_t value) {
    for (int i = 0; i < 8; ++i) bytes_ += static_cast<char>(value >> (8 * i) & 0xffU);
  }
  template <typename E>
  void kind(E value) {
    number(static_cast<std::uint64_t>(value));
  }
  void text(const std::string& value) {
    number(value.size());
    bytes_ += value;
  }
  template <typename Items, typename F>
  void list(const Items& items, F one) {
    number(items.size());
    for (const auto& item : items) one(item);
  }
  void statement(const detail::Statement& s) {
    kind(s.kind);
    text(s.site.construct);
    number(s.site.number);
    number(s.site.file);
    kind(s.site.line);
    number(s.site.exact ? 1 : 0);
    number(s.target);
    number(s.value);
    number(s.address);
    number(s.limit);
    kind(s.element);
    number(s.wait ? 1 : 0);
    kind(s.direction);
    kind(s.count);
    kind(s.length);
    kind(s.pitch);
    text(s.text);
    list(s.body, [this](const auto& inner) { statement(inner); });
    list(s.other, [this](const auto& inner) { statement(inner); });
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Returns the build ID of the binary that contains this function. The ID is part of a cached
// kernel's key, because a library that was built from other sources generates different objects.
std::string buildIdentity() {
  struct Search {
    std::uintptr_t here;
    std::string id;
  } search{reinterpret_cast<std::uintptr_t>(&buildIdentity), {}};
  const auto visit = [](dl_phdr_info* info, std::size_t, void* data) -> int {
    auto& s = *static_cast<Search*>(data);
    bool ours = false;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& p = info->dlpi_phdr[i];
      const std::uintptr_t start = info->dlpi_addr + p.p_vaddr;
      ours = ours || (p.p_type == PT_LOAD && s.here - start < p.p_memsz);
    }
    if (!ours) return 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& p = info->dlpi_phdr[i];
      if (p.p_type != PT_NOTE) continue;
      // The dynamic loader stores addresses as integers.
      const auto* at = reinterpret_cast<const char*>(  // NOLINT(performance-no-int-to-ptr)
          info->dlpi_addr + p.p_vaddr);
      const auto* const end = at + p.p_memsz;
      while (static_cast<std::size_t>(end - at) >= sizeof(ElfW(Nhdr))) {
        ElfW(Nhdr) note;
        std::memcpy(&note, at, sizeof note);
        const std::size_t name = (std::size_t{note.n_namesz} + 3) / 4 * 4;
        const std::size_t content = (std::size_t{note.n_descsz} + 3) / 4 * 4;
        if (static_cast<std::size_t>(end - at) < sizeof note + name + content) break;
        if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 &&
            std::memcmp(at + sizeof note, "GNU", 4) == 0)
          s.id.assign(at + sizeof note + name, note.n_descsz);
        at += sizeof note + name + content;
      }
    }
    return 1;
  };
  (void)dl_iterate_phdr(visit, &search);
  return search.id;
}

const std::string& identity() {
  static const std::string id = buildIdentity();
  return id;
}

const char* setting(const char* name) {
  const char* const set = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): only read
  return set != nullptr && *set != '\0' ? set : nullptr;
}

struct Memory {
  std::mutex mutex;
  std::unordered_map<std::string, std::shared_ptr<const code::Object>> objects;
  std::deque<std::string> order;
  CacheCounts counts;
};

Memory& memory() {
  static auto* const one = new Memory;
  return *one;
}

std::optional<code::Object> readFile(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  const std::string data((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (file.bad()) return std::nullopt;
  auto object = code::load(data);
  // Update the time of last use, which pruneCache() evaluates.
  if (object) (void)utimensat(AT_FDCWD, path.c_str(), nullptr, 0);
  return object;
}

// Writes a temporary file and renames it, so that a reader finds either a complete file or no
// file.
void writeFile(const fs::path& path, const std::string& data) {
  static std::atomic<unsigned> serial{0};
  std::error_code failed;
  fs::create_directories(path.parent_path(), failed);
  if (failed) return;
  const std::string temporary = path.string() + "." + std::to_string(getpid()) + "-" +
                            std::to_string(++serial) + ".tmp";
  const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) return;
  std::size_t done = 0;
  while (done < data.size()) {
    const ssize_t n = write(fd, data.data() + done, data.size() - done);
    if (n <= 0) break;
    done += static_cast<std::size_t>(n);
  }
  const bool whole = close(fd) == 0 && done == data.size();
  if (!whole || rename(temporary.c_str(), path.c_str()) != 0) (void)unlink(temporary.c_str());
}

std::optional<code::Object> fromDisk(const std::string& folder, const std::string& key) {
  if (folder.empty()) return std::nullopt;
  return readFile(fs::path(folder) / (key + kExtension));
}

void toDisk(const std::string& folder, const std::string& key, const code::Object& object) {
  if (folder.empty()) return;
  try {
    writeFile(fs::path(folder) / (key + kExtension), code::save(object));
  } catch (const std::exception&) {
    return;  // the kernel can be used without the file
  }
  pruneCache(folder, kCacheLimit);
}

}  // namespace

std::string canonical(const detail::Source& source, const compiler::Options& options) {
  Writer w;
  w.text(QPU_VERSION);
  w.kind(options.level);
  w.kind(options.fileRegisters);
  w.text(source.name);
  w.list(source.parameters, [&w](detail::Type t) { w.kind(t); });
  w.list(source.variables, [&w](detail::Type t) { w.kind(t); });
  w.list(source.expressions, [&w](const detail::Expression& e) {
    w.kind(e.op);
    w.kind(e.type);
    w.number(static_cast<std::uint32_t>(e.vpmReads));
    w.number(e.a);
    w.number(e.b);
    w.number(e.bits);
  });
  w.list(source.files, [&w](const std::string& f) { w.text(f); });
  w.list(source.body, [&w](const detail::Statement& s) { w.statement(s); });
  return w.take();
}

compiler::Options compilerOptions() {
  compiler::Options options;
  const char* const level = setting("QPU_OPTIMISE");
  if (level == nullptr) return options;
  if (std::strlen(level) != 1 || *level < '0' || *level > '2')
    detail::raise<BackendError>("QPU_OPTIMISE=" + std::string(level) + ": expected 0, 1 or 2");
  options.level = *level - '0';
  return options;
}

std::string cacheFolder() {
  if (identity().empty()) return {};
  if (const char* const set = setting("QPU_CACHE"))
    return std::strcmp(set, "off") == 0 ? "" : set;
  if (const char* const xdg = setting("XDG_CACHE_HOME")) return std::string(xdg) + "/pitorch/qpu";
  if (const char* const home = setting("HOME")) return std::string(home) + "/.cache/pitorch/qpu";
  return {};
}

void pruneCache(const std::string& folder, std::uint64_t limit) noexcept {
  try {
    struct File {
      fs::path path;
      fs::file_time_type used;
      std::uint64_t bytes;
    };
    std::vector<File> files;
    std::uint64_t sum = 0;
    std::error_code failed;
    const auto old = fs::file_time_type::clock::now() - std::chrono::hours(1);
    fs::directory_iterator entry(folder, failed);
    for (; !failed && entry != fs::directory_iterator(); entry.increment(failed)) {
      std::error_code gone;  // set if another process has deleted the file
      const fs::path& path = entry->path();
      const auto used = fs::last_write_time(path, gone);
      const std::uint64_t bytes = gone ? 0 : fs::file_size(path, gone);
      if (gone) continue;
      if (path.extension() == ".tmp" && used < old) fs::remove(path, gone);
      if (path.extension() != kExtension) continue;
      files.push_back({path, used, bytes});
      sum += bytes;
    }
    if (sum <= limit) return;
    std::sort(files.begin(), files.end(),
              [](const File& a, const File& b) { return a.used < b.used; });
    for (const File& f : files) {
      // Delete more than necessary, so that the cache is not pruned again for every later kernel.
      if (sum <= limit / 4 * 3) break;
      std::error_code gone;
      fs::remove(f.path, gone);
      sum -= f.bytes;
    }
  } catch (const std::exception&) {
    return;
  }
}

std::shared_ptr<const code::Object> compiled(const detail::Source& source,
                                             const compiler::Options& options) {
  const std::string key = sha256(identity() + canonical(source, options));
  Memory& m = memory();
  {
    const std::lock_guard<std::mutex> lock(m.mutex);
    const auto found = m.objects.find(key);
    if (found != m.objects.end()) {
      ++m.counts.fromMemory;
      return found->second;
    }
  }
  const std::string folder = cacheFolder();
  std::optional<code::Object> object = fromDisk(folder, key);
  const bool onDisk = object.has_value();
  if (!onDisk) {
    object = compiler::compile(source, options);
    toDisk(folder, key, *object);
  }
  auto made = std::make_shared<const code::Object>(std::move(*object));
  const std::lock_guard<std::mutex> lock(m.mutex);
  ++(onDisk ? m.counts.fromDisk : m.counts.compiled);
  if (m.objects.emplace(key, made).second) m.order.push_back(key);
  if (m.order.size() > kMostInMemory) {
    m.objects.erase(m.order.front());
    m.order.pop_front();
  }
  return made;
}

CacheCounts cacheCounts() {
  Memory& m = memory();
  const std::lock_guard<std::mutex> lock(m.mutex);
  return m.counts;
}

void forgetCompiled() {
  Memory& m = memory();
  const std::lock_guard<std::mutex> lock(m.mutex);
  m.objects.clear();
  m.order.clear();
}

}  // namespace qpu::runtime
