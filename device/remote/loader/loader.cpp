// Loads a kernel on a board, provides its arrays, runs it and measures it. The client is connected to
// standard input and output: over SSH, under an emulator, or on the same machine. The loader first prints
// "ok MACHINE; MODEL": the machine that it was compiled for, and the board's name in the device tree.
//
//   loader LOCK_FILE QUEUE_SECONDS SESSION_SECONDS
//
// Only one session at a time holds LOCK_FILE; others wait for it for up to QUEUE_SECONDS. After
// SESSION_SECONDS the loader exits with status 124. If the client disconnects, the loader exits with
// status 1, even while a kernel runs. Requests are lines of words, some followed by bytes. A response is
// "ok WORDS", followed by bytes for some requests, or "error KIND TEXT":
//
//   load ENTRY BYTES + library    ok BACKEND           a kernel library; "-" as entry: plain; 0 bytes: the
//                                                      kernel that is linked in (linked.cpp)
//   devices                       ok BYTES + lines     the board's OpenCL devices (opencl.hpp)
//   opencl DEVICE DIGEST NAME GLOBAL... LOCAL... BYTES + options, newline, source
//                                 ok KEPT SECONDS BACKEND   an OpenCL kernel; three sizes each; KEPT is
//                                                      1 if its binary is from an earlier session
//   array KIND BYTES SHAPE...     ok NUMBER            a new array, zeroed, aligned to 64 bytes
//   write NUMBER BYTES + content  ok
//   read NUMBER                   ok BYTES + content
//   keep DIGEST BYTES + content   ok                   a model's parameters, to a file that stays on the board
//   map DIGEST BYTES              ok NUMBER            an array: the parameters, mapped; "ok -": not kept
//   memory                        ok BYTES             the peak memory of the loader; 0: unknown
//   run NUMBER...                 ok MODEL_SECONDS     one run; negative: no model
//   time NUMBER REPEAT MIN_MS WARM_UP NUMBER...        ok RUNS SECONDS...   seconds per run, for
//                                                      each repeat; RUNS is the runs per repeat
//
// Kinds of errors: busy, protocol, architecture, load, kernel, memory. OpenCL errors have the additional kinds
// no-opencl, no-device, build, device-memory, work-group and driver.
//
// A kernel is either a library that TVM generated (its C entry point is __tvm_ffi_NAME, which takes
// DLTensors in the calling convention of TVM's FFI), or one that exports the functions of kernel.h.
// TVM's runtime is not required; kernels that use its thread pool are rejected.
#include <dirent.h>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "library.hpp"
#include "on_board.hpp"
#include "opencl.hpp"
#include "tvm_abi.h"

// Defined in linked.cpp if a kernel is linked in.
extern "C" void *pitorch_linked(const char *name) __attribute__((weak));

namespace {

constexpr int TIMED_OUT = 124;
constexpr std::size_t MAX_BYTES = std::size_t{1} << 31;

// ------------------------------------------------------------------------------ TVM's C interface

using Entry = int (*)(void *handle, const Any *arguments, int32_t count, Any *result);

std::string raised;

void *allocateWorkspace(int, int, uint64_t bytes, int, int) {
  return std::aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
}

int freeWorkspace(int, int, void *memory) {
  std::free(memory);
  return 0;
}

}  // namespace

// Called by kernels when their arguments do not match.
extern "C" __attribute__((visibility("default"), used)) void TVMFFIErrorSetRaisedFromCStrParts(
    const char *kind, const char **parts, int32_t count) {
  raised = std::string(kind) + ": ";
  for (int32_t i = 0; i < count; i++)
    if (parts[i] != nullptr) raised += parts[i];
}

extern "C" __attribute__((visibility("default"), used)) void TVMFFIErrorSetRaisedFromCStr(
    const char *kind, const char *message) {
  raised = std::string(kind) + ": " + message;
}

namespace {

// A file that is still incomplete. The loader removes the file when it exits.
std::string staged;

void removeStaged() {
  if (!staged.empty()) unlink(staged.c_str());
}

// ------------------------------------------------------------------------------------ the channel

void writeAll(const void *data, std::size_t bytes) {
  const char *from = static_cast<const char *>(data);
  while (bytes > 0) {
    const ssize_t done = ::write(STDOUT_FILENO, from, bytes);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) std::exit(1);  // the client disconnected
    from += done;
    bytes -= static_cast<std::size_t>(done);
  }
}

void readAll(void *data, std::size_t bytes) {
  char *to = static_cast<char *>(data);
  while (bytes > 0) {
    const ssize_t done = ::read(STDIN_FILENO, to, bytes);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) std::exit(0);
    to += done;
    bytes -= static_cast<std::size_t>(done);
  }
}

std::string readLine() {
  std::string line;
  char next = 0;
  for (readAll(&next, 1); next != '\n'; readAll(&next, 1)) {
    if (line.size() == 4096) throw Failure("protocol", "a line is longer than 4096 characters");
    line += next;
  }
  return line;
}

std::string oneLine(std::string text) {
  for (char &each : text)
    if (each == '\n' || each == '\r') each = ' ';
  return text;
}

void answer(const std::string &words) { writeAll(("ok" + words + "\n").data(), words.size() + 3); }

void complain(const char *kind, const std::string &text) {
  const std::string line = std::string("error ") + kind + " " + oneLine(text) + "\n";
  writeAll(line.data(), line.size());
}

// An error after which the rest of the input cannot be interpreted.
[[noreturn]] void complainAndExit(const char *kind, const std::string &text) {
  complain(kind, text);
  std::exit(1);
}

// Reads the next line. A line that is too long is a fatal error.
std::string readRequest() {
  try {
    return readLine();
  } catch (const Failure &fault) {
    complainAndExit(fault.kind, fault.what());
  }
}

// The words of a request, read without std::istream, whose locales make up most of a static C++ library.
class Words {
 public:
  explicit Words(std::string line) : line_(std::move(line)) {}

  bool more() {
    position_ = std::min(line_.find_first_not_of(' ', position_), line_.size());
    return position_ < line_.size();
  }

  std::string text() {
    if (!more()) throw Failure("protocol", "a word of the request is missing or is not a number");
    const std::size_t begin = position_;
    position_ = std::min(line_.find(' ', begin), line_.size());
    return line_.substr(begin, position_ - begin);
  }

  template <typename T>
  T number() {
    const std::string word = text();
    T value{};
    const auto read = std::from_chars(word.data(), word.data() + word.size(), value);
    if (read.ec != std::errc() || read.ptr != word.data() + word.size())
      throw Failure("protocol", "a word of the request is missing or is not a number");
    return value;
  }

 private:
  std::string line_;
  std::size_t position_ = 0;
};

std::string decimal(double value) {
  std::array<char, 32> text{};
  (void)std::snprintf(text.data(), text.size(), "%.17g", value);
  return text.data();
}

// ------------------------------------------------------------------------------------- the kernel

// Without a handle, the function looks up the name in the kernel that is linked into the loader.
void *lookUp(void *handle, const char *name) {
  return handle != nullptr ? dlsym(handle, name) : pitorch_linked(name);
}

template <typename T>
T symbol(void *handle, const char *name) {
  void *found = lookUp(handle, name);
  if (found == nullptr) throw Failure("load", std::string("the library has no ") + name);
  T typed = nullptr;
  static_assert(sizeof typed == sizeof found, "functions and data have addresses of the same size");
  std::memcpy(&typed, &found, sizeof typed);
  return typed;
}

class TvmLibrary : public Library {
 public:
  TvmLibrary(void *handle, const std::string &name)
      : entry_(symbol<Entry>(handle, ("__tvm_ffi_" + name).c_str())) {
    if (lookUp(handle, "__TVMBackendParallelLaunch") != nullptr)
      throw Failure("load",
                    "the kernel has parallel loops: they require TVM's thread pool, which this board does not have");
    setContext(handle, "__TVMBackendAllocWorkspace", &allocateWorkspace);
    setContext(handle, "__TVMBackendFreeWorkspace", &freeWorkspace);
  }

  void *allocate(std::size_t bytes) override {
    return std::aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT);
  }
  void release(void *memory) override { std::free(memory); }

  void run(const std::vector<pitorch_array> &arrays) override {
    std::vector<DLTensor> tensors(arrays.size());
    std::vector<Any> arguments(arrays.size());
    for (std::size_t i = 0; i < arrays.size(); i++) {
      const pitorch_array &from = arrays[i];
      const uint8_t code = from.kind == 'f' ? 2 : from.kind == 'u' ? 1 : 0;
      tensors[i] = {from.data, CPU, 0, from.dimensions, code, static_cast<uint8_t>(8 * from.bytes), 1,
                    const_cast<int64_t *>(from.shape), nullptr, 0};
      arguments[i].typeIndex = TENSOR_POINTER;
      arguments[i].padding = 0;
      arguments[i].integer = 0;
      arguments[i].pointer = &tensors[i];
    }
    Any result = {0, 0, {0}};
    if (entry_(nullptr, arguments.data(), static_cast<int32_t>(arguments.size()), &result) != 0)
      throw Failure("kernel", raised.empty() ? "the kernel failed without an error message" : raised);
  }

  std::string backend() override { return "CPU"; }
  double modelSeconds() override { return -1; }

 private:
  // Kernels call functions in TVM's runtime through pointers that the loader sets.
  template <typename Function>
  static void setContext(void *handle, const char *name, Function function) {
    if (void *place = lookUp(handle, name)) std::memcpy(place, &function, sizeof function);
  }

  Entry entry_;
};

class PlainLibrary : public Library {
 public:
  explicit PlainLibrary(void *handle)
      : allocate_(symbol<decltype(&pitorch_kernel_allocate)>(handle, "pitorch_kernel_allocate")),
        release_(symbol<decltype(&pitorch_kernel_release)>(handle, "pitorch_kernel_release")),
        run_(symbol<decltype(&pitorch_kernel_run)>(handle, "pitorch_kernel_run")),
        error_(symbol<decltype(&pitorch_kernel_error)>(handle, "pitorch_kernel_error")),
        backend_(symbol<decltype(&pitorch_kernel_backend)>(handle, "pitorch_kernel_backend")),
        modelSeconds_(symbol<decltype(&pitorch_kernel_model_seconds)>(handle, "pitorch_kernel_model_seconds")) {}

  void *allocate(std::size_t bytes) override {
    void *memory = allocate_(bytes);
    if (memory == nullptr) throw Failure("memory", error_());
    return memory;
  }
  void release(void *memory) override { release_(memory); }
  void run(const std::vector<pitorch_array> &arrays) override {
    if (run_(arrays.data(), static_cast<int32_t>(arrays.size())) != 0) throw Failure("kernel", error_());
  }
  std::string backend() override { return backend_(); }
  double modelSeconds() override { return modelSeconds_(); }

 private:
  decltype(&pitorch_kernel_allocate) allocate_;
  decltype(&pitorch_kernel_release) release_;
  decltype(&pitorch_kernel_run) run_;
  decltype(&pitorch_kernel_error) error_;
  decltype(&pitorch_kernel_backend) backend_;
  decltype(&pitorch_kernel_model_seconds) modelSeconds_;
};

std::string machineName(unsigned machine, unsigned width) {
  std::string name = "machine " + std::to_string(machine);
  if (machine == EM_ARM) name = "ARM";
  if (machine == EM_AARCH64) name = "AArch64";
  if (machine == EM_X86_64) name = "x86-64";
  if (machine == EM_386) name = "x86";
  return name + " (" + (width == ELFCLASS64 ? "64" : "32") + "-bit)";
}

std::string ownMachine() {
#if defined(__arm__)
  constexpr unsigned machine = EM_ARM;
#elif defined(__aarch64__)
  constexpr unsigned machine = EM_AARCH64;
#elif defined(__x86_64__)
  constexpr unsigned machine = EM_X86_64;
#else
#error "ownMachine does not support this machine"
#endif
  return machineName(machine, sizeof(void *) == 8 ? ELFCLASS64 : ELFCLASS32);
}

// The board's name in the device tree; empty if there is none (on a PC, under an emulator).
std::string boardModel() {
  std::array<char, 128> model{};
  if (FILE *file = std::fopen("/proc/device-tree/model", "rb")) {
    if (std::fread(model.data(), 1, model.size() - 1, file) == 0) model[0] = 0;
    if (std::fclose(file) != 0) model[0] = 0;
  }
  return oneLine(model.data());
}

std::string machineOf(const std::vector<char> &content) {
  if (content.size() < sizeof(Elf32_Ehdr) || std::memcmp(content.data(), ELFMAG, SELFMAG) != 0)
    throw Failure("load", "not a shared library (no ELF header)");
  Elf32_Ehdr header{};  // the 32-bit and 64-bit headers are identical up to e_machine
  std::memcpy(&header, content.data(), sizeof header);
  return machineName(header.e_machine, header.e_ident[EI_CLASS]);
}

std::unique_ptr<Library> load(const std::string &entry, const std::vector<char> &content) {
  if (content.empty() && pitorch_linked != nullptr) return std::make_unique<TvmLibrary>(nullptr, entry);
  const std::string theirs = machineOf(content), ours = ownMachine();
  if (theirs != ours) throw Failure("architecture", "the board runs " + ours + ", the code is for " + theirs);
  const char *folder = std::getenv("TMPDIR");
  std::string path = std::string(folder != nullptr ? folder : "/tmp") + "/pitorch-kernel.XXXXXX";
  const int file = mkstemp(path.data());
  if (file < 0) throw Failure("load", path + ": " + std::strerror(errno));
  FILE *stream = fdopen(file, "wb");
  const bool whole = stream != nullptr && std::fwrite(content.data(), 1, content.size(), stream) == content.size();
  const bool closed = stream != nullptr && std::fclose(stream) == 0;
  void *handle = whole && closed ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
  const char *message = handle == nullptr && whole && closed ? dlerror() : "no space left on the board for the kernel";
  unlink(path.c_str());
  if (handle == nullptr) throw Failure("load", message);
  if (entry == "-") return std::make_unique<PlainLibrary>(handle);
  return std::make_unique<TvmLibrary>(handle, entry);
}

// -------------------------------------------------------------------------------------- a session

struct Array {
  void *data = nullptr;
  std::vector<int64_t> shape;
  char kind = 'f';
  uint8_t bytes = 4;
  std::size_t size = 0;
  bool mapped = false;
};

class Session {
 public:
  void serve() {
    for (;;) {
      Words words(readRequest());
      try {
        handle(words);
      } catch (const Failure &fault) {
        complain(fault.kind, fault.what());
      } catch (const std::bad_alloc &) {
        complain("memory", "the board does not have enough memory");
      }
    }
  }

 private:
  void handle(Words &words) {
    const std::string verb = words.text();
    if (verb == "load") {
      const auto entry = words.text();
      const std::vector<char> content = payload(words.number<std::size_t>());
      unload();
      library_ = load(entry, content);
      answer(" " + oneLine(library_->backend()));
    } else if (verb == "devices") {
      const std::string lines = opencl::devices();
      answer(" " + std::to_string(lines.size()));
      writeAll(lines.data(), lines.size());
    } else if (verb == "opencl") {
      build(words);
    } else if (verb == "array") {
      add(words);
    } else if (verb == "write") {
      const auto number = words.number<std::size_t>();
      const std::vector<char> content = payload(words.number<std::size_t>());
      Array &to = at(number);
      if (content.size() != to.size) throw Failure("protocol", "the content and the array differ in size");
      std::memcpy(to.data, content.data(), content.size());
      answer("");
    } else if (verb == "read") {
      const Array &from = at(words.number<std::size_t>());
      answer(" " + std::to_string(from.size));
      writeAll(from.data, from.size);
    } else if (verb == "keep") {
      keep(words);
      answer("");
    } else if (verb == "map") {
      answer(map(words));
    } else if (verb == "memory") {
      answer(" " + std::to_string(peakMemory()));
    } else if (verb == "run") {
      const std::vector<pitorch_array> arrays = rest(words);
      library_->run(arrays);
      answer(" " + decimal(library_->modelSeconds()));
    } else if (verb == "time") {
      time(words);
    } else {
      throw Failure("protocol", "unknown request " + verb);
    }
  }

  static std::vector<char> payload(std::size_t bytes) {
    if (bytes > MAX_BYTES) complainAndExit("protocol", "too many bytes for one request");
    std::vector<char> content;
    try {
      content.resize(bytes);
    } catch (const std::bad_alloc &) {
      complainAndExit("memory", "the board does not have enough memory for the content of the request");
    }
    readAll(content.data(), bytes);
    return content;
  }

  Array &at(std::size_t number) {
    if (number >= arrays_.size()) throw Failure("protocol", "there is no array " + std::to_string(number));
    return arrays_[number];
  }

  void unload() {
    for (Array &each : arrays_)
      if (each.mapped)
        munmap(each.data, each.size);
      else
        library_->release(each.data);
    arrays_.clear();
    library_.reset();
  }

  // The digest becomes a file name.
  static void requireDigest(const std::string &digest) {
    if (digest.find_first_not_of("0123456789abcdef") != std::string::npos)
      throw Failure("protocol", "the digest is not hexadecimal");
  }

  static std::string parametersFile(Words &words) {
    const auto digest = words.text();
    requireDigest(digest);
    const std::string folder = keptFolder("parameters");
    return folder.empty() ? "" : folder + "/" + digest;
  }

  // Copies from the client to the file in blocks, because the board may not have enough memory for all of it. The
  // parameters replace those of other models, because the folder may be in memory. If the parameters cannot be
  // kept, `map` does not find them.
  static void keep(Words &words) {
    const std::string path = parametersFile(words);
    auto bytes = words.number<std::size_t>();
    int file = -1;
    if (!path.empty()) {
      const std::string folder = path.substr(0, path.rfind('/') + 1);
      if (DIR *listed = opendir(folder.c_str())) {
        while (const dirent *each = readdir(listed)) (void)unlink((folder + each->d_name).c_str());
        (void)closedir(listed);
      }
      staged = path + ".XXXXXX";
      file = mkstemp(staged.data());
    }
    bool good = file >= 0;
    std::array<char, 65536> block{};
    while (bytes > 0) {
      const std::size_t part = std::min(bytes, block.size());
      readAll(block.data(), part);
      bytes -= part;
      good = good && ::write(file, block.data(), part) == static_cast<ssize_t>(part);
    }
    good = good && fsync(file) == 0;
    if (file >= 0) (void)close(file);
    if (!good || std::rename(staged.c_str(), path.c_str()) != 0) removeStaged();
    staged.clear();
  }

  std::string map(Words &words) {
    if (library_ == nullptr) throw Failure("protocol", "no kernel is loaded");
    const std::string path = parametersFile(words);
    const auto bytes = words.number<std::size_t>();
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return " -";
    struct stat found = {};
    const bool whole = fstat(file, &found) == 0 && static_cast<std::uint64_t>(found.st_size) == bytes;
    void *data = whole ? mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0) : nullptr;
    (void)close(file);
    if (!whole) return " -";
    if (data == MAP_FAILED) throw Failure("memory", path + " cannot be mapped: " + std::strerror(errno));
    Array made;
    made.data = data;
    made.shape = {static_cast<int64_t>(bytes)};
    made.kind = 'u';
    made.bytes = 1;
    made.size = bytes;
    made.mapped = true;
    arrays_.push_back(std::move(made));
    return " " + std::to_string(arrays_.size() - 1);
  }

  void build(Words &words) {
    opencl::Request request;
    request.device = words.number<std::size_t>();
    request.digest = words.text();
    request.kernel = words.text();
    for (std::size_t &each : request.global) each = words.number<std::size_t>();
    for (std::size_t &each : request.local) each = words.number<std::size_t>();
    const std::vector<char> content = payload(words.number<std::size_t>());
    requireDigest(request.digest);
    const auto end = std::find(content.begin(), content.end(), '\n');
    request.options.assign(content.begin(), end);
    if (end != content.end()) request.source.assign(end + 1, content.end());
    unload();
    bool kept = false;
    const auto began = std::chrono::steady_clock::now();
    library_ = opencl::build(request, kept);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began;
    answer((kept ? " 1 " : " 0 ") + decimal(seconds.count()) + " " + oneLine(library_->backend()));
  }

  void add(Words &words) {
    if (library_ == nullptr) throw Failure("protocol", "no kernel is loaded");
    Array made;
    const std::string kind = words.text();
    const int bytes = words.number<int>();
    made.kind = kind.size() == 1 ? kind[0] : '?';
    if ((made.kind != 'f' && made.kind != 'i' && made.kind != 'u') || bytes < 1 || bytes > 8)
      throw Failure("protocol", "unknown element type");
    made.bytes = static_cast<uint8_t>(bytes);
    made.size = made.bytes;
    while (words.more()) {
      const auto dimension = words.number<int64_t>();
      if (dimension < 0 || (dimension > 0 && made.size > MAX_BYTES / static_cast<std::size_t>(dimension)))
        throw Failure("memory", "the array is larger than 2 GiB or has a negative size");
      made.size *= static_cast<std::size_t>(dimension);
      made.shape.push_back(dimension);
    }
    made.data = library_->allocate(made.size);
    if (made.data == nullptr) throw std::bad_alloc();
    std::memset(made.data, 0, made.size);
    arrays_.push_back(std::move(made));
    answer(" " + std::to_string(arrays_.size() - 1));
  }

  std::vector<pitorch_array> rest(Words &words) {
    if (library_ == nullptr) throw Failure("protocol", "no kernel is loaded");
    std::vector<pitorch_array> found;
    while (words.more()) {
      const Array &each = at(words.number<std::size_t>());
      found.push_back({each.data, each.shape.data(), static_cast<int32_t>(each.shape.size()), each.kind, each.bytes});
    }
    return found;
  }

  // Like TVM's time_evaluator: one measurement consists of `number` runs. If the runs take less
  // than `leastMs`, their number is increased.
  void time(Words &words) {
    auto number = words.number<std::uint64_t>();
    const auto repeat = words.number<std::uint64_t>();
    const auto leastMs = static_cast<double>(words.number<std::uint64_t>());
    const auto warmUp = words.number<std::uint64_t>();
    const std::vector<pitorch_array> arrays = rest(words);
    if (number < 1 || repeat < 1) throw Failure("protocol", "expected at least one run and one repeat");
    for (std::uint64_t i = 0; i < warmUp; i++) library_->run(arrays);
    std::string text;
    for (std::uint64_t i = 0; i < repeat; i++) {
      double seconds = 0;
      for (;;) {
        seconds = library_->time(arrays, number);
        if (seconds * 1e3 >= leastMs) break;
        const double enough = leastMs * 1e-3 / (seconds > 0 ? seconds : 1e-9) * static_cast<double>(number);
        number = static_cast<std::uint64_t>(std::min(enough, 1e12)) + number / 2 + 1;
      }
      text += " " + decimal(seconds / static_cast<double>(number));
    }
    answer(" " + std::to_string(number) + text);
  }

  std::unique_ptr<Library> library_;
  std::vector<Array> arrays_;
};

// Waits for the lock. The lock file contains the process ID of the last session that could write to it.
bool locked(const char *path, double queueSeconds) {
  // Does not follow links: in /tmp, another user could have created a link to one of this user's files.
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
  // The file of another user is not writable, even for root (fs.protected_regular). A lock needs no write access.
  if (file < 0 && errno == EACCES) file = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (file < 0) {
    complain("load", std::string(path) + ": " + std::strerror(errno));
    return false;
  }
  struct stat found = {};
  if (fstat(file, &found) != 0 || !S_ISREG(found.st_mode) || found.st_nlink != 1) {
    complain("load", std::string(path) + " is not a regular file with a single link: remove it");
    return false;
  }
  (void)fchmod(file, 0644);  // regardless of the umask, other users must be able to open the file
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(queueSeconds);
  while (flock(file, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) {
      complain("load", std::string(path) + ": " + std::strerror(errno));
      return false;
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      std::array<char, 16> holder{};
      const ssize_t got = pread(file, holder.data(), holder.size() - 1, 0);
      const bool exists = got > 0 && access((std::string("/proc/") + holder.data()).c_str(), F_OK) == 0;
      const std::string user = exists ? std::string("process ") + holder.data() : "another session";
      complain("busy", user + " is using the board");
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  const std::string own = std::to_string(getpid());
  if (ftruncate(file, 0) == 0 && pwrite(file, own.data(), own.size(), 0) < 0) return true;
  return true;  // the file stays open and locked until this process exits
}

// Ends the session if the client disconnects while a kernel runs. If no kernel runs, readAll() detects this during the
// pause of one second.
void watchClient() {
  std::thread([] {
    pollfd input = {STDIN_FILENO, POLLRDHUP, 0};
    while (poll(&input, 1, -1) <= 0) continue;
    std::this_thread::sleep_for(std::chrono::seconds(1));
    removeStaged();
    _exit(1);
  }).detach();
}

}  // namespace

int main(int count, char **words) {
  if (count != 4) {
    (void)std::fprintf(stderr, "usage: loader LOCK_FILE QUEUE_SECONDS SESSION_SECONDS\n");
    return 2;
  }
  (void)std::signal(SIGPIPE, SIG_IGN);
  if (!locked(words[1], std::strtod(words[2], nullptr))) return 1;
  (void)std::atexit(removeStaged);
  (void)std::signal(SIGALRM, [](int) {
    removeStaged();
    _exit(TIMED_OUT);
  });
  alarm(static_cast<unsigned>(std::max(1.0, std::ceil(std::strtod(words[3], nullptr)))));
  watchClient();
  answer(" " + ownMachine() + "; " + boardModel());
  Session().serve();
}
