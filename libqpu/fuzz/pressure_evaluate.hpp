// Computes the memory contents that a program from pressure_program.hpp produces. The code uses
// only oracle.hpp for the arithmetic.
#ifndef QPU_FUZZ_PRESSURE_EVALUATE_HPP
#define QPU_FUZZ_PRESSURE_EVALUATE_HPP

#include <array>
#include <stdexcept>

#include "fuzz/oracle.hpp"
#include "fuzz/pressure_program.hpp"

namespace fuzz::pressure {

using Words = std::vector<std::uint32_t>;
using Elements = std::array<std::uint32_t, 16>;
using Booleans = std::array<bool, 16>;

struct Inputs {
  std::uint32_t n = 0, x = 0;  // the parameters of the kernel
  const Words* ints = nullptr;
  const Words* floats = nullptr;
};

// Evaluates the program for one QPU.
class Evaluate {
 public:
  // `area` contains the QPU's part of the output: its initial contents before the run, and its
  // final contents after the run.
  Evaluate(const Program& program, const Inputs& inputs, std::uint32_t me, Words& area)
      : program_(program), inputs_(inputs), me_(me), area_(area), values_(program.variables.size()) {
    values_[0].fill(inputs.n);
    values_[1].fill(inputs.x);
    mask_.fill(true);
  }

  void run() {
    block(program_.statements);
    std::size_t at = std::size_t{16} * kScratchSlots;
    for (const std::uint32_t v : program_.results) {
      std::copy(values_[v].begin(), values_[v].end(), area_.begin() + static_cast<std::ptrdiff_t>(at));
      at += 16;
    }
  }

 private:
  const Expression& at(std::uint32_t e) const { return program_.expressions[e]; }

  static Elements splat(std::uint32_t x) {
    Elements all{};
    all.fill(x);
    return all;
  }
  template <typename F>
  Elements each(std::uint32_t a, F f) {
    Elements result = vector(a);
    for (std::uint32_t& x : result) x = f(x);
    return result;
  }
  template <typename F>
  Elements each(const Expression& x, F f) {
    Elements result = vector(x.a);
    const Elements other = vector(x.b);
    for (std::size_t i = 0; i < 16; ++i) result[i] = f(result[i], other[i]);
    return result;
  }
  Elements rotated(std::uint32_t a, std::uint32_t by) {
    const Elements from = vector(a);
    Elements result{};
    for (std::size_t i = 0; i < 16; ++i) result[(i + by) % 16] = from[i];
    return result;
  }
  static Elements words(const Words& memory, std::size_t first) {
    Elements result{};
    for (std::size_t i = 0; i < 16; ++i) result[i] = memory[first + i];
    return result;
  }
  static std::uint32_t special(std::uint32_t kind, std::uint32_t k) {
    switch (kind) {
      case kRecip:
      case kRootRecip: return 256U >> k;
      case kExponential: return 1U << k;
      default: return k;
    }
  }

  Elements vector(std::uint32_t e) {
    using std::uint32_t;
    const Expression& x = at(e);
    switch (x.op) {
      case Op::Constant:
      case Op::FConstant: return splat(x.value);
      case Op::Variable:
      case Op::FVariable: return values_[x.value];
      case Op::Index: {
        Elements result{};
        for (uint32_t i = 0; i < 16; ++i) result[i] = i;
        return result;
      }
      case Op::Me: return splat(me_);
      case Op::NumQpus: return splat(program_.qpus);
      case Op::Add: return each(x, [](uint32_t a, uint32_t b) { return a + b; });
      case Op::Sub: return each(x, [](uint32_t a, uint32_t b) { return a - b; });
      case Op::Mul: return each(x, oracle::product);
      case Op::Shl: return each(x, oracle::shiftLeft);
      case Op::Asr: return each(x, oracle::shiftRightSigned);
      case Op::Shr: return each(x, oracle::shiftRight);
      case Op::Ror: return each(x, oracle::rotateBits);
      case Op::And: return each(x, [](uint32_t a, uint32_t b) { return a & b; });
      case Op::Or: return each(x, [](uint32_t a, uint32_t b) { return a | b; });
      case Op::Xor: return each(x, [](uint32_t a, uint32_t b) { return a ^ b; });
      case Op::Min:
        return each(x, [](uint32_t a, uint32_t b) { return oracle::number(a) < oracle::number(b) ? a : b; });
      case Op::Max:
        return each(x, [](uint32_t a, uint32_t b) { return oracle::number(a) > oracle::number(b) ? a : b; });
      case Op::Not: return each(x.a, [](uint32_t a) { return UINT32_MAX - a; });
      case Op::Negate: return each(x.a, [](uint32_t a) { return 0U - a; });
      case Op::RotateBy:
      case Op::FRotateBy: return rotated(x.a, x.value);
      case Op::RotateVariable: return rotated(x.a, vector(x.b)[0] % 16);
      case Op::Broadcast:
      case Op::FBroadcast: return splat(vector(x.a)[x.value]);
      case Op::ToInt: return each(x.a, oracle::toInt);
      case Op::AsInt: return vector(x.a);
      case Op::Special: return each(x.a, [&x](uint32_t a) { return special(x.value, a % 8); });
      case Op::Load: return words(*inputs_.ints, x.value);
      case Op::LoadAt: return words(*inputs_.ints, vector(x.a)[0] % 1024);
      case Op::LoadScratch: return words(area_, std::size_t{16} * x.value);
      case Op::FAdd: return each(x, oracle::sum);
      case Op::FSub: return each(x, oracle::difference);
      case Op::FMul: return each(x, oracle::times);
      case Op::FMin: return each(x, oracle::smaller);
      case Op::FMax: return each(x, oracle::larger);
      case Op::FAbs: return each(x.a, oracle::magnitude);
      case Op::FNegate: return each(x.a, [](uint32_t a) { return oracle::difference(0, a); });
      case Op::ToFloat: return each(x.a, oracle::toFloat);
      case Op::FLoad: return words(*inputs_.floats, x.value);
      default: throw std::logic_error("not a vector expression");
    }
  }

  Booleans compared(const Expression& x) {
    const bool isFloat = x.op >= Op::FEq;
    const auto kind = static_cast<Op>(static_cast<int>(x.op) - static_cast<int>(isFloat ? Op::FEq : Op::Eq) +
                                      static_cast<int>(Op::Eq));
    const Elements a = vector(x.a);
    const Elements b = vector(x.b);
    Booleans result{};
    for (std::size_t i = 0; i < 16; ++i) {
      const std::int64_t d =
          isFloat ? oracle::compareFloats(a[i], b[i]) : oracle::number(a[i]) - oracle::number(b[i]);
      result[i] = kind == Op::Eq   ? d == 0
                  : kind == Op::Ne ? d != 0
                  : kind == Op::Lt ? d < 0
                  : kind == Op::Le ? d <= 0
                  : kind == Op::Gt ? d > 0
                                   : d >= 0;
    }
    return result;
  }
  Booleans booleans(std::uint32_t e) {
    const Expression& x = at(e);
    if (x.op < Op::MaskAnd) return compared(x);
    Booleans a = booleans(x.a);
    const Booleans b = x.op == Op::MaskNot ? a : booleans(x.b);
    for (std::size_t i = 0; i < 16; ++i)
      a[i] = x.op == Op::MaskAnd ? a[i] && b[i] : x.op == Op::MaskOr ? a[i] || b[i] : !a[i];
    return a;
  }
  bool holds(std::uint32_t e) {
    const Expression& x = at(e);
    const auto isSet = [](bool b) { return b; };
    switch (x.op) {
      case Op::Any:
      case Op::All: {
        const Booleans b = booleans(x.a);
        return x.op == Op::Any ? std::any_of(b.begin(), b.end(), isSet) : std::all_of(b.begin(), b.end(), isSet);
      }
      case Op::Both: return holds(x.a) && holds(x.b);
      case Op::Either: return holds(x.a) || holds(x.b);
      default: return !holds(x.a);
    }
  }

  void block(const std::vector<Statement>& statements) {
    for (const Statement& s : statements) statement(s);
  }
  void set(std::uint32_t v, const Elements& value) {
    for (std::size_t i = 0; i < 16; ++i)
      if (mask_[i]) values_[v][i] = value[i];
  }

  void statement(const Statement& s) {
    switch (s.kind) {
      case Kind::Declare:
      case Kind::Assign: return set(s.target, vector(s.expression));
      case Kind::If: return block(holds(s.expression) ? s.body : s.other);
      case Kind::Where: {
        const Booleans outer = mask_;
        const Booleans condition = booleans(s.expression);
        for (std::size_t i = 0; i < 16; ++i) mask_[i] = outer[i] && condition[i];
        block(s.body);
        for (std::size_t i = 0; i < 16; ++i) mask_[i] = outer[i] && !condition[i];
        block(s.other);
        mask_ = outer;
        return;
      }
      case Kind::Loop: {
        Elements& counter = values_[s.target];
        counter = vector(s.expression);
        const auto isPositive = [](std::uint32_t x) { return oracle::number(x) > 0; };
        const auto countDown = [&counter] {
          for (std::uint32_t& x : counter) --x;
        };
        while (std::any_of(counter.begin(), counter.end(), isPositive)) {
          if (s.variant == 0) countDown();
          block(s.body);
          if (s.variant != 0) countDown();
        }
        return;
      }
      case Kind::Store: {
        const Elements value = vector(s.expression);
        std::copy(value.begin(), value.begin() + s.words, area_.begin() + std::ptrdiff_t{16} * s.target);
        return;
      }
      case Kind::Gather: {
        Elements value = vector(s.expression);
        for (std::uint32_t& x : value) x = (*inputs_.ints)[x % 1024];
        gathered_.push_back(value);
        return;
      }
      case Kind::Receive:
        set(s.target, gathered_.front());
        gathered_.erase(gathered_.begin());
        return;
    }
  }

  const Program& program_;
  const Inputs& inputs_;
  std::uint32_t me_;
  Words& area_;
  std::vector<Elements> values_;
  Booleans mask_{};
  std::vector<Elements> gathered_;
};

}  // namespace fuzz::pressure

#endif
