// Generates a kernel from bytes through the language's public interface. A byte selects an operator
// or a statement, and the bytes after it select the operands. Most kernels are valid, so that many
// of them can be run. The highest byte values select a misuse of the language.
#ifndef QPU_FUZZ_KERNEL_MAKER_HPP
#define QPU_FUZZ_KERNEL_MAKER_HPP

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "qpu/qpu.hpp"

namespace fuzz {

constexpr int kWords = 1024;   // size of each array
constexpr int kOwnWords = 256; // size of each QPU's part of `out`

// The properties of a generated kernel.
struct Facts {
  bool ends = true;     // true if the kernel's loops are short
  bool ordered = true;  // true if the order of all memory accesses is defined
  bool onOneQpu = false;
  // True if, on every path, VPM setups precede VPM accesses and gathers precede receives.
  bool queuesInOrder = true;
};

class Maker {
 public:
  Maker(const std::uint8_t* data, std::size_t size) : next_(data), end_(data + size) {}

  Facts make(qpu::Int& n, qpu::Float& x, qpu::Ptr<qpu::Int>& in, qpu::Ptr<qpu::Float>& inFloat,
             qpu::Ptr<qpu::Int>& out) {
    in_ = &in;
    inFloat_ = &inFloat;
    out_ = &out;
    ints_.emplace_back(n);
    ints_.emplace_back(qpu::index());
    floats_.emplace_back(x);
    intValues_ = {n, qpu::index(), qpu::me(), qpu::numQPUs(), 1};
    floatValues_ = {x, 0.5F};
    masks_.push_back(ints_[1] < 8);
    out += qpu::me() * kOwnWords;
    while (next_ != end_) statement(byte());
    while (closeOpen_ && !open_.empty()) close();
    // Store the final values of the variables, so that the comparison includes them.
    if (open_.empty()) {
      int at = 0;
      for (const qpu::Int& v : ints_)
        if (at < kOwnWords / 2) store(v, out + (at += 16) - 16);
      for (const qpu::Float& v : floats_)
        if (at < kOwnWords) store(qpu::asInt(v), out + (at += 16) - 16);
    }
    return facts_;
  }

 private:
  enum class Block : std::uint8_t { If, Else, Loop, Where, WhereElse };

  int byte() { return next_ == end_ ? 0 : *next_++; }
  template <typename T>
  const T& pick(const T* first, std::size_t count) {
    return first[static_cast<std::size_t>(byte()) % count];
  }
  template <typename T>
  const T& pick(const std::vector<T>& from) {
    return pick(from.data(), from.size());
  }
  template <typename T>
  T& pick(std::deque<T>& from) {
    return from[static_cast<std::size_t>(byte()) % from.size()];
  }
  const qpu::IntExpr& someInt() { return pick(intValues_); }
  const qpu::FloatExpr& someFloat() { return pick(floatValues_); }
  const qpu::BoolExpr& someMask() { return pick(masks_); }
  qpu::Cond someCondition() {
    const int shape = byte();
    const qpu::BoolExpr& a = someMask();
    if (shape < 100) return qpu::any(a);
    if (shape < 200) return qpu::all(a);
    const qpu::BoolExpr& b = someMask();
    if (shape < 220) return qpu::any(a) && !qpu::all(b);
    return qpu::all(a) || qpu::any(b);
  }
  qpu::IntExpr someConstant() {
    static constexpr int kEdges[] = {0,    1,      -1,      2,        15,         16,
                                     -16,  -17,    31,      32,       255,        256,
                                     4096, 0x7fff, 1 << 23, 1 << 24,  0x7fffffff, INT32_MIN,
                                     64,   8191,   0x80000, -65536, 0x3f800000, 0x7f800000};
    const int kind = byte();
    if (kind < 200) return pick(kEdges, sizeof kEdges / sizeof *kEdges);
    const int high = byte() - 128;
    const int low = byte();
    return high * 65536 + low;
  }
  void add(const qpu::IntExpr& e) { push(intValues_, e); }
  void add(const qpu::FloatExpr& e) { push(floatValues_, e); }
  void add(const qpu::BoolExpr& e) { push(masks_, e); }
  // Adds a value to a ring buffer, so that recent values are used often.
  template <typename T>
  void push(std::vector<T>& to, const T& e) {
    if (to.size() < 12)
      to.push_back(e);
    else
      to[static_cast<std::size_t>(++pushes_) % 12] = e;
  }

  bool in(Block a, Block b) const {
    for (const Block o : open_)
      if (o == a || o == b) return true;
    return false;
  }
  bool inWhere() const { return in(Block::Where, Block::WhereElse); }
  void close() {
    qpu::End_();
    open_.pop_back();
  }

  void intOperator(int code) {
    const qpu::IntExpr a = someInt();
    const qpu::IntExpr b = someInt();
    switch (code) {
      case 0: return add(a + b);
      case 1: return add(a - b);
      case 2: return add(a * b);
      case 3: return add(a << b);
      case 4: return add(a >> b);
      case 5: return add(a & b);
      case 6: return add(a | b);
      case 7: return add(a ^ b);
      case 8: return add(~a);
      case 9: return add(min(a, b));
      case 10: return add(max(a, b));
      case 11: return add(shr(a, b));
      case 12: return add(ror(a, b));
      case 13: return add(rotate(a, b));
      case 14: return add(rotate(a, byte()));
      case 15: return add(broadcast(a, byte() & 15));
      case 16: return add(-a);
      case 17: return add(qpu::sumOf(a));
      case 18: return add(a * someConstant());
      default: return add(a + someConstant());
    }
  }

  void floatOperator(int code) {
    const qpu::FloatExpr a = someFloat();
    const qpu::FloatExpr b = someFloat();
    switch (code) {
      case 0: return add(a + b);
      case 1: return add(a - b);
      case 2: return add(a * b);
      case 3: return add(min(a, b));
      case 4: return add(max(a, b));
      case 5: return add(abs(a));
      case 6: return add(-a);
      case 7: return add(recip(a));
      case 8: return add(rsqrt(a));
      case 9: return add(exp2(a));
      case 10: return add(log2(a));
      case 11: return add(toFloat(someInt()));
      case 12: return add(qpu::toInt(a));
      case 13: return add(qpu::asInt(a));
      case 14: return add(qpu::asFloat(someInt()));
      case 15: return add(rotate(a, someInt()));
      case 16: return add(broadcast(a, byte() & 15));
      case 17: return add(qpu::asFloat(someConstant()));
      case 18: return add(qpu::reciprocal(a));
      default: return add(a * 0.0F + b * 1.0F);
    }
  }

  void comparison(int code) {
    if (code < 6) {
      const qpu::IntExpr a = someInt();
      const qpu::IntExpr b = (byte() & 1) != 0 ? someInt() : someConstant();
      switch (code) {
        case 0: return add(a == b);
        case 1: return add(a != b);
        case 2: return add(a < b);
        case 3: return add(a <= b);
        case 4: return add(a > b);
        default: return add(a >= b);
      }
    }
    if (code < 12) {
      const qpu::FloatExpr a = someFloat();
      const qpu::FloatExpr b = (byte() & 1) != 0 ? someFloat() : 0.0F;
      switch (code) {
        case 6: return add(a == b);
        case 7: return add(a != b);
        case 8: return add(a < b);
        case 9: return add(a <= b);
        case 10: return add(a > b);
        default: return add(a >= b);
      }
    }
    const qpu::BoolExpr a = someMask();
    const qpu::BoolExpr b = someMask();
    if (code == 12) return add(a && b);
    if (code == 13) return add(a || b);
    add(!a);
  }

  void variable(int code) {
    switch (code) {
      case 0:
        ints_.emplace_back(someInt());
        return add(qpu::IntExpr(ints_.back()));
      case 1:
        floats_.emplace_back(someFloat());
        return add(qpu::FloatExpr(floats_.back()));
      case 2: pick(ints_) = someInt(); return;
      case 3: pick(floats_) = someFloat(); return;
      case 4: pick(ints_) += someInt(); return;
      case 5: pick(floats_) *= someFloat(); return;
      case 6: return add(qpu::IntExpr(pick(ints_)));
      case 7: return add(qpu::FloatExpr(pick(floats_)));
      case 8: pick(ints_) = pick(ints_); return;
      default: add(qpu::IntExpr(qpu::select(someMask(), someInt(), someInt())));
    }
  }

  // Returns an address in the QPU's own part of `out`.
  qpu::PtrExpr<qpu::Int> place() {
    const int kind = byte();
    if (kind < 100) return *out_ + (byte() & 0xf0) % (kOwnWords - 16);
    return *out_ + (someInt() & 127);
  }

  void memory(int code) {
    switch (code) {
      case 0: return add(qpu::IntExpr((*in_)[someInt() & 511]));
      case 1: return add(qpu::FloatExpr((*inFloat_)[someInt() & 511]));
      case 2: return add(qpu::IntExpr((*in_)[16 * (byte() % 60)]));
      case 3: return add(qpu::IntExpr(*place()));
      case 4: {
        const qpu::IntExpr i = qpu::index();
        return add(qpu::IntExpr(*(*in_ + i * (byte() % 5) + (someInt() & 511))));
      }
      case 5:
      case 6: {
        if (inWhere()) return;
        if (!open_.empty()) facts_.queuesInOrder = false;
        const qpu::IntExpr i = (byte() & 1) != 0 ? qpu::index() + (byte() << 1) : someInt() & 1023;
        if (code == 5)
          gather(*in_ + i);
        else
          gather(*inFloat_ + i);
        gathered_.push_back(code == 6);
        return;
      }
      case 7:
      case 8: {
        if (gathered_.empty()) return;
        if (!open_.empty()) facts_.queuesInOrder = false;
        if (gathered_.front()) {
          floats_.emplace_back(0);
          receive(floats_.back());
          add(qpu::FloatExpr(floats_.back()));
        } else {
          ints_.emplace_back(0);
          receive(ints_.back());
          add(qpu::IntExpr(ints_.back()));
        }
        gathered_.pop_front();
        return;
      }
      default: break;
    }
    if (inWhere()) return;
    switch (code) {
      case 9: return store(someInt(), place());
      case 10: *place() = someInt(); return;
      case 11: return store(someInt(), place(), 1 + (byte() & 15));
      case 12: return store(someInt(), place(), (someInt() & 15) + 1);
      case 13: *place() = *place(); return;
      case 14: return store(qpu::asInt(someFloat()), place());
      default: return store(*out_ + someInt(), place());
    }
  }
  static void store(const qpu::IntExpr& x, const qpu::PtrExpr<qpu::Int>& p) { qpu::store(x, p); }
  static void store(const qpu::IntExpr& x, const qpu::PtrExpr<qpu::Int>& p,
                    const qpu::IntExpr& n) {
    qpu::store(x, p, n);
  }
  // Stores addresses, as a program that builds a table of pointers does.
  static void store(const qpu::PtrExpr<qpu::Int>& x, const qpu::PtrExpr<qpu::Int>& p) {
    qpu::store(x, qpu::PtrExpr<qpu::Ptr<qpu::Int>>(qpu::detail::FromNode(p.node())));
  }

  void control(int code) {
    int loops = 0;
    for (const Block b : open_) loops += b == Block::Loop ? 1 : 0;
    switch (code) {
      case 0:
        qpu::If_(someCondition());
        return open_.push_back(Block::If);
      case 1:
        qpu::Where_(someMask());
        return open_.push_back(Block::Where);
      case 2:
      case 3: {
        if (inWhere()) return;
        if (loops == 3) facts_.ends = false;
        // The counter is kept separately, so that other statements cannot change it.
        loop_.emplace_back(code == 2 ? qpu::IntExpr(byte() % 4) : someInt() & 3);
        qpu::Int& i = loop_.back();
        if (code == 2 && (byte() & 1) != 0) {
          qpu::While_(i > 0);
          i -= 1;
        } else {
          qpu::For_(i > 0);
          i -= 1;
          qpu::ForBody_();
        }
        add(qpu::IntExpr(i));
        return open_.push_back(Block::Loop);
      }
      case 4:
        if (open_.empty()) return;
        if (open_.back() == Block::If || open_.back() == Block::Where) {
          open_.back() = open_.back() == Block::If ? Block::Else : Block::WhereElse;
          qpu::Else_();
        }
        return;
      default:
        if (!open_.empty()) close();
    }
  }

  // Uses only VPM rows below 48, because the compiler does not use these rows.
  void vpm(int code) {
    if (inWhere()) return;
    facts_.onOneQpu = true;
    const qpu::VPMDirection d = (byte() & 1) != 0 ? qpu::HORIZ : qpu::VERT;
    const int row = byte() % 16;
    if (code > 3) facts_.queuesInOrder = false;
    switch (code) {
      case 0: {
        const int vectors = 1 + byte() % 4;
        qpu::vpmSetupWrite(d, row, 1 + byte() % 4);
        for (int i = 0; i < vectors; ++i) qpu::vpmPut(someInt());
        return;
      }
      case 1: {
        const int vectors = 1 + byte() % 4;
        qpu::vpmSetupRead(d, vectors, row, 1 + byte() % 4);
        for (int i = 0; i < vectors; ++i) {
          ints_.emplace_back(qpu::vpmGetInt());
          add(qpu::IntExpr(ints_.back()));
        }
        return;
      }
      case 2:
        qpu::dmaSetReadPitch(byte() & 0x7c);
        qpu::dmaSetupRead(d, 1 + byte() % 16, 0, 1 + byte() % 16, 1);
        qpu::dmaStartRead(*in_ + (someInt() & 255));
        return qpu::dmaWaitRead();
      case 3:
        qpu::dmaSetWriteStride(byte() & 0x0c);
        qpu::dmaSetupWrite(d, 1 + byte() % 4, 0, 1 + byte() % 16);
        qpu::dmaStartWrite(*out_ + (byte() & 127));
        return qpu::dmaWaitWrite();
      case 4: return qpu::vpmPut(someInt());
      case 5: return add(qpu::vpmGetInt());
      case 6: return add(qpu::vpmGetFloat());
      default: return loose(byte() % 10);
    }
  }

  // Calls a single VPM or DMA function with arbitrary arguments.
  void loose(int code) {
    facts_.ordered = false;
    facts_.queuesInOrder = false;
    const qpu::VPMDirection d = (byte() & 1) != 0 ? qpu::HORIZ : qpu::VERT;
    const auto number = [this] { return byte() % 67 - 1; };
    const int rows = number(), length = number(), pitch = number();
    switch (code) {
      case 0: return qpu::dmaSetReadPitch(someInt());
      case 1: return qpu::dmaSetupRead(d, rows, someInt(), length, pitch);
      case 2: return qpu::dmaStartRead(*in_ + someInt());
      case 3: return qpu::dmaWaitRead();
      case 4: return qpu::dmaSetWriteStride(someInt());
      case 5: return qpu::dmaSetupWrite(d, rows, someInt(), length);
      case 6: return qpu::dmaStartWrite(*out_ + someInt());
      case 7: return qpu::dmaWaitWrite();
      case 8: return qpu::vpmSetupRead(d, rows, someInt(), pitch);
      default: return qpu::vpmSetupWrite(d, someInt(), pitch);
    }
  }

  void semaphore(int code) {
    const int s = byte() & 15;
    switch (code) {
      case 0:
        qpu::semaInc(s);
        return qpu::semaDec(s);
      case 1: return qpu::semaInc(s);
      default: return qpu::semaDec(s);
    }
  }

  void print(int code) {
    switch (code) {
      case 0: return qpu::Print("text");
      case 1: return qpu::Print(someInt());
      case 2: return qpu::Print(someFloat());
      case 3: return qpu::Print(*in_);
      default: return qpu::Print(static_cast<const char*>(nullptr));
    }
  }

  void misuse(int code) {
    switch (code) {
      case 0: return qpu::End_();
      case 1: return qpu::Else_();
      case 2: return qpu::ForBody_();
      case 3: return qpu::For_(someCondition());
      case 4: closeOpen_ = false; return;
      case 5: receive(ints_.emplace_back()); return;
      case 6: receive(floats_.emplace_back()); return;
      case 7: return add(broadcast(someInt(), byte() - 100));
      case 8: return qpu::semaInc(byte() - 100);
      case 9: qpu::store(someInt(), *out_, byte() - 100); return;
      case 10: qpu::store(someInt(), *out_); return;
      case 11:
        gather(*out_ + someInt());
        facts_.ordered = false;
        gathered_.push_back(false);
        return;
      case 12:  // variables without an initial value
        ints_.emplace_back();
        floats_.emplace_back();
        return add(qpu::IntExpr(ints_.back()));
      case 13: {  // use of a vector that belongs to another kernel
        std::optional<qpu::IntExpr> escaped;
        (void)qpu::compile([&escaped] { escaped = qpu::index(); });
        return add(*escaped + 1);
      }
      case 14: {  // use of this kernel's vectors in another kernel
        const qpu::IntExpr mine = someInt();
        (void)qpu::compile([mine] { qpu::store(mine, qpu::Ptr<qpu::Int>()); });
        return;
      }
      case 15: {
        qpu::IntExpr sum = someInt();
        for (int i = byte() * 8; i > 0; --i) sum = sum + (ints_[0] ^ i);
        return add(sum);
      }
      case 16: {  // shared subexpressions, which form a graph instead of a tree
        qpu::IntExpr sum = someInt();
        for (int i = byte() % 64; i > 0; --i) sum = sum + rotate(sum, i);
        return add(sum);
      }
      case 17: {
        const int depth = byte();
        for (int i = 0; i < depth; ++i) control(i % 2 != 0 ? 1 : 0);
        return;
      }
      case 18: {
        qpu::Ptr<qpu::Int> wild = *in_ + someInt();
        facts_.onOneQpu = true;
        if ((byte() & 1) != 0) return qpu::store(someInt(), wild);
        return add(qpu::IntExpr(*wild));
      }
      case 19:
        facts_.ends = false;
        qpu::While_(someCondition());
        return open_.push_back(Block::Loop);
      case 20: {  // continuation after a rejected construct
        const int what = byte() % 20;
        try {
          misuse(what);
        } catch (const qpu::Error&) {
          facts_.ordered = false;
        }
        return;
      }
      default: return loose(byte() % 10);
    }
  }

  void statement(int code) {
    if (code < 40) return intOperator(code / 2);
    if (code < 80) return floatOperator((code - 40) / 2);
    if (code < 95) return comparison(code - 80);
    if (code < 125) return variable((code - 95) / 3);
    if (code < 173) return memory((code - 125) / 3);
    if (code < 203) return control((code - 173) / 4);
    if (code < 219) return vpm((code - 203) / 2);
    if (code < 224) return semaphore((code - 219) / 2);
    if (code < 229) return print(code - 224);
    if (code < 234) return add(someConstant());
    misuse(code - 234);
  }

  const std::uint8_t* next_;
  const std::uint8_t* const end_;
  Facts facts_;
  qpu::Ptr<qpu::Int>* in_ = nullptr;
  qpu::Ptr<qpu::Float>* inFloat_ = nullptr;
  qpu::Ptr<qpu::Int>* out_ = nullptr;
  std::deque<qpu::Int> ints_, loop_;
  std::deque<qpu::Float> floats_;
  std::vector<qpu::IntExpr> intValues_;
  std::vector<qpu::FloatExpr> floatValues_;
  std::vector<qpu::BoolExpr> masks_;
  std::deque<bool> gathered_;  // for each outstanding gather, true if its type is float
  std::vector<Block> open_;
  bool closeOpen_ = true;
  int pushes_ = 0;
};

}  // namespace fuzz

#endif
