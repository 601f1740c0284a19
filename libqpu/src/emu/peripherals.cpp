// The peripherals that QPUs access through I/O addresses.
#include <algorithm>
#include <cstring>

#include "emu/failure.hpp"
#include "isa/setup.hpp"

namespace qpu::emu {
namespace {

using detail::hex;
namespace address = isa::address;

constexpr std::uint32_t kAcquire = 16;         // bit in a semaphore instruction that means acquire
constexpr std::uint32_t kUniformPrefetch = 2;  // number of words that are fetched ahead
// Distance in bytes between the uniform streams in their address space.
constexpr std::uint32_t kUniformSpan = 1U << 14U;
constexpr std::uint32_t kMaxPitch = 8191;
constexpr std::uint32_t kMaxPitchField = 0xffff;
constexpr std::uint32_t kVectorBytes = 4 * kElements;

std::string count(std::uint32_t n, const char* what) {
  return std::to_string(n) + " " + what + (n == 1 ? "" : "s");
}

}  // namespace

void Machine::readPort(Qpu& q, std::uint8_t from, bool fileA, std::uint32_t at) {
  Vector& v = q.v[fileA ? slot::kPortA : slot::kPortB];
  switch (from) {
    case address::kUniform: v = interp::splat(readUniform(q, at)); return;
    case address::kVpm: readVpm(q, at, v); return;
    case address::kDmaBusy: {
      Dma& dma = fileA ? q.load : q.store;
      const bool busy = dma.running || dma.ended > q.clock;
      if (!busy) awaited(q, dma);
      v = interp::splat(busy ? 1U : 0U);
      return;
    }
    case address::kMutex: v = q.v[fileA ? slot::kElementNumber : slot::kQpuNumber]; return;
    default: v = interp::splat(0); return;
  }
}

void Machine::writeIo(Qpu& q, std::uint32_t at, bool fileA, std::uint8_t to, const Vector& value,
                      Mask where) {
  switch (to) {
    case address::kR5: writeR5(q, fileA, value, where); return;
    case address::kHostInterrupt:
      if ((where & 1U) != 0 && value.e[0] != 0) report_.hostInterrupt = true;
      return;
    case address::kTmuNoSwap:
      if (q.tmu[0].count != 0 || q.tmu[1].count != 0)
        fail<ExecutionError>(q, at, "TMU_NOSWAP is written while TMU requests are outstanding");
      q.noSwap = value.e[0] != 0;
      return;
    case address::kUniformsAddress:
      if (value.e[0] % 4 != 0)
        fail<BoundsError>(q, at,
                          "UNIFORMS_ADDRESS is set to " + hex(value.e[0]) +
                              ", which is not a multiple of 4",
                          value.e[0]);
      q.uniforms = UniformStream{};
      q.uniforms.next = value.e[0];
      return;
    case address::kVpm: writeVpm(q, at, value); return;
    case address::kVpmSetup:
      if (fileA)
        setupReads(q, at, value.e[0]);
      else
        setupWrites(q, at, value.e[0]);
      return;
    case address::kDmaAddress: startDma(q, at, fileA, value.e[0]); return;
    case address::kMutex: releaseMutex(q, at); return;
    case address::kTmu0S:
    case address::kTmu1S: request(q, at, to == address::kTmu1S ? 1 : 0, value); return;
    default:
      special(to, value, q.v[slot::kR4]);
      stall(q, at, q.clock + timing_.sfu(), report_.stalledOnOther);
      return;
  }
}

// Writes element 0 of each quad, or of the vector, to r5. Assumption: the condition must hold for
// the source element. Test on a board: write r5 under a condition that holds only for odd elements.
void Machine::writeR5(Qpu& q, bool fileA, const Vector& value, Mask where) {
  Vector& r5 = q.v[slot::kR5];
  for (std::uint32_t e = 0; e < kElements; ++e) {
    const std::uint32_t from = fileA ? e & ~3U : 0U;
    if ((where >> from & 1U) != 0) r5.e[e] = value.e[from];
  }
}

// In QPUs 2 and 3 of a slice, the TMUs are swapped unless TMU_NOSWAP is set.
unsigned Machine::unitOf(const Qpu& q, unsigned tmu) {
  const bool swapped = !q.noSwap && (q.number & 2U) != 0;
  return 2 * slice(q) + (swapped ? 1 - tmu : tmu);
}

void Machine::request(Qpu& q, std::uint32_t at, unsigned tmu, const Vector& addresses) {
  RequestQueue& queue = q.tmu[tmu];
  if (queue.count == kMaxRequests)
    fail<ExecutionError>(q, at,
                         "a fifth request to TMU" + std::to_string(tmu) +
                             " is outstanding; with more than 4 the hardware hangs");
  Request& r = queue.ring[(queue.oldest + queue.count) % kMaxRequests];
  ++queue.count;
  r.poison = 0;
  r.arrives = timing_.tmu(unitOf(q, tmu), q.clock, addresses);
  report_.tmuBytes += kVectorBytes;
  const std::uint32_t first = addresses.e[0] & ~3U;
  std::uint32_t scattered = 0;
  for (std::uint32_t e = 0; e < kElements; ++e)
    scattered |= (addresses.e[e] & ~3U) ^ (first + 4 * e);
  if (scattered == 0) {
    const std::uint32_t region = memory_.find(first, kVectorBytes, q.region);
    if (region != Memory::kNone && (!history_.isWritten(region) ||
                                    history_.isClean(region, first, kElements, q.number))) {
      std::memcpy(r.words.e.data(), memory_.host(region, first), kVectorBytes);
      history_.fetch(region, first, kVectorBytes);
      return;
    }
  }
  for (std::uint32_t e = 0; e < kElements; ++e) gatherWord(q, at, r, e, addresses.e[e] & ~3U);
}

void Machine::gatherWord(Qpu& q, std::uint32_t at, Request& r, std::uint32_t element,
                         std::uint32_t from) {
  const std::uint32_t region = memory_.find(from, 4, q.region);
  Poison p{Poison::Kind::Outside, from, element, at, 0};
  bool unsafe = true;
  if (region != Memory::kNone) {
    std::memcpy(&r.words.e[element], memory_.host(region, from), 4);
    unsafe = isUnsafe(q, region, p);
    history_.fetch(region, from, 4);
  }
  if (!unsafe || r.poison != 0) return;
  poisons_.push_back(p);
  r.poison = static_cast<PoisonNumber>(poisons_.size());
}

bool Machine::isUnsafe(const Qpu& q, std::uint32_t region, Poison& p) const {
  if (!history_.isWritten(region)) return false;
  p.writer = history_.writer(region, p.address);
  if (!history_.isOver(p.writer, q.number))
    p.kind = Poison::Kind::Unordered;
  else if (history_.isStale(region, p.address))
    p.kind = Poison::Kind::Stale;
  else
    return false;
  return true;
}

void Machine::receive(Qpu& q, unsigned tmu) {
  RequestQueue& queue = q.tmu[tmu];
  const Request& r = queue.ring[queue.oldest];
  queue.oldest = (queue.oldest + 1) % kMaxRequests;
  --queue.count;
  q.v[slot::kR4] = r.words;
  setPoison(q, slot::kR4, r.poison, true);
  if (r.poison != 0 && !q.careful) {
    q.careful = true;
    q.leave = true;
  }
}

bool Machine::uniformNeedsOrder(const Qpu& q) {
  const UniformStream& u = q.uniforms;
  const bool given = u.given;
  const std::uint32_t ahead = given ? q.number * kUniformSpan + 4 * (u.next + kUniformPrefetch)
                                    : u.next + 4 * kUniformPrefetch;
  return lineOf(given ? Space::Uniforms : Space::Memory, ahead) != u.line;
}

// The QPU fetches two words ahead, so that a cache line is requested before it is needed.
std::uint32_t Machine::readUniform(Qpu& q, std::uint32_t at) {
  UniformStream& u = q.uniforms;
  const bool given = u.given;
  if (given && u.next >= u.count)
    fail<ExecutionError>(q, at,
                         "a uniform is read beyond the " + count(u.count, "uniform") +
                             " of this QPU");
  const Space space = given ? Space::Uniforms : Space::Memory;
  const std::uint32_t here = given ? q.number * kUniformSpan + 4 * u.next : u.next;
  const std::uint32_t line = lineOf(space, here);
  const std::uint32_t ahead = lineOf(space, here + 4 * kUniformPrefetch);
  if (u.line != line && u.line != ahead) {
    u.line = line;
    u.arrives = timing_.uniformLine(slice(q), line, q.clock);
  }
  if (u.line == line) stall(q, at, u.arrives, report_.stalledOnOther);
  if (u.line != ahead) {
    u.line = ahead;
    u.arrives = timing_.uniformLine(slice(q), ahead, q.clock);
  }
  if (given) return u.words[u.next++];
  const std::uint32_t region = memory_.find(here, 4, u.region);
  if (region == Memory::kNone) failOutside(q, at, here, "a uniform is read from");
  Poison p{Poison::Kind::Outside, here, 0, at, 0};
  if (isUnsafe(q, region, p))
    fail<ExecutionError>(q, at, "a uniform is read from " + describe(p));
  history_.fetch(region, here, 4);
  std::uint32_t word = 0;
  std::memcpy(&word, memory_.host(region, here), 4);
  u.next += 4;
  return word;
}

void Machine::setupReads(Qpu& q, std::uint32_t at, std::uint32_t word) {
  constexpr std::uint32_t pitch = 9;
  if (word >> 30U == 0) {
    if (q.reads.left != 0)
      fail<ExecutionError>(q, at,
                           "a VPM read setup is written while " + count(q.reads.left, "vector") +
                               " of the previous one " + (q.reads.left == 1 ? "is" : "are") +
                               " unread");
    setupWindow(q, at, q.reads, word);
    q.readsReady = q.clock + timing_.vpmSetup();
    if (q.load.awaited) return;
    Window w = q.reads;
    for (std::uint32_t n = 0; n < w.left; ++n, w.advance())
      for (std::uint32_t e = 0; e < kElements; ++e) {
        const std::uint32_t p = w.place(e).word;
        if ((q.load.words[p / kVpmColumns] >> p % kVpmColumns & 1U) != 0)
          fail<ExecutionError>(q, at,
                               "a VPM word of a DMA load is read without a wait for that load, "
                               "which was started by " +
                                   describe(q.load.startedAt));
      }
  } else if (word >> 28U == pitch) {
    setupLoadPitch(q, at, word);
  } else if (word >> 31U == 1) {
    q.load.setup.ready = true;
    q.load.setup.basic = word;
  } else {
    fail<ExecutionError>(q, at, "the VPM read setup " + hex(word) + " is invalid");
  }
}

// Reports a pitch that is too large. Broadcom's guide gives 13 bits for the pitch, but other
// authors have found 16 bits.
void Machine::requirePitch(const Qpu& q, std::uint32_t at, const char* what,
                           std::uint32_t bytes) {
  if (bytes <= kMaxPitch) return;
  const std::string text = what + std::to_string(bytes) + " bytes, but must be 0..";
  if (bytes > kMaxPitchField)
    fail<ExecutionError>(q, at, text + std::to_string(kMaxPitch));
  reportUncertain(q, at, text + std::to_string(kMaxPitch), "all 16 bits are used");
}

void Machine::setupLoadPitch(Qpu& q, std::uint32_t at, std::uint32_t word) {
  const std::uint32_t pitch = word & 0xfffffffU;
  requirePitch(q, at, "a DMA load pitch is ", pitch);
  q.load.setup.hasPitch = true;
  q.load.setup.pitch = pitch;
}

void Machine::setupWrites(Qpu& q, std::uint32_t at, std::uint32_t word) {
  DmaSetup& setup = q.store.setup;
  switch (word >> 30U) {
    case 0: setupWindow(q, at, q.writes, word); return;
    case 2: {
      constexpr std::uint32_t laned = 1U << 15U;
      if ((word & 7U) == 1 || (word & laned) != 0)
        fail<ExecutionError>(q, at, "the DMA store setup " + hex(word) + " has reserved bits set");
      setup.ready = true;
      setup.basic = word;
      return;
    }
    case 3: {
      const std::uint32_t stride = word & kMaxPitchField;
      requirePitch(q, at, "a DMA store stride is ", stride);
      setup.hasPitch = true;
      setup.pitch = stride;
      setup.packed = (word >> 16U & 1U) != 0;
      return;
    }
    default:
      fail<ExecutionError>(q, at, "the VPM write setup " + hex(word) + " is invalid");
  }
}

void Machine::setupWindow(Qpu& q, std::uint32_t at, Window& window, std::uint32_t word) {
  const Window w(word);
  if (w.size == 3) fail<ExecutionError>(q, at, "the VPM setup " + hex(word) + " is invalid");
  const char* const fault = isa::setupFault(word, false);
  if (fault != nullptr)
    fail<ExecutionError>(q, at, "the VPM setup " + hex(word) + ": " + fault);
  window = w;
}

void Machine::readVpm(Qpu& q, std::uint32_t at, Vector& v) {
  if (!q.reads.ready) fail<ExecutionError>(q, at, "the VPM is read without a read setup");
  if (q.reads.left == 0)
    fail<ExecutionError>(q, at, "more VPM vectors are read than the read setup specifies");
  stall(q, at, q.readsReady, report_.stalledOnVpm);
  stall(q, at, timing_.vpm(q.clock), report_.stalledOnVpm);
  if (history_.isShared())
    for (std::uint32_t e = 0; e < kElements; ++e) requireVpmOrder(q, at, q.reads.place(e).word, "read");
  vpm_.read(q.reads, v);
  q.reads.advance();
  --q.reads.left;
}

void Machine::writeVpm(Qpu& q, std::uint32_t at, const Vector& v) {
  if (!q.writes.ready) fail<ExecutionError>(q, at, "the VPM is written without a write setup");
  const bool isRow = q.writes.isRow();
  for (const Dma* dma : {&q.store, &q.load}) {
    if (dma->awaited) continue;
    if (isRow && dma->words[q.writes.row()] == 0) continue;
    for (std::uint32_t e = 0; e < kElements; ++e) {
      const std::uint32_t p = q.writes.place(e).word;
      if ((dma->words[p / kVpmColumns] >> p % kVpmColumns & 1U) != 0)
        fail<ExecutionError>(q, at,
                             std::string("a VPM word of a DMA ") +
                                 (dma == &q.store ? "store is written without a wait for that store"
                                                  : "load is written without a wait for that load") +
                                 ", which was started by " +
                                 describe(dma->startedAt));
    }
  }
  if (history_.isShared() &&
      !(isRow && history_.writeVpmRow(q.writes.row(), q.number))) {
    const Tag by = history_.tagOfQpu(q.number);
    for (std::uint32_t e = 0; e < kElements; ++e) tagVpm(q, at, q.writes.place(e).word, by);
  }
  stall(q, at, timing_.vpm(q.clock), report_.stalledOnVpm);
  vpm_.write(q.writes, v);
  q.writes.advance();
}

void Machine::tagVpm(const Qpu& q, std::uint32_t at, std::uint32_t word, Tag by) {
  Tag& tag = history_.vpm(word);
  if (tag == by) return;
  requireVpmOrder(q, at, word, "written");
  tag = by;
}

// Checks that the QPU accesses a word of the VPM after the last write to this word.
void Machine::requireVpmOrder(const Qpu& q, std::uint32_t at, std::uint32_t word, const char* accessed) {
  const Tag writer = history_.vpm(word);
  if (history_.mayOverwrite(writer, q.number)) return;
  fail<ExecutionError>(q, at,
                       "row " + std::to_string(word / kVpmColumns) + ", column " +
                           std::to_string(word % kVpmColumns) + " of the VPM is " + accessed +
                           " without being ordered after the write by " + describeWriter(writer));
}

void Machine::tagMemory(const Qpu& q, std::uint32_t at, std::uint32_t region,
                        std::uint32_t to, std::uint32_t words) {
  std::uint32_t conflict = 0;
  const Tag before = history_.write(region, to, words, q.number, conflict);
  if (before != 0)
    fail<ExecutionError>(q, at,
                         "bus address " + hex(conflict) +
                             " is written without being ordered after the write by " +
                             describeWriter(before),
                         conflict);
}

// Checks that a DMA load reads valid data. DMA loads bypass the caches, but if nothing orders a
// load after a store, the load can be executed before the store.
void Machine::checkRead(const Qpu& q, std::uint32_t at, std::uint32_t region,
                        std::uint32_t from) const {
  const Tag writer = history_.writer(region, from);
  if (history_.isOver(writer, q.number)) return;
  const Poison p{Poison::Kind::Unordered, from, 0, at, writer};
  fail<ExecutionError>(q, at, "a DMA load reads " + describe(p), from);
}

void Machine::startDma(Qpu& q, std::uint32_t at, bool load, std::uint32_t from) {
  Dma& dma = load ? q.load : q.store;
  Dma& other = load ? q.store : q.load;
  const std::string what = load ? "DMA load" : "DMA store";
  const DmaSetup& setup = dma.setup;
  if (!setup.ready) fail<ExecutionError>(q, at, "a " + what + " is started without a setup");
  if (!dma.awaited)  // does not occur in a lenient launch, which waits for the earlier transfer
    reportUncertain(q, at, "a " + what + earlierDma(dma), "");
  const Transfer t = load ? setup.load() : setup.store();
  // For stores, the stride is 0 until a program sets it (qmkl, issue 27).
  if (t.rows > 1 && load && !setup.hasPitch && setup.loadUsesPitch())
    fail<ExecutionError>(
        q, at, "a " + what + " of " + count(t.rows, "row") + " is started without a pitch");
  dma.startedAt = at;
  dma.words.fill(0);
  history_.start(q.number, load, at);
  for (std::uint32_t i = 0; i < t.rows; ++i)
    moveRow(q, at, dma, t, i, load, from + i * t.memoryPitch);
  if (!other.awaited)
    for (std::uint32_t r = 0; r < kVpmRows; ++r)
      if ((dma.words[r] & other.words[r]) != 0)
        fail<ExecutionError>(q, at,
                             "a " + what + " uses VPM words of a DMA " +
                                 (load ? "store without a wait for that store"
                                       : "load without a wait for that load") +
                                 ", which was started by " +
                                 describe(other.startedAt));
  dma.running = true;
  dma.awaited = false;
  Engine& engine = load ? loads_ : stores_;
  engine.start({q.number, t.rows, t.length * t.unitBytes, from, t.memoryPitch}, q.clock);
  horizon_ = std::min(horizon_, key(engine.next(), load ? kLoadEngine : kStoreEngine));
}

void Machine::moveRow(Qpu& q, std::uint32_t at, Dma& dma, const Transfer& t, std::uint32_t row,
                      bool load, std::uint32_t from) {
  const std::uint32_t bytes = t.length * t.unitBytes;
  const char* const verb = load ? "reading " : "writing ";
  if (from % t.unitBytes != 0)
    fail<BoundsError>(q, at,
                      verb + hex(from) + " by DMA: the address is not a multiple of " +
                          std::to_string(t.unitBytes),
                      from);
  const std::uint32_t region = memory_.find(from, bytes, q.region);
  if (region == Memory::kNone)
    failOutside(q, at, memory_.firstOutside(from),
                verb + count(t.length, t.unitBytes == 4   ? "word"
                                       : t.unitBytes == 2 ? "half word"
                                                          : "byte") +
                    " from " + hex(from) + " by DMA reaches");
  unsigned char* const host = memory_.host(region, from);
  const std::uint32_t words = (from % 4 + bytes + 3) / 4;
  if (!load)
    tagMemory(q, at, region, from & ~3U, words);
  else if (history_.isWritten(region))
    for (std::uint32_t i = 0; i < words; ++i) checkRead(q, at, region, (from & ~3U) + 4 * i);
  const bool tags = load && history_.isShared();
  if (!load && history_.isShared())
    for (std::uint32_t j = 0; j < t.length; ++j)
      if (const std::uint32_t n = t.word(row, j); n != Transfer::kOutside) requireVpmOrder(q, at, n, "stored");
  if (t.isRowOfWords(row) && !tags) {
    std::uint32_t* const vpm = &vpm_.word(t.word(row, 0));
    if (load)
      std::memcpy(vpm, host, bytes);
    else
      std::memcpy(host, vpm, bytes);
    std::uint16_t& used = dma.words[t.word(row, 0) / kVpmColumns];
    used = static_cast<std::uint16_t>(used | ((1U << t.length) - 1U) << t.column);
    return;
  }
  for (std::uint32_t j = 0; j < t.length; ++j) {
    const std::uint32_t n = t.word(row, j);
    if (n == Transfer::kOutside)
      fail<ExecutionError>(q, at,
                           "row " + std::to_string(row) + " of a DMA " +
                               (load ? "load" : "store") + " of " + count(t.rows, "row") + " by " +
                               std::to_string(t.length) + " from row " + std::to_string(t.row) +
                               ", column " + std::to_string(t.column) +
                               " exceeds the VPM's 64 rows by 16 columns");
    dma.words[n / kVpmColumns] =
        static_cast<std::uint16_t>(dma.words[n / kVpmColumns] | 1U << n % kVpmColumns);
    if (tags) tagVpm(q, at, n, history_.tagOfDma(q.number, true));
    std::uint32_t& word = vpm_.word(n);
    if (t.unitBytes == 4) {
      if (load)
        std::memcpy(&word, host + std::size_t{4} * j, 4);
      else
        std::memcpy(host + std::size_t{4} * j, &word, 4);
      continue;
    }
    const std::uint32_t shift = t.shift(row, j);
    const std::uint32_t mask = (1U << 8 * t.unitBytes) - 1U;
    for (std::uint32_t b = 0; b < t.unitBytes; ++b) {
      unsigned char& byte = host[j * t.unitBytes + b];
      const std::uint32_t place = shift + 8 * b;
      if (load)
        word = (word & ~(0xffU << place)) | std::uint32_t{byte} << place;
      else
        byte = static_cast<unsigned char>(word >> place & mask);
    }
  }
}

std::string Machine::earlierDma(const Dma& dma) const {
  return " is started without a wait for the previous one, which was started by " +
         describe(dma.startedAt);
}

// Handles a write to an address that starts a transfer. In a lenient launch, the write waits
// until the previous transfer is complete.
bool Machine::passEarlierDma(Qpu& q, const Op& op, const isa::Instruction& i) {
  for (const bool load : {true, false}) {
    const bool starts = (op.add != 0 && i.waddrAdd == address::kDmaAddress &&
                         addWritesA(i) == load) ||
                        (op.mul != isa::MulOp::Nop && i.waddrMul == address::kDmaAddress &&
                         mulWritesA(i) == load);
    Dma& dma = load ? q.load : q.store;
    if (!starts || dma.awaited) continue;
    reportUncertain(q, q.next, std::string(load ? "a DMA load" : "a DMA store") + earlierDma(dma),
                    "the QPU waits until the previous one is done");
    if (!passDma(q, dma, load ? State::AtLoadWait : State::AtStoreWait)) return false;
  }
  return true;
}

bool Machine::passDma(Qpu& q, Dma& dma, State waiting) {
  if (dma.running) {
    q.state = waiting;
    return false;
  }
  stall(q, q.next, dma.ended, report_.stalledOnVpm);
  awaited(q, dma);
  return true;
}

void Machine::awaited(Qpu& q, Dma& dma) {
  dma.awaited = true;
  history_.await(q.number, &dma == &q.load);
}

bool Machine::passSemaphore(Qpu& q, const isa::Instruction& i) {
  const std::uint32_t number = i.immediate % kSemaphores;
  const bool acquires = (i.immediate & kAcquire) != 0;
  std::uint32_t& value = semaphores_[number];
  if (value == (acquires ? 0 : kSemaphoreMost)) {
    q.state = State::AtSemaphore;
    q.awaited = number;
    return false;
  }
  if (acquires) {
    --value;
    history_.acquire(q.number, released_[number]);
    if (value == 0) released_[number] = {};
  } else {
    ++value;
    history_.release(q.number, released_[number]);
  }
  wake(q, State::AtSemaphore, number);
  return true;
}

bool Machine::passMutex(Qpu& q) {
  if (mutexHolder_ != nullptr && mutexHolder_ != &q) {
    q.state = State::AtMutex;
    return false;
  }
  mutexHolder_ = &q;
  history_.acquire(q.number, mutexReleased_);
  return true;
}

void Machine::releaseMutex(Qpu& q, std::uint32_t at) {
  if (mutexHolder_ != &q)
    fail<ExecutionError>(q, at, "the mutex is released, but this QPU does not hold it");
  mutexHolder_ = nullptr;
  history_.release(q.number, mutexReleased_);
  wake(q, State::AtMutex, 0);
}

// Resumes the QPU that has waited longest, which then retries its instruction.
void Machine::wake(Qpu& by, State waiting, std::uint32_t semaphore) {
  Qpu* first = nullptr;
  for (Qpu& q : qpus_) {
    if (q.state != waiting || (waiting == State::AtSemaphore && q.awaited != semaphore)) continue;
    if (first == nullptr || key(q.clock, q.number) < key(first->clock, first->number)) first = &q;
  }
  if (first == nullptr) return;
  first->state = State::Ready;
  stall(*first, first->next, by.clock + timing_.semaphore(), report_.stalledOnOther);
  horizon_ = std::min(horizon_, key(first->clock, first->number));
}

}  // namespace qpu::emu
