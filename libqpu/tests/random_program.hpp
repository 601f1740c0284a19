// Random kernels in the language, which contain arithmetic on a few variables, masks, branches,
// short loops, loads, stores and gathers. All kernels terminate, and each QPU writes to its own
// words.
#ifndef TESTS_RANDOM_PROGRAM_HPP
#define TESTS_RANDOM_PROGRAM_HPP

#include <algorithm>
#include <array>
#include <cstdint>
#include <random>
#include <vector>

#include "QPULib.h"

namespace test {

constexpr int kInputWords = 512;
constexpr int kSlots = 40;  // number of vectors that each QPU may write
constexpr int kAreaWords = 16 * kSlots;

class RandomProgram {
 public:
  // Generates at most `length` statements. If a program fails, a smaller `length` gives a shorter
  // program that may also fail.
  explicit RandomProgram(std::uint32_t seed, int length = 1000) : random_(seed), length_(length) {}

  void operator()(Ptr<Int>& in, Ptr<Int>& out, Int& n, Float& x) {
    // Pipelines with many requests need both TMUs, which only kernels without other loads may
    // use.
    deep_ = chance(4);
    in_ = &in;
    Ptr<Int> area = out + me() * kAreaWords;
    area_ = &area;
    const std::size_t ints = 2 + below(6);
    const std::size_t floats = 1 + below(5);
    ints_.reserve(ints);
    floats_.reserve(floats);
    for (std::size_t i = 0; i < ints; ++i) {
      if (chance(8))
        ints_.emplace_back();
      else
        ints_.emplace_back(intLeaf(n, i));
    }
    for (std::size_t i = 0; i < floats; ++i) {
      if (chance(8))
        floats_.emplace_back();
      else
        floats_.emplace_back(i == 0 ? FloatExpr(x) : asFloat(intLeaf(n, i)));
    }
    budget_ = std::min(10 + static_cast<int>(below(50)), length_);
    statements(0, false);
    for (std::size_t i = 0; i < ints_.size(); ++i)
      store(ints_[i], area + 16 * static_cast<int>(i));
    for (std::size_t i = 0; i < floats_.size(); ++i)
      store(asInt(floats_[i]), area + 16 * static_cast<int>(ints_.size() + i));
  }

 private:
  std::size_t below(std::size_t n) { return random_() % n; }
  bool chance(std::size_t n) { return below(n) == 0; }
  template <typename T>
  T& any(std::vector<T>& from) {
    return from[below(from.size())];
  }

  IntExpr intLeaf(Int& n, std::size_t i) {
    switch (below(5)) {
      case 0: return n + static_cast<int>(i);
      case 1: return index() * static_cast<int>(i + 1);
      case 2: return me() + 3;
      case 3: return deep_ ? index() - 7 : IntExpr((*in_)[static_cast<int>(16 * i)]);
      default: return constant();
    }
  }

  int constant() {
    static constexpr std::array<int, 24> kConstants = {
        0,  1,  2,   3,   7,    15,         16,    17,    31,         32, 64,        100,
        -1, -2, -16, -17, -100, 2147483647, 65535, 65536, 1065353216, 8,  123456789, 255};
    return chance(6) ? static_cast<int>(random_()) : kConstants[below(kConstants.size())];
  }
  float floatConstant() {
    static constexpr std::array<float, 14> kConstants = {
        0, 1, 2, 0.5F, -1, 3, 0.125F, 1e30F, 1e-30F, -2.5F, 128, 256, 0.1F, 1.0F / 256};
    return kConstants[below(kConstants.size())];
  }

  IntExpr ints(int depth) {
    using qpu::max;
    using qpu::min;
    if (depth == 0 || chance(5)) {
      switch (below(8)) {
        case 0: return index();
        case 1: return chance(2) ? me() : numQPUs();
        case 2:
        case 3: return constant();
        default: return any(ints_);
      }
    }
    const IntExpr a = ints(depth - 1);
    if (chance(8)) return a + a;
    switch (below(20)) {
      case 0:
      case 1:
      case 2: return a + ints(depth - 1);
      case 3:
      case 4: return a - ints(depth - 1);
      case 5: return a * ints(depth - 1);
      case 6: return a << ints(depth - 1);
      case 7: return a >> constant();
      case 8: return shr(a, ints(depth - 1));
      case 9: return ror(a, constant());
      case 10: return a & ints(depth - 1);
      case 11: return a | constant();
      case 12: return a ^ ints(depth - 1);
      case 13: return ~a;
      case 14: return min(a, ints(depth - 1));
      case 15: return max(a, ints(depth - 1));
      case 16: return rotate(a, chance(2) ? ints(depth - 1) : IntExpr(constant()));
      case 17: return broadcast(a, static_cast<int>(below(16)));
      case 18: return toInt(floats(depth - 1));
      default: return chance(2) ? load() : asInt(floats(depth - 1));
    }
  }

  IntExpr load() {
    if (deep_) return any(ints_);
    if (chance(3)) return (*area_)[16 * static_cast<int>(below(kSlots))];
    return (*in_)[ints(1) & 255];
  }

  FloatExpr floats(int depth) {
    using qpu::max;
    using qpu::min;
    if (depth == 0 || chance(5)) return chance(3) ? FloatExpr(floatConstant()) : any(floats_);
    const FloatExpr a = floats(depth - 1);
    switch (below(14)) {
      case 0:
      case 1:
      case 2: return a + floats(depth - 1);
      case 3:
      case 4: return a - floats(depth - 1);
      case 5:
      case 6:
      case 7: return a * floats(depth - 1);
      case 8: return min(a, floats(depth - 1));
      case 9: return max(a, floats(depth - 1));
      case 10: return abs(a);
      case 11: return rotate(a, constant());
      case 12: return chance(4) ? special(a) : toFloat(ints(depth - 1));
      default: return asFloat(ints(depth - 1));
    }
  }
  FloatExpr special(const FloatExpr& a) {
    switch (below(4)) {
      case 0: return recip(a);
      case 1: return rsqrt(a);
      case 2: return exp2(a);
      default: return log2(a);
    }
  }

  BoolExpr mask(int depth) {
    if (depth > 0 && chance(2)) {
      const BoolExpr a = mask(depth - 1);
      switch (below(3)) {
        case 0: return a && mask(depth - 1);
        case 1: return a || mask(depth - 1);
        default: return !a;
      }
    }
    if (chance(3)) {
      const FloatExpr a = floats(1), b = floats(1);
      switch (below(6)) {
        case 0: return a == b;
        case 1: return a != b;
        case 2: return a < b;
        case 3: return a <= b;
        case 4: return a > b;
        default: return a >= b;
      }
    }
    const IntExpr a = ints(1), b = ints(1);
    switch (below(6)) {
      case 0: return a == b;
      case 1: return a != b;
      case 2: return a < b;
      case 3: return a <= b;
      case 4: return a > b;
      default: return a >= b;
    }
  }

  Cond condition(int depth) {
    if (depth > 0 && chance(3)) {
      const Cond a = condition(depth - 1);
      switch (below(3)) {
        case 0: return a && condition(depth - 1);
        case 1: return a || condition(depth - 1);
        default: return !a;
      }
    }
    return chance(2) ? qpu::any(mask(1)) : all(mask(1));
  }

  void statements(int depth, bool inWhere) {
    const std::size_t count = depth == 0 ? 1000 : 1 + below(5);
    for (std::size_t i = 0; i < count && budget_ > 0; ++i) {
      --budget_;
      statement(depth, inWhere);
    }
  }

  void assignment() {
    if (chance(3))
      any(floats_) = floats(3);
    else
      any(ints_) = ints(3);
  }

  void statement(int depth, bool inWhere) {
    const std::size_t kind = below(16);
    if (kind < 6 || depth > 3) return assignment();
    switch (kind) {
      case 6:
      case 7:
        Where (mask(2))
          statements(depth + 1, true);
          if (chance(2)) {
            qpu::Else_();
            statements(depth + 1, true);
          }
        End
        return;
      case 8:
      case 9:
        If (condition(2))
          statements(depth + 1, inWhere);
          if (chance(2)) {
            qpu::Else_();
            statements(depth + 1, inWhere);
          }
        End
        return;
      default: break;
    }
    if (inWhere) return assignment();
    switch (kind) {
      case 10: return loop(depth);
      case 11: {
        // The loop has at most 5 iterations, regardless of the rest of its condition.
        Int iterations = 0;
        const int most = static_cast<int>(below(5));
        While (qpu::any(iterations < most) && (chance(2) ? condition(1) : Cond(iterations >= 0)))
          statements(depth + 1, false);
          iterations = iterations + 1;
        End
        return;
      }
      case 12: return write();
      case 13: return gathers();
      case 14: return pipeline();
      default: return assignment();
    }
  }

  void loop(int depth) {
    const int from = static_cast<int>(below(20)) - 10;
    const int step = 1 + static_cast<int>(below(20));
    const int to = from + step * static_cast<int>(below(5));
    Int last;
    For (Int i = from, i < to, i = i + step)
      any(ints_) = any(ints_) + i;
      for (std::size_t k = below(4); k > 0; --k) any(ints_) = along(i);
      if (chance(2)) store(any(ints_) ^ i, *area_ + (((i & 15) << 4) + index()));
      statements(depth + 1, false);
      last = i;
    End
    if (chance(2)) any(ints_) = last;
  }

  // Returns a linear function of the loop counter with values from -10 to 90. The program uses the
  // function as an address or a value.
  IntExpr along(const Int& i) {
    const int extra = static_cast<int>(below(100));
    switch (below(deep_ ? 3 : 7)) {
      case 0: return (i << 3) + any(ints_) + extra;
      case 1: return any(ints_) - (i + i + extra);
      case 2: {
        Int got;
        gather(*in_ + i + index() + (10 + extra));
        receive(got);
        return got;
      }
      case 3: return (*in_)[i + (10 + extra)];
      case 4: return (*in_)[(i << 1) + (20 + extra)];
      case 5: return (*in_)[100 + extra - i];
      default: return (*in_)[index() + i + (10 + extra)];
    }
  }

  void write() {
    const Ptr<Int> to = *area_ + 16 * static_cast<int>(below(kSlots));
    switch (below(4)) {
      case 0: *to = ints(2); return;
      case 1: store(ints(2), to); return;
      case 2: store(asInt(floats(2)), to, static_cast<int>(1 + below(16))); return;
      default: store(ints(2), to, (ints(1) & 15) + 1); return;
    }
  }

  PtrExpr<Int> somewhere() { return *in_ + (ints(2) & (kInputWords - 1)); }

  void gathers() {
    const std::size_t count = 1 + below(deep_ ? 8 : 4);
    std::vector<Int> got(count);
    for (std::size_t i = 0; i < count; ++i) gather(somewhere());
    if (chance(2)) any(floats_) = any(floats_) + floatConstant();
    for (Int& g : got) receive(g);
    for (Int& g : got) any(ints_) = any(ints_) + g;
  }

  // Requests `ahead` vectors in advance. Each iteration then receives and requests `each`
  // vectors.
  void pipeline() {
    const int ahead = 1 + static_cast<int>(below(deep_ ? 7 : 3));
    const int each = deep_ ? 2 : 1 + static_cast<int>(below(3));
    Ptr<Int> p = *in_ + index();
    for (int i = 0; i < ahead; ++i) gather(p + 16 * i);
    Int sum = 0, got;
    For (Int i = 0, i < static_cast<int>(below(5)), i = i + 1)
      for (int j = 0; j < each; ++j) {
        receive(got);
        sum = sum * 3 + got;
        gather(p + ((i + j) & 15) * 16);
      }
    End
    for (int i = 0; i < ahead; ++i) {
      receive(got);
      sum = sum ^ got;
    }
    any(ints_) = sum;
  }

  std::mt19937 random_;
  const int length_;
  bool deep_ = false;
  int budget_ = 0;
  Ptr<Int>* in_ = nullptr;
  Ptr<Int>* area_ = nullptr;
  std::vector<Int> ints_;
  std::vector<Float> floats_;
};

}  // namespace test

#endif
