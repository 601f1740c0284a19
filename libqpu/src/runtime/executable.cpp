#include "runtime/executable.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "code/listing.hpp"
#include "error_facts.hpp"
#include "mem/heap.hpp"
#include "runtime/machine.hpp"
#include "runtime/words.hpp"

namespace qpu::runtime {
namespace {

constexpr std::uint32_t kMostQpus = 12;
constexpr std::uint32_t kLine = 64;
// The number of bytes that QPUs may prefetch after the end of the instructions and uniforms.
constexpr std::uint32_t kAhead = 256;

std::uint32_t lines(std::size_t bytes) {
  return static_cast<std::uint32_t>((bytes + kLine - 1) / kLine * kLine);
}

struct Total {
  std::mutex mutex;
  EmulatedWork work;
};
Total& total() {
  static Total t;
  return t;
}

thread_local Cycles ofThread{"", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};

void add(Cycles& c, const emu::Report& r, const emu::Board& board) {
  c.board = board.name;
  c.clockHz = board.clockHz;
  c.instructions += r.instructions;
  c.clocks += r.clocks;
  c.stalledOnTmu += r.stalledOnTmu;
  c.stalledOnVpm += r.stalledOnVpm;
  c.stalledOnOther += r.stalledOnOther;
  c.tmuBytes += r.tmuBytes;
  c.memoryReadBytes += r.memoryReadBytes;
  c.memoryWriteBytes += r.memoryWriteBytes;
  ++c.launches;
  c.registersLaunchSeconds += 1e-6 * board.registersLaunchUs;
  c.mailboxLaunchSeconds += 1e-6 * board.mailboxLaunchUs;
}

void addToTotal(const emu::Report& r, std::size_t qpus) {
  Total& t = total();
  const std::lock_guard<std::mutex> lock(t.mutex);
  ++t.work.runs;
  t.work.clocks += r.clocks;
  t.work.qpuClocks += r.clocks * qpus;
  t.work.instructions += r.instructions;
  t.work.stalledOnTmu += r.stalledOnTmu;
  t.work.stalledOnVpm += r.stalledOnVpm;
  t.work.stalledOnOther += r.stalledOnOther;
  t.work.memoryReadBytes += r.memoryReadBytes;
  t.work.memoryWriteBytes += r.memoryWriteBytes;
}

}  // namespace

EmulatedWork emulatedWork() {
  Total& t = total();
  const std::lock_guard<std::mutex> lock(t.mutex);
  return t.work;
}

Cycles cyclesOfThread() { return ofThread; }

bool emulatesLeniently() {
  const char* const set = std::getenv("QPU_EMULATOR");  // NOLINT(concurrency-mt-unsafe)
  const std::string mode = set != nullptr ? set : "";
  if (mode == "lenient") return true;
  if (mode.empty() || mode == "strict") return false;
  detail::raise<BackendError>("QPU_EMULATOR=" + mode + ": expected strict or lenient");
}

std::shared_ptr<const Executable::Run> Executable::lastRun() const {
  const std::lock_guard<std::mutex> lock(runMutex_);
  return run_;
}

Cycles Executable::cycles() const {
  const auto last = lastRun();
  Cycles c{"", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  if (last) add(c, last->report, *last->board);
  return c;
}

std::string Executable::listing() const {
  const auto last = lastRun();
  if (!last || last->report.perInstruction.size() != object_->words.size())
    return code::listing(*object_);
  std::vector<code::Cycles> profile;
  profile.reserve(object_->words.size());
  for (const emu::InstructionProfile& p : last->report.perInstruction)
    profile.push_back({p.executed, p.stalled});
  const Cycles c = cycles();
  return code::listing(*object_, &profile) + "model of " + c.board + ": " +
         std::to_string(c.clocks) + " clocks, " + std::to_string(c.seconds() * 1e6) +
         " us without the launch; stalled on TMU " + std::to_string(c.stalledOnTmu) + ", VPM " +
         std::to_string(c.stalledOnVpm) + ", other " + std::to_string(c.stalledOnOther) +
         "; bytes read " + std::to_string(c.memoryReadBytes) + ", written " +
         std::to_string(c.memoryWriteBytes) + " (not measured on hardware)\n";
}

void Executable::run(Kind kind, int qpus, const std::uint32_t* arguments, bool profile) {
  const auto streams = [&](std::uint32_t spill) {
    std::vector<std::vector<std::uint32_t>> all;
    all.reserve(static_cast<std::size_t>(qpus));
    for (int q = 0; q < qpus; ++q)
      all.push_back(code::uniformStream(
          *object_, q, qpus, arguments,
          spill + static_cast<std::uint32_t>(q) * object_->spillBytes));
    return all;
  };
  if (kind == Kind::Emulator) {
    std::vector<unsigned char> spill(static_cast<std::size_t>(qpus) * object_->spillBytes);
    emulate(streams(kEmulatedSpill), spill.data(), profile);
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  requireImage(object_->uniforms.size());
  start(kind, streams(image_.memory->bus() + image_.spill));
}

void Executable::runStreams(Kind kind, std::vector<std::vector<std::uint32_t>> streams,
                            bool profile) {
  if (kind == Kind::Emulator) {
    emulate(std::move(streams), nullptr, profile);
    return;
  }
  std::size_t most = 0;
  for (const auto& s : streams) most = std::max(most, s.size());
  const std::lock_guard<std::mutex> lock(mutex_);
  requireImage(most);
  start(kind, streams);
}

void Executable::emulate(std::vector<std::vector<std::uint32_t>> streams, unsigned char* spill,
                         bool profile) {
  const auto table = detail::Heap::instance().table();  // keeps the arrays alive
  emu::Launch launch;
  launch.words = object_->words.data();
  launch.count = object_->words.size();
  launch.codeAddress = kEmulatedCode;
  std::call_once(prepared_, [&] {
    program_ = emu::prepare(launch.words, launch.count, launch.codeAddress);
  });
  launch.program = program_.get();
  launch.memory.reserve(table->blocks.size() + 1);
  if (spill != nullptr && object_->spillBytes != 0)
    launch.memory.push_back({kEmulatedSpill,
                             static_cast<std::uint32_t>(streams.size()) * object_->spillBytes,
                             spill});
  for (const auto& b : table->blocks) launch.memory.push_back({b->start, b->bytes, b->host});
  launch.uniforms = std::move(streams);
  launch.object = object_.get();
  launch.board = &emulatedBoard();
  launch.profile = profile;
  launch.lenient = emulatesLeniently();
  // The time limit, which is the same as on hardware, is converted to the model's clocks.
  launch.clockLimit = static_cast<std::uint64_t>(
      std::chrono::duration<double>(launchLimit()).count() * launch.board->clockHz);
  auto run = std::make_shared<const Run>(Run{launch.board, emu::run(launch)});
  addToTotal(run->report, launch.uniforms.size());
  add(ofThread, run->report, *launch.board);
  const std::lock_guard<std::mutex> lock(runMutex_);
  warn(run->report.warnings);
  run_ = std::move(run);
}

// Prints warnings to standard error. Each warning is printed only once per program.
void Executable::warn(const std::vector<std::string>& warnings) {
  for (const std::string& w : warnings)
    if (warned_.insert(w).second) (void)std::fprintf(stderr, "libqpu: warning: %s\n", w.c_str());
}

// Allocates enough memory for `words` uniforms per QPU. The caller must hold the mutex.
void Executable::requireImage(std::size_t words) {
  const Opened& opened = openDevice();
  if (!opened.device) detail::raise<BackendError>(opened.fault);
  // A program that could not be stopped may still read the image, so the image must not change.
  opened.device->requireOpen();
  if (image_.memory && image_.device == opened.device && 4 * words <= image_.stride) return;
  image_ = Image();
  Image made;
  made.device = opened.device;
  made.uniforms = lines(8 * object_->words.size());
  made.stride = std::max(lines(4 * words), kLine);
  made.control = made.uniforms + kMostQpus * made.stride;
  made.spill = made.control + lines(std::size_t{8} * kMostQpus);
  const std::uint32_t bytes = made.spill + kMostQpus * object_->spillBytes + kAhead;
  made.memory = detail::allocateOrRelease(
      [&] { return opened.device->allocate(bytes, "kernel '" + object_->name + "': "); });
  clearDeviceWords(made.memory->host(), made.memory->bytes() / 4);
  copyDeviceWords(made.memory->host(), object_->words.data(), 2 * object_->words.size());
  image_ = std::move(made);
}

void Executable::start(Kind kind, const std::vector<std::vector<std::uint32_t>>& streams) {
  const auto table = detail::Heap::instance().table();  // keeps the arrays alive
  std::vector<Start> starts;
  starts.reserve(streams.size());
  std::uint32_t offset = image_.uniforms;
  for (const auto& stream : streams) {
    copyDeviceWords(image_.memory->host() + offset, stream.data(), stream.size());
    starts.push_back({image_.memory->bus() + offset, image_.memory->bus()});
    offset += image_.stride;
  }
  image_.device->launch(kind == Kind::Registers ? Method::Registers : Method::Mailbox, starts,
                        *image_.memory, image_.control, object_->name);
}

}  // namespace qpu::runtime
