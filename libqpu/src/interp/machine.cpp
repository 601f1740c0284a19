#include "interp/machine.hpp"

#include <array>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "error_facts.hpp"
#include "interp/memory.hpp"
#include "interp/vector_ops.hpp"
#include "interp/vpm.hpp"
#include "lang/gathers.hpp"

namespace qpu::interp {
namespace {

using detail::hex;

constexpr std::size_t kMaxGathers = 2 * detail::kTmuDepth;
constexpr int kSemaphoreMost = 15;
constexpr std::uint32_t kMaxPitch = 8191;
constexpr std::uint32_t kVectorBytes = 4 * kElements;

// A gather from addresses outside all arrays. Software-pipelined loops fetch and discard one
// surplus vector, so such a gather is an error only if its vector is used.
struct Stray {
  std::uint32_t address;
  std::uint32_t element;
  std::uint32_t site;
};

struct Request {
  Vector words;
  bool stray = false;
  Stray where{};
};

enum class State : std::uint8_t { Ready, Waiting, Ended };

struct Qpu {
  std::array<Request, kMaxGathers> requests;
  std::size_t oldest = 0;
  std::size_t outstanding = 0;
  std::vector<Vector> slots;
  std::map<std::uint32_t, Stray> strays;  // the slots that contain a stray vector
  VpmWindow reads;
  VpmWindow writes;
  Dma load;
  Dma store;
  std::uint32_t next = 0;  // index of the next instruction
  State state = State::Ready;
};

class Machine {
 public:
  Machine(const Code& code, int qpus, const std::uint32_t* uniforms, std::size_t count)
      : code_(code), memory_(code.instructions.size()), qpus_(static_cast<std::size_t>(qpus)) {
    std::vector<Vector> start(code.slots, splat(0));
    for (std::size_t i = 0; i < count; ++i) start[i] = splat(uniforms[i]);
    for (const Preset& p : code.constants) start[p.slot] = splat(p.bits);
    if (code.elementSlot != Code::kNoSlot)
      for (std::uint32_t i = 0; i < kElements; ++i) start[code.elementSlot].e[i] = i;
    if (code.countSlot != Code::kNoSlot)
      start[code.countSlot] = splat(static_cast<std::uint32_t>(qpus));
    for (std::size_t i = 0; i < qpus_.size(); ++i) {
      qpus_[i].slots = start;
      if (code.qpuSlot != Code::kNoSlot)
        qpus_[i].slots[code.qpuSlot] = splat(static_cast<std::uint32_t>(i));
    }
  }

  void run() {
    for (std::size_t ended = 0; ended < qpus_.size();) {
      bool progress = false;
      for (Qpu& q : qpus_) {
        if (q.state == State::Ended) continue;
        // A QPU may have executed a loop iteration even if it waits at the same instruction as
        // before.
        const std::uint64_t before = semaphoresPassed_;
        turn(q);
        progress = progress || q.state != State::Waiting || semaphoresPassed_ != before;
        if (q.state == State::Ended) ++ended;
      }
      if (!progress) deadlock();
    }
    requireBalancedSemaphores();
  }

 private:
  int number(const Qpu& q) const { return static_cast<int>(&q - qpus_.data()); }

  template <typename E>
  [[noreturn]] void fail(const Qpu& q, std::uint32_t site, const std::string& what,
                         std::uint32_t address = 0) const {
    const Site& s = code_.sites[site];
    detail::raise<E>("kernel '" + code_.name + "', QPU " + std::to_string(number(q)) + ", " +
                         s.description + ": " + what,
                     {code_.name, s.construct, number(q), address});
  }

  [[noreturn]] void outside(const Qpu& q, std::uint32_t site, std::uint32_t address,
                            const std::string& what) const {
    fail<BoundsError>(q, site,
                      what + " bus address " + hex(address) + ", outside of every SharedArray; " +
                          memory_.nearest(address),
                      address);
  }

  // Instruction `at` of q accesses `bytes` bytes at `address`. Returns their host address.
  unsigned char* words(const Qpu& q, std::size_t at, std::uint32_t address, std::uint32_t bytes,
                       const char* verb) {
    const std::uint32_t site = code_.instructions[at].site;
    if ((address & 3U) != 0)
      fail<BoundsError>(q, site,
                        std::string(verb) + " bus address " + hex(address) +
                            ", which is not a multiple of 4",
                        address);
    unsigned char* host = memory_.find(at, address, bytes);
    if (host == nullptr)
      outside(q, site, memory_.firstOutside(address),
              std::string(verb) + " " + std::to_string(bytes / 4) + " words from " +
                  hex(address) + " reaches");
    return host;
  }

  void storeFirst(Qpu& q, const Instruction& in) {
    const std::uint32_t n = q.slots[in.extra].e[0];
    if (n < 1 || n > kElements)
      fail<ExecutionError>(
          q, in.site, "the number of words is " + std::to_string(asSigned(n)) + ", but must be 1..16");
    std::memcpy(words(q, index(in), q.slots[in.b].e[0], 4 * n, "writing"), q.slots[in.a].e.data(),
                std::size_t{4} * n);
  }

  void gather(Qpu& q, const Instruction& in) {
    if (q.outstanding == code_.mostGathers)
      fail<ExecutionError>(q, in.site,
                           std::string(q.outstanding == kMaxGathers ? "a ninth" : "a fifth") +
                               " gather is outstanding; with more than " +
                               std::to_string(q.outstanding) + " the hardware hangs");
    Request& r = q.requests[(q.oldest + q.outstanding) % kMaxGathers];
    ++q.outstanding;
    r.stray = false;
    const Vector& addresses = q.slots[in.a];
    const std::size_t at = index(in);
    const std::uint32_t first = addresses.e[0] & ~3U;
    std::uint32_t scattered = 0;
    for (std::uint32_t i = 0; i < kElements; ++i)
      scattered |= (addresses.e[i] & ~3U) ^ (first + 4 * i);
    if (scattered == 0) {
      const unsigned char* host = memory_.find(at, first, kVectorBytes);
      if (host != nullptr) {
        std::memcpy(r.words.e.data(), host, kVectorBytes);
        return;
      }
    }
    for (std::uint32_t i = 0; i < kElements; ++i) {
      const std::uint32_t address = addresses.e[i] & ~3U;
      const unsigned char* host = memory_.find(at, address, 4);
      if (host != nullptr) {
        std::memcpy(&r.words.e[i], host, 4);
      } else if (!r.stray) {
        r.stray = true;
        r.where = {address, i, in.site};
      }
    }
  }

  void receive(Qpu& q, const Instruction& in) {
    if (q.outstanding == 0) fail<ExecutionError>(q, in.site, "no gather is outstanding");
    const Request& r = q.requests[q.oldest];
    q.oldest = (q.oldest + 1) % kMaxGathers;
    --q.outstanding;
    q.slots[in.target] = r.words;
    if (r.stray) q.strays[in.target] = r.where;
  }

  // Called before `in` is executed if some slot contains a stray vector.
  void followStrays(Qpu& q, const Instruction& in) {
    const Uses u = uses(in.code);
    const auto a = u.a ? q.strays.find(in.a) : q.strays.end();
    if (in.code == Opcode::Move) {
      const bool stray = a != q.strays.end();
      const Stray s = stray ? a->second : Stray{};
      q.strays.erase(in.target);
      if (stray) q.strays[in.target] = s;
      return;
    }
    useOf(q, a);
    if (u.b) useOf(q, q.strays.find(in.b));
    if (in.code == Opcode::StoreFirst) useOf(q, q.strays.find(in.extra));
    if (u.target && in.code != Opcode::MoveWhere) q.strays.erase(in.target);
  }

  void useOf(const Qpu& q, std::map<std::uint32_t, Stray>::const_iterator s) const {
    if (s == q.strays.end()) return;
    outside(q, s->second.site, s->second.address,
            "element " + std::to_string(s->second.element) +
                " of a vector that was received and used came from");
  }

  std::size_t index(const Instruction& in) const {
    return static_cast<std::size_t>(&in - code_.instructions.data());
  }

  // Runs q until the end of its turn.
  void turn(Qpu& q) {
    q.state = State::Ready;
    int iterations = kIterationsPerTurn;
    Vector* const v = q.slots.data();
    const Instruction* const program = code_.instructions.data();
    const Instruction* at = program + q.next;
    for (;;) {
      const Instruction& in = *at++;
      if (!q.strays.empty()) followStrays(q, in);
      switch (in.code) {
        case Opcode::Add:
          map(v[in.target], v[in.a], v[in.b], [](auto a, auto b) { return a + b; });
          break;
        case Opcode::Sub:
          map(v[in.target], v[in.a], v[in.b], [](auto a, auto b) { return a - b; });
          break;
        case Opcode::Mul24: map(v[in.target], v[in.a], v[in.b], mul24); break;
        case Opcode::Min:
          map(v[in.target], v[in.a], v[in.b],
              [](auto a, auto b) { return asSigned(a) > asSigned(b) ? b : a; });
          break;
        case Opcode::Max:
          map(v[in.target], v[in.a], v[in.b],
              [](auto a, auto b) { return asSigned(a) > asSigned(b) ? a : b; });
          break;
        case Opcode::Shl: map(v[in.target], v[in.a], v[in.b], shl); break;
        case Opcode::Asr: map(v[in.target], v[in.a], v[in.b], asr); break;
        case Opcode::Shr: map(v[in.target], v[in.a], v[in.b], shr); break;
        case Opcode::Ror: map(v[in.target], v[in.a], v[in.b], ror); break;
        case Opcode::And:
        case Opcode::MaskAnd:
          map(v[in.target], v[in.a], v[in.b], [](auto a, auto b) { return a & b; });
          break;
        case Opcode::Or:
        case Opcode::MaskOr:
          map(v[in.target], v[in.a], v[in.b], [](auto a, auto b) { return a | b; });
          break;
        case Opcode::Xor:
          map(v[in.target], v[in.a], v[in.b], [](auto a, auto b) { return a ^ b; });
          break;
        case Opcode::Not:
        case Opcode::MaskNot: map(v[in.target], v[in.a], [](auto a) { return ~a; }); break;
        case Opcode::FAdd: vectorFadd(v[in.target], v[in.a], v[in.b]); break;
        case Opcode::FSub: vectorFsub(v[in.target], v[in.a], v[in.b]); break;
        case Opcode::FMul: vectorFmul(v[in.target], v[in.a], v[in.b]); break;
        case Opcode::FMin: map(v[in.target], v[in.a], v[in.b], fmin); break;
        case Opcode::FMax: map(v[in.target], v[in.a], v[in.b], fmax); break;
        case Opcode::FMaxAbs: map(v[in.target], v[in.a], v[in.b], fmaxabs); break;
        case Opcode::Recip: map(v[in.target], v[in.a], recip); break;
        case Opcode::RecipSqrt: map(v[in.target], v[in.a], recipSqrt); break;
        case Opcode::Exp2: map(v[in.target], v[in.a], exp2); break;
        case Opcode::Log2: map(v[in.target], v[in.a], log2); break;
        case Opcode::Broadcast:
          v[in.target] = splat(v[in.a].e[v[in.b].e[0] % kElements]);
          break;
        case Opcode::ItoF: map(v[in.target], v[in.a], itof); break;
        case Opcode::FtoI: map(v[in.target], v[in.a], ftoi); break;
        case Opcode::Rotate:
          rotateUp(v[in.target], v[in.a], v[in.b].e[0] % kElements);
          break;
        case Opcode::Eq:
          map(v[in.target], v[in.a], v[in.b], [](auto a, auto b) { return mask(a == b); });
          break;
        case Opcode::Ne:
          map(v[in.target], v[in.a], v[in.b], [](auto a, auto b) { return mask(a != b); });
          break;
        case Opcode::Lt:
          map(v[in.target], v[in.a], v[in.b],
              [](auto a, auto b) { return mask(asSigned(a) < asSigned(b)); });
          break;
        case Opcode::Le:
          map(v[in.target], v[in.a], v[in.b],
              [](auto a, auto b) { return mask(asSigned(a) <= asSigned(b)); });
          break;
        case Opcode::Gt:
          map(v[in.target], v[in.a], v[in.b],
              [](auto a, auto b) { return mask(asSigned(a) > asSigned(b)); });
          break;
        case Opcode::Ge:
          map(v[in.target], v[in.a], v[in.b],
              [](auto a, auto b) { return mask(asSigned(a) >= asSigned(b)); });
          break;
        case Opcode::FEq:
          compareFloat(v[in.target], v[in.a], v[in.b], [](auto a, auto b) { return a == b; });
          break;
        case Opcode::FNe:
          compareFloat(v[in.target], v[in.a], v[in.b], [](auto a, auto b) { return a != b; });
          break;
        case Opcode::FLt:
          compareFloat(v[in.target], v[in.a], v[in.b], [](auto a, auto b) { return a < b; });
          break;
        case Opcode::FGe:
          compareFloat(v[in.target], v[in.a], v[in.b], [](auto a, auto b) { return a >= b; });
          break;
        case Opcode::FGt:
          compareFloat(v[in.target], v[in.a], v[in.b], [](auto a, auto b) { return a > b; });
          break;
        case Opcode::FLe:
          compareFloat(v[in.target], v[in.a], v[in.b], [](auto a, auto b) { return a <= b; });
          break;
        case Opcode::Any: v[in.target] = splat(mask(anySet(v[in.a]))); break;
        case Opcode::All: v[in.target] = splat(mask(allSet(v[in.a]))); break;
        case Opcode::Move: v[in.target] = v[in.a]; break;
        case Opcode::MoveWhere: {
          // The source can be the same slot as the target, so it is read before the target
          // changes.
          Vector& t = v[in.target];
          const Vector& m = v[in.b];
          Vector chosen;
          map(chosen, v[in.a], m, [](auto fresh, auto take) { return fresh & take; });
          map(t, t, m, [](auto old, auto keep) { return old & ~keep; });
          map(t, t, chosen, [](auto a, auto b) { return a | b; });
          break;
        }
        case Opcode::Load:
          std::memcpy(v[in.target].e.data(),
                      words(q, index(in), v[in.a].e[0], kVectorBytes, "reading"), kVectorBytes);
          break;
        case Opcode::Store:
          std::memcpy(words(q, index(in), v[in.b].e[0], kVectorBytes, "writing"),
                      v[in.a].e.data(), kVectorBytes);
          break;
        case Opcode::StoreFirst: storeFirst(q, in); break;
        case Opcode::Gather: gather(q, in); break;
        case Opcode::Receive: receive(q, in); break;
        case Opcode::Jump: at = program + in.extra; break;
        case Opcode::JumpBack:
          at = program + in.extra;
          if (--iterations == 0) {
            q.next = in.extra;
            return;
          }
          break;
        case Opcode::JumpIfNot:
          if (v[in.a].e[0] == 0) at = program + in.extra;
          break;
        case Opcode::JumpIfNone:
          if (!anySet(v[in.a])) at = program + in.extra;
          break;
        case Opcode::JumpIfNotAll:
          if (!allSet(v[in.a])) at = program + in.extra;
          break;
        case Opcode::SemaphoreRelease:
        case Opcode::SemaphoreAcquire:
          if (!semaphore(in)) {
            q.next = static_cast<std::uint32_t>(index(in));
            q.state = State::Waiting;
            return;
          }
          break;
        case Opcode::End:
          end(q, in);
          return;
        default: rare(q, in); break;
      }
    }
  }

  // Returns false if the QPU must wait.
  bool semaphore(const Instruction& in) {
    int& value = semaphores_[static_cast<std::size_t>(code_.details[in.extra].count)];
    if (in.code == Opcode::SemaphoreRelease) {
      if (value == kSemaphoreMost) return false;
      ++value;
    } else {
      if (value == 0) return false;
      --value;
    }
    ++semaphoresPassed_;
    return true;
  }

  void end(Qpu& q, const Instruction& in) {
    if (q.load.running || q.store.running)
      fail<ExecutionError>(q, in.site,
                           std::string("the kernel ends while a DMA transfer is running; ") +
                               (q.load.running ? "dmaWaitRead" : "dmaWaitWrite") +
                               " is missing");
    if (q.reads.left != 0)
      fail<ExecutionError>(q, in.site,
                           "the kernel ends before reading " + std::to_string(q.reads.left) +
                               " vectors of its vpmSetupRead");
    q.state = State::Ended;
  }

  [[noreturn]] void deadlock() const {
    std::string text;
    for (const Qpu& q : qpus_) {
      if (q.state != State::Waiting) continue;
      const Instruction& in = code_.instructions[q.next];
      const int s = code_.details[in.extra].count;
      text += (text.empty() ? "QPU " : "; QPU ") + std::to_string(number(q)) + " in " +
              code_.sites[in.site].description + " for semaphore " + std::to_string(s) +
              ", which is " + std::to_string(semaphores_[static_cast<std::size_t>(s)]);
    }
    detail::raise<DeadlockError>(
        "kernel '" + code_.name + "': deadlock; every QPU that has not finished is waiting: " +
            text,
        {code_.name, "semaphore", -1, 0});
  }

  void requireBalancedSemaphores() const {
    for (std::size_t i = 0; i < semaphores_.size(); ++i)
      if (semaphores_[i] != 0)
        detail::raise<ExecutionError>(
            "kernel '" + code_.name + "': semaphore " + std::to_string(i) + " is " +
                std::to_string(semaphores_[i]) +
                " at the end, but must be 0; on hardware, the next kernel would start with this "
                "value",
            {code_.name, "semaphore", -1, 0});
  }

  void rare(Qpu& q, const Instruction& in) {
    const Detail none;
    const Detail& d = in.code == Opcode::VpmRead ? none : code_.details[in.extra];
    const Vector& a = q.slots[in.a];
    switch (in.code) {
      case Opcode::PrintText: (void)std::fputs(d.text.c_str(), stdout); break;
      case Opcode::PrintVector: print(d.element, a); break;
      case Opcode::DmaReadPitch: pitch(q, in, q.load, a.e[0]); break;
      case Opcode::DmaWriteStride: pitch(q, in, q.store, a.e[0]); break;
      case Opcode::DmaReadSetup: setup(q, in, q.load, d, a.e[0], false); break;
      case Opcode::DmaWriteSetup:
        setup(q, in, q.store, d, a.e[0], d.direction == Direction::Vertical);
        break;
      case Opcode::DmaReadStart: transfer(q, in, q.load, a.e[0], true); break;
      case Opcode::DmaWriteStart: transfer(q, in, q.store, a.e[0], false); break;
      case Opcode::DmaReadWait: q.load.running = false; break;
      case Opcode::DmaWriteWait: q.store.running = false; break;
      case Opcode::VpmReadSetup:
        if (q.load.running)
          fail<ExecutionError>(q, in.site, "a DMA read is still running; dmaWaitRead is missing");
        if (q.reads.left != 0)
          fail<ExecutionError>(q, in.site,
                               std::to_string(q.reads.left) +
                                   " vectors of the previous vpmSetupRead are unread");
        window(q, in, q.reads, d, a.e[0]);
        break;
      case Opcode::VpmWriteSetup: window(q, in, q.writes, d, a.e[0]); break;
      case Opcode::VpmRead:
        if (q.reads.left == 0)
          fail<ExecutionError>(q, in.site,
                               "vpmGet reads more vectors than vpmSetupRead has set up");
        vpm_.read(q.reads.direction, q.reads.address, q.slots[in.target]);
        q.reads.address += q.reads.stride;
        --q.reads.left;
        break;
      case Opcode::VpmWrite:
        if (!q.writes.ready) fail<ExecutionError>(q, in.site, "vpmSetupWrite is missing");
        vpm_.write(q.writes.direction, q.writes.address, a);
        q.writes.address += q.writes.stride;
        break;
      default: break;
    }
  }

  static void print(Type type, const Vector& v) {
    std::string text = "<";
    std::array<char, 32> one{};
    for (const std::uint32_t x : v.e) {
      if (text.size() > 1) text += ",";
      if (type == Type::Float)
        (void)std::snprintf(one.data(), one.size(), "%.9g",
                            static_cast<double>(bitCast<float>(x)));
      else if (type == Type::Address)
        (void)std::snprintf(one.data(), one.size(), "0x%08x", x);
      else
        (void)std::snprintf(one.data(), one.size(), "%d", asSigned(x));
      text += one.data();
    }
    (void)std::fputs((text + ">\n").c_str(), stdout);
  }

  void pitch(const Qpu& q, const Instruction& in, Dma& dma, std::uint32_t bytes) const {
    if (bytes > kMaxPitch)
      fail<ExecutionError>(q, in.site,
                           "the distance is " + std::to_string(asSigned(bytes)) + " bytes, but must be 0.." +
                               std::to_string(kMaxPitch));
    dma.pitch = bytes;
    dma.hasPitch = true;
  }

  // Consecutive memory rows are in consecutive VPM columns if `sideways` is true, and in
  // consecutive VPM rows otherwise.
  void setup(const Qpu& q, const Instruction& in, Dma& dma, const Detail& d,
             std::uint32_t address, bool sideways) const {
    dma.ready = true;
    dma.direction = d.direction;
    dma.rows = static_cast<std::uint32_t>(d.count);
    dma.length = static_cast<std::uint32_t>(d.length);
    dma.rowsApart = sideways ? 0 : static_cast<std::uint32_t>(d.pitch);
    dma.columnsApart = sideways ? 1 : 0;
    dma.row = address / kVpmColumns;
    dma.column = address % kVpmColumns;
    const bool horizontal = d.direction == Direction::Horizontal;
    const std::uint32_t last = dma.rows - 1;
    const std::uint32_t rows = last * dma.rowsApart + (horizontal ? 1 : dma.length);
    const std::uint32_t columns = last * dma.columnsApart + (horizontal ? dma.length : 1);
    if (address >= kVpmRows * kVpmColumns || dma.row + rows > kVpmRows ||
        dma.column + columns > kVpmColumns)
      fail<ExecutionError>(q, in.site,
                           std::to_string(rows) + " rows by " + std::to_string(columns) +
                               " columns from VPM word " + std::to_string(asSigned(address)) +
                               " exceed the window of 64 rows by 16 columns");
  }

  void transfer(Qpu& q, const Instruction& in, Dma& dma, std::uint32_t address, bool load) {
    if (!dma.ready)
      fail<ExecutionError>(q, in.site,
                           load ? "dmaSetupRead is missing" : "dmaSetupWrite is missing");
    if (dma.running)
      fail<ExecutionError>(q, in.site, "the kernel has not waited for the previous DMA transfer");
    if (dma.rows > 1 && !dma.hasPitch)
      fail<ExecutionError>(q, in.site, load ? "a transfer of several rows requires dmaSetReadPitch first"
                                            : "a transfer of several rows requires dmaSetWriteStride first");
    const std::uint32_t bytes = 4 * dma.length;
    for (std::uint32_t i = 0; i < dma.rows; ++i) {
      unsigned char* host = words(q, index(in), address, bytes, load ? "reading" : "writing");
      for (std::uint32_t j = 0; j < dma.length; ++j, host += 4) {
        const bool horizontal = dma.direction == Direction::Horizontal;
        std::uint32_t& word =
            vpm_.word(dma.row + i * dma.rowsApart + (horizontal ? 0 : j),
                      dma.column + i * dma.columnsApart + (horizontal ? j : 0));
        if (load)
          std::memcpy(&word, host, 4);
        else
          std::memcpy(host, &word, 4);
      }
      address += dma.pitch + (load ? 0 : bytes);
    }
    dma.running = true;
  }

  void window(const Qpu& q, const Instruction& in, VpmWindow& w, const Detail& d,
              std::uint32_t address) const {
    if (address >= kVpmRows)
      fail<ExecutionError>(q, in.site,
                           "the vector address is " + std::to_string(asSigned(address)) +
                               ", but must be 0..63");
    w = {true, d.direction, address, static_cast<std::uint32_t>(d.pitch), d.count};
  }

  const Code& code_;
  Memory memory_;
  std::vector<Qpu> qpus_;
  std::array<int, 16> semaphores_{};
  std::uint64_t semaphoresPassed_ = 0;
  Vpm vpm_;
};

}  // namespace

void run(const Code& code, int qpus, const std::uint32_t* uniforms, std::size_t count) {
  Machine(code, qpus, uniforms, count).run();
}

}  // namespace qpu::interp
