#include "compiler/coalesce.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace qpu::compiler {
namespace {

constexpr std::uint32_t kUnset = UINT32_MAX;

bool isCopy(const Operation& o) {
  return o.op == Op::Move && o.a.isRegister() && o.cond == isa::Cond::Always && !o.setsFlags &&
         o.target != Operation::kNone;
}

// The part of a live range from one write to the next. Operation n reads at position 2 n and writes
// at position 2 n + 1. A copy has the same value as its source, so one register may hold both of
// them while they are live.
struct Segment {
  std::uint32_t from;
  std::uint32_t to;  // exclusive
  std::uint32_t value;
};
using LiveRange = std::vector<Segment>;

class CopyCoalescer {
 public:
  explicit CopyCoalescer(Function& function) : f_(function) {}

  void run() {
    findCopies();
    if (!copies_.empty()) {
      findLiveness();
      findLiveRanges();
      coalesce();
    }
    rename();
    threadJumps();
    compact();
  }

 private:
  struct Copy {
    Vreg target;
    Vreg source;
    std::uint32_t depth;
  };

  void findCopies() {
    related_.assign(f_.registers, false);
    for (const Block& b : f_.blocks)
      for (const Operation& o : b.operations) {
        if (!isCopy(o) || o.a.value == f_.qpuNumber) continue;
        copies_.push_back({o.target, o.a.value, b.loopDepth});
        related_[o.target] = related_[o.a.value] = true;
      }
    std::stable_sort(copies_.begin(), copies_.end(),
                     [](const Copy& a, const Copy& b) { return a.depth > b.depth; });
    class_.resize(f_.registers);
    std::iota(class_.begin(), class_.end(), 0U);
  }

  // Computes the liveness of the registers that copies read or write.
  void findLiveness() {
    // Indexed by register: the only block in which the register has occurred so far.
    std::vector<std::uint32_t> onlyBlock(f_.registers, kUnset);
    std::vector<bool> global(f_.registers, false);
    inSeveralBlocks_.assign(f_.registers, false);
    std::vector<std::uint32_t> writer(f_.registers, kUnset);
    for (std::uint32_t b = 0; b < f_.blocks.size(); ++b) {
      const auto occurs = [&](Vreg v) {
        if (!related_[v]) return;
        if (onlyBlock[v] == kUnset) onlyBlock[v] = b;
        if (onlyBlock[v] != b) global[v] = true;
      };
      for (const Operation& o : f_.blocks[b].operations) {
        forRegisters(o, [&](const Operand& a) { occurs(a.value); });
        if (o.target == Operation::kNone) continue;
        occurs(o.target);
        if (writer[o.target] != kUnset && writer[o.target] != b) inSeveralBlocks_[o.target] = true;
        writer[o.target] = b;
      }
    }
    bit_.assign(f_.registers, kUnset);
    for (Vreg v = 0; v < f_.registers; ++v)
      if (global[v]) {
        bit_[v] = static_cast<std::uint32_t>(globals_.size());
        globals_.push_back(v);
      }
    words_ = (globals_.size() + 63) / 64;
    Sets reads(f_.blocks.size() * words_, 0);
    Sets writes(f_.blocks.size() * words_, 0);
    liveIn_.assign(f_.blocks.size() * words_, 0);
    liveOut_.assign(f_.blocks.size() * words_, 0);
    for (std::uint32_t b = 0; b < f_.blocks.size(); ++b)
      for (const Operation& o : f_.blocks[b].operations) {
        const auto read = [&](Vreg v) {
          if (bit_[v] != kUnset && !test(writes, b, bit_[v])) set(reads, b, bit_[v]);
        };
        forRegisters(o, [&](const Operand& a) { read(a.value); });
        if (o.target == Operation::kNone) continue;
        if (keepsElements(o)) read(o.target);
        if (bit_[o.target] != kUnset) set(writes, b, bit_[o.target]);
      }
    for (bool changed = true; changed;) {
      changed = false;
      for (auto b = static_cast<std::uint32_t>(f_.blocks.size()); b-- > 0;) {
        const Block& block = f_.blocks[b];
        for (std::size_t w = 0; w < words_; ++w) {
          std::uint64_t out = 0;
          if (block.exit != Block::Exit::End) out |= liveIn_[block.next * words_ + w];
          if (block.exit == Block::Exit::Branch) out |= liveIn_[block.taken * words_ + w];
          liveOut_[b * words_ + w] = out;
          const std::uint64_t in = reads[b * words_ + w] | (out & ~writes[b * words_ + w]);
          changed = changed || in != liveIn_[b * words_ + w];
          liveIn_[b * words_ + w] = in;
        }
      }
    }
  }

  using Sets = std::vector<std::uint64_t>;
  bool test(const Sets& s, std::size_t block, std::uint32_t bit) const {
    return (s[block * words_ + bit / 64] >> (bit % 64) & 1U) != 0;
  }
  void set(Sets& s, std::size_t block, std::uint32_t bit) const {
    s[block * words_ + bit / 64] |= std::uint64_t{1} << (bit % 64);
  }
  template <typename F>
  void forMembers(const Sets& s, std::size_t block, F f) const {
    for (std::size_t w = 0; w < words_; ++w)
      for (std::uint64_t bits = s[block * words_ + w]; bits != 0; bits &= bits - 1)
        f(globals_[w * 64 + static_cast<std::size_t>(__builtin_ctzll(bits))]);
  }

  void findLiveRanges() {
    ranges_.resize(f_.registers);
    value_.assign(f_.registers, kUnset);
    start_.assign(f_.registers, kUnset);
    lastRead_.assign(f_.registers, kUnset);
    std::uint32_t position = 0;
    std::uint32_t values = 0;
    std::vector<Vreg> open;
    for (std::uint32_t b = 0; b < f_.blocks.size(); ++b) {
      open.clear();
      const auto begin = [&](Vreg v, std::uint32_t value, std::uint32_t at) {
        if (start_[v] == kUnset) open.push_back(v);
        value_[v] = value;
        start_[v] = lastRead_[v] = at;
      };
      forMembers(liveIn_, b, [&](Vreg v) {
        const bool fresh = inSeveralBlocks_[v] || value_[v] == kUnset;
        begin(v, fresh ? values++ : value_[v], position);
      });
      position += 2;
      for (const Operation& o : f_.blocks[b].operations) {
        forRegisters(o, [&](const Operand& a) {
          if (related_[a.value]) lastRead_[a.value] = position;
        });
        if (o.target != Operation::kNone && related_[o.target]) {
          const Vreg v = o.target;
          if (keepsElements(o)) lastRead_[v] = position;
          close(v, lastRead_[v] + 1);
          const bool copied = isCopy(o) && value_[o.a.value] != kUnset;
          begin(v, copied ? value_[o.a.value] : values++, position + 1);
        }
        position += 2;
      }
      for (const Vreg v : open) {
        const bool out = bit_[v] != kUnset && test(liveOut_, b, bit_[v]);
        close(v, out ? position + 1 : lastRead_[v] + 1);
        start_[v] = kUnset;
      }
      position += 2;
    }
  }

  void close(Vreg v, std::uint32_t to) {
    if (start_[v] == kUnset) return;
    ranges_[v].push_back({start_[v], std::max(to, start_[v] + 1), value_[v]});
  }

  // --- coalescing ---

  Vreg classOf(Vreg v) {
    while (class_[v] != v) v = class_[v] = class_[class_[v]];
    return v;
  }

  static LiveRange::const_iterator firstAfter(const LiveRange& range, std::uint32_t position) {
    return std::partition_point(range.begin(), range.end(),
                                [position](const Segment& s) { return s.to <= position; });
  }

  static bool interfere(const LiveRange& few, const LiveRange& many) {
    for (const Segment& s : few)
      for (auto m = firstAfter(many, s.from); m != many.end() && m->from < s.to; ++m)
        if (m->value != s.value) return true;
    return false;
  }

  static void insert(LiveRange& range, Segment s) {
    const auto first = range.begin() + (firstAfter(range, s.from) - range.cbegin());
    auto last = first;
    for (; last != range.end() && last->from < s.to; ++last) {
      s.from = std::min(s.from, last->from);
      s.to = std::max(s.to, last->to);
    }
    if (last == first) {
      range.insert(first, s);
      return;
    }
    *first = s;
    range.erase(first + 1, last);
  }

  void coalesce() {
    for (const Copy& c : copies_) {
      Vreg a = classOf(c.target);
      Vreg b = classOf(c.source);
      if (a == b) continue;
      if (ranges_[a].size() > ranges_[b].size()) std::swap(a, b);
      if (interfere(ranges_[a], ranges_[b])) continue;
      for (const Segment& s : ranges_[a]) insert(ranges_[b], s);
      ranges_[a] = {};
      class_[a] = b;
    }
  }

  // --- clean-up ---

  void rename() {
    for (Block& b : f_.blocks) {
      auto end = b.operations.begin();
      for (Operation& o : b.operations) {
        forRegisters(o, [&](Operand& a) { a.value = classOf(a.value); });
        if (o.target != Operation::kNone) o.target = classOf(o.target);
        if (isCopy(o) && o.target == o.a.value) continue;
        if (&*end != &o) *end = o;
        ++end;
      }
      b.operations.erase(end, b.operations.end());
    }
    f_.qpuNumber = classOf(f_.qpuNumber);
  }

  // Jump threading: redirects each edge that leads to a chain of empty blocks to the first block
  // after the chain. Then removes unreachable blocks.
  void threadJumps() {
    const auto end = [this](std::uint32_t b) {
      for (std::size_t steps = 0; steps < f_.blocks.size(); ++steps) {
        const Block& block = f_.blocks[b];
        if (!block.operations.empty() || block.exit != Block::Exit::Jump) break;
        b = block.next;
      }
      return b;
    };
    std::vector<std::uint32_t> number(f_.blocks.size(), kUnset);
    std::vector<std::uint32_t> work = {0};
    number[0] = 0;
    while (!work.empty()) {
      Block& b = f_.blocks[work.back()];
      work.pop_back();
      const auto follow = [&](std::uint32_t& to) {
        to = end(to);
        if (number[to] == kUnset) work.push_back(to);
        number[to] = 0;
      };
      if (b.exit != Block::Exit::End) follow(b.next);
      if (b.exit == Block::Exit::Branch) follow(b.taken);
    }
    std::uint32_t reached = 0;
    std::vector<Block> blocks;
    for (std::uint32_t b = 0; b < f_.blocks.size(); ++b) {
      if (number[b] == kUnset) continue;
      number[b] = reached++;
      blocks.push_back(std::move(f_.blocks[b]));
    }
    for (Block& b : blocks) {
      if (b.exit != Block::Exit::End) b.next = number[b.next];
      if (b.exit == Block::Exit::Branch) b.taken = number[b.taken];
    }
    f_.blocks = std::move(blocks);
  }

  void compact() {
    std::vector<Vreg> number(f_.registers, kUnset);
    Vreg count = 0;
    const auto renumber = [&](Vreg& v) {
      if (number[v] == kUnset) number[v] = count++;
      v = number[v];
    };
    for (Block& b : f_.blocks)
      for (Operation& o : b.operations) {
        forRegisters(o, [&](Operand& a) { renumber(a.value); });
        if (o.target != Operation::kNone) renumber(o.target);
      }
    renumber(f_.qpuNumber);
    f_.registers = count;
  }

  Function& f_;
  std::vector<Copy> copies_;
  std::vector<bool> related_;
  std::vector<bool> inSeveralBlocks_;  // indexed by register: true if several blocks write it
  std::vector<std::uint32_t> bit_;
  std::vector<Vreg> globals_;
  std::size_t words_ = 0;
  Sets liveIn_, liveOut_;
  std::vector<LiveRange> ranges_;
  std::vector<std::uint32_t> value_;
  std::vector<std::uint32_t> start_;
  std::vector<std::uint32_t> lastRead_;
  std::vector<Vreg> class_;
};

}  // namespace

void coalesceCopies(Function& function) { CopyCoalescer(function).run(); }

}  // namespace qpu::compiler
