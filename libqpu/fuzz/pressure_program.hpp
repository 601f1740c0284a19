// Represents random kernels with 30 to 120 live vectors as data. pressure_record.hpp records a
// kernel from this data, and pressure_evaluate.hpp computes the expected results.
#ifndef QPU_FUZZ_PRESSURE_PROGRAM_HPP
#define QPU_FUZZ_PRESSURE_PROGRAM_HPP

#include <algorithm>
#include <cstdint>
#include <vector>

namespace fuzz::pressure {

constexpr std::uint32_t kInputWords = 2048;   // size of each of the two input arrays
constexpr std::uint32_t kMostVariables = 120;
constexpr std::uint32_t kScratchSlots = 8;    // vectors in each QPU's area that kernels write and then read
constexpr std::uint32_t kAreaWords = 16 * (kMostVariables + kScratchSlots);
constexpr std::uint32_t kMostQpus = 12;

enum class Op : std::uint8_t {
  // Integers. `value` is the constant, or the number of the variable, element or word.
  Constant, Variable, Index, Me, NumQpus,
  Add, Sub, Mul, Shl, Asr, Shr, Ror, And, Or, Xor, Min, Max, Not, Negate,
  RotateBy, RotateVariable, Broadcast, ToInt, AsInt, Special, Load, LoadAt, LoadScratch,
  // Floats. For a constant, `value` contains its bits.
  FConstant, FVariable, FAdd, FSub, FMul, FMin, FMax, FAbs, FNegate, ToFloat, FRotateBy, FBroadcast, FLoad,
  // Results with a boolean for each element.
  Eq, Ne, Lt, Le, Gt, Ge, FEq, FNe, FLt, FLe, FGt, FGe, MaskAnd, MaskOr, MaskNot,
  // Results that are a single boolean for the vector.
  Any, All, Both, Either, Neither
};

// The functions that Op::Special applies to the low bits of its operand. The functions' results are
// exact, because they do not depend on the low bits of the special function unit's results.
enum SpecialKind : std::uint8_t { kRecip, kRootRecip, kExponential, kLogarithm, kSpecialKinds };

struct Expression {
  Op op = Op::Constant;
  std::uint32_t a = 0, b = 0;
  std::uint32_t value = 0;
};

enum class Kind : std::uint8_t {
  Declare, Assign,        // assigns `expression` to variable `target`
  If, Where,              // use `expression`, `body` and `other`
  // Counts variable `target` down from `expression`, in a While loop if `variant` is 0, and in a
  // For loop otherwise.
  Loop,
  // Stores `expression` to scratch slot `target`. Variant 0 waits, variant 1 does not wait, and
  // variant 2 stores only `words` words.
  Store,
  Gather,                 // requests the input words that `expression` selects
  Receive                 // receives a vector into variable `target`
};

struct Statement {
  Kind kind = Kind::Assign;
  std::uint32_t target = 0;
  std::uint32_t expression = 0;
  std::uint32_t variant = 0, words = 16;
  std::vector<Statement> body, other;
};

struct Variable {
  bool isFloat = false;
  bool isFixed = false;    // true if the variable is written only once
  bool isOpen = true;      // true if the variable has a value here; a loop counter has a value only in its loop
};

struct Program {
  std::vector<Expression> expressions;
  std::vector<Variable> variables;  // variable 0 is the parameter n, and variable 1 is the parameter x
  std::vector<Statement> statements;
  std::vector<std::uint32_t> results;  // the variables that are stored at the end, in this order
  std::uint32_t qpus = 1;
};

// An infinite sequence of numbers that is derived from a few bytes.
class Choices {
 public:
  Choices(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
  std::uint32_t below(std::uint32_t n) {
    const std::uint32_t high = byte();
    return (high * 256 + byte()) % n;
  }
  bool oneIn(std::uint32_t n) { return below(n) == 0; }

 private:
  std::uint32_t byte() {
    const std::uint32_t given = size_ == 0 ? 0 : data_[at_ % size_];
    // Each pass over the bytes gives different numbers.
    std::uint64_t x = at_ + 0x9e3779b97f4a7c15U * (given + 1);
    if (size_ != 0 && size_ <= 8)
      for (std::size_t i = 0; i < size_; ++i) x = (x ^ data_[i]) * 0xff51afd7ed558ccdU;
    x = (x ^ (x >> 33U)) * 0xff51afd7ed558ccdU;
    const std::uint32_t mixed = static_cast<std::uint32_t>(x >> 56U);
    const bool isFirstPass = at_ < size_ && size_ > 8;
    ++at_;
    return isFirstPass ? given : mixed;
  }

  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t at_ = 0;
};

class Generator {
 public:
  Generator(const std::uint8_t* data, std::size_t size) : choices_(data, size) {}

  Program make() {
    program_.qpus = 1 + below(kMostQpus);
    program_.variables = {{false, true, true}, {true, true, true}};
    const std::uint32_t count = 30 + below(kMostVariables - 30 + 1);
    floatShare_ = 1 + below(5);
    fixedShare_ = 1 + below(4);
    loadShare_ = below(5);
    block_ = &program_.statements;
    while (program_.results.size() < count) {
      if (oneIn(12)) gathers();
      declare();
      if (oneIn(16)) statement(0, false);
    }
    for (std::uint32_t left = 2 + below(24); left > 0; --left) statement(0, false);
    if (oneIn(2)) std::reverse(program_.results.begin(), program_.results.end());
    return std::move(program_);
  }

 private:
  std::uint32_t below(std::uint32_t n) { return choices_.below(n); }
  bool oneIn(std::uint32_t n) { return choices_.oneIn(n); }

  std::uint32_t make(Op op, std::uint32_t a = 0, std::uint32_t b = 0, std::uint32_t value = 0) {
    program_.expressions.push_back({op, a, b, value});
    return static_cast<std::uint32_t>(program_.expressions.size() - 1);
  }
  std::uint32_t constant(std::uint32_t value) { return make(Op::Constant, 0, 0, value); }
  std::uint32_t floatConstant(std::uint32_t bits) { return make(Op::FConstant, 0, 0, bits); }

  // Returns a variable of the given type. Parameters are chosen more often than other variables.
  std::uint32_t some(bool isFloat) {
    if (oneIn(6)) return isFloat ? 1 : 0;
    const auto n = static_cast<std::uint32_t>(program_.variables.size());
    const std::uint32_t from = below(n);
    for (std::uint32_t k = 0; k < n; ++k)
      if (const Variable& v = program_.variables[(from + k) % n]; v.isFloat == isFloat && v.isOpen)
        return (from + k) % n;
    return isFloat ? 1 : 0;
  }

  std::uint32_t intLeaf() {
    static constexpr std::uint32_t kConstants[] = {
        0,   1,     2,       3,          7,          15,         16,         31,      100,
        255, 65535, 0x10000, 0x7fffffff, 0x80000000, 0xffffffff, 0xfffffff0, 12345678};
    switch (below(10)) {
      case 0: return make(Op::Index);
      case 1: return make(oneIn(4) ? Op::NumQpus : Op::Me);
      case 2:
      case 3: return constant(kConstants[below(sizeof kConstants / sizeof *kConstants)]);
      default: return make(Op::Variable, 0, 0, some(false));
    }
  }

  std::uint32_t ints(std::uint32_t depth) {
    if (depth == 0 || oneIn(6)) return intLeaf();
    const std::uint32_t a = ints(depth - 1);
    switch (below(24)) {
      case 0:
      case 1: return make(Op::Add, a, ints(depth - 1));
      case 2: return make(Op::Sub, a, ints(depth - 1));
      case 3: return make(Op::Mul, a, ints(depth - 1));
      case 4: return make(Op::Shl, a, oneIn(2) ? constant(below(32)) : ints(depth - 1));
      case 5: return make(Op::Asr, a, oneIn(2) ? constant(below(32)) : ints(depth - 1));
      case 6: return make(Op::Shr, a, ints(depth - 1));
      case 7: return make(Op::Ror, a, ints(depth - 1));
      case 8: return make(Op::And, a, ints(depth - 1));
      case 9: return make(Op::Or, a, ints(depth - 1));
      case 10: return make(Op::Xor, a, ints(depth - 1));
      case 11: return make(Op::Min, a, ints(depth - 1));
      case 12: return make(Op::Max, a, ints(depth - 1));
      case 13: return make(Op::Not, a);
      case 14: return make(Op::Negate, a);
      case 15: return make(Op::RotateBy, a, 0, below(16));
      case 16: return make(Op::RotateVariable, a, ints(depth - 1));
      case 17: return make(Op::Broadcast, a, 0, below(16));
      case 18: return make(Op::ToInt, floats(depth - 1));
      case 19: return make(Op::AsInt, floats(depth - 1));
      case 20: return make(Op::Special, a, 0, below(kSpecialKinds));
      case 21: return make(Op::LoadScratch, 0, 0, below(kScratchSlots));
      case 22: return load();
      default: return make(Op::LoadAt, a);
    }
  }
  std::uint32_t load() { return make(Op::Load, 0, 0, below(kInputWords - 16)); }

  // Limits the magnitude to kLimit, so that no operation overflows.
  static constexpr std::uint32_t kLimit = 0x49800000;  // 2^20
  std::uint32_t bounded(std::uint32_t e) {
    return make(Op::FMin, make(Op::FMax, e, floatConstant(kLimit | 0x80000000U)), floatConstant(kLimit));
  }
  std::uint32_t half(std::uint32_t e) { return make(Op::FMul, e, floatConstant(0x3f000000)); }
  std::uint32_t floatLeaf() {
    static constexpr std::uint32_t kConstants[] = {0,          0x3f800000, 0xbf800000, 0x3f000000, 0x40490fdb,
                                                   0xc2f6e979, 0x00800000, 0x47c35000, 0x358637bd};
    if (oneIn(5)) return floatConstant(kConstants[below(sizeof kConstants / sizeof *kConstants)]);
    return make(Op::FVariable, 0, 0, some(true));
  }
  std::uint32_t floats(std::uint32_t depth) {
    if (depth == 0 || oneIn(6)) return floatLeaf();
    const std::uint32_t a = floats(depth - 1);
    switch (below(15)) {
      case 0:
      case 1: return half(make(Op::FAdd, a, floats(depth - 1)));
      case 2: return half(make(Op::FSub, a, floats(depth - 1)));
      case 3: return half(a);
      case 4: return bounded(make(Op::FMul, a, floats(depth - 1)));
      case 5: return bounded(make(Op::FAdd, a, floats(depth - 1)));
      case 6: return make(Op::FMin, a, floats(depth - 1));
      case 7: return make(Op::FMax, a, floats(depth - 1));
      case 8:
      case 9: return make(Op::FAbs, a);
      case 10: return make(Op::FNegate, a);
      case 11: return make(Op::FRotateBy, a, 0, below(16));
      case 12: return make(Op::FBroadcast, a, 0, below(16));
      case 13: return make(Op::FLoad, 0, 0, below(kInputWords - 16));
      default: return make(Op::ToFloat, make(Op::Asr, ints(depth - 1), constant(11)));
    }
  }

  std::uint32_t mask(std::uint32_t depth) {
    if (depth > 0 && oneIn(3)) {
      const std::uint32_t a = mask(depth - 1);
      switch (below(3)) {
        case 0: return make(Op::MaskAnd, a, mask(depth - 1));
        case 1: return make(Op::MaskOr, a, mask(depth - 1));
        default: return make(Op::MaskNot, a);
      }
    }
    if (oneIn(3)) {
      const auto op = static_cast<Op>(static_cast<std::uint32_t>(Op::FEq) + below(6));
      return make(op, floats(1), floats(1));
    }
    const auto op = static_cast<Op>(static_cast<std::uint32_t>(Op::Eq) + below(6));
    return make(op, ints(1), ints(1));
  }
  std::uint32_t condition(std::uint32_t depth) {
    if (depth > 0 && oneIn(4)) {
      const std::uint32_t a = condition(depth - 1);
      switch (below(3)) {
        case 0: return make(Op::Both, a, condition(depth - 1));
        case 1: return make(Op::Either, a, condition(depth - 1));
        default: return make(Op::Neither, a);
      }
    }
    return make(oneIn(2) ? Op::Any : Op::All, mask(1));
  }

  Statement& add(Kind kind, std::uint32_t target = 0, std::uint32_t expression = 0) {
    Statement s;
    s.kind = kind;
    s.target = target;
    s.expression = expression;
    block_->push_back(s);
    return block_->back();
  }

  void declare() {
    const bool isFloat = below(6) < floatShare_;
    std::uint32_t e = 0;
    if (below(5) < loadShare_)
      e = isFloat ? make(Op::FLoad, 0, 0, below(kInputWords - 16)) : load();
    else
      e = isFloat ? floats(1 + below(2)) : ints(1 + below(2));
    const auto v = static_cast<std::uint32_t>(program_.variables.size());
    add(Kind::Declare, v, e);
    program_.results.push_back(v);
    program_.variables.push_back({isFloat, below(5) < fixedShare_, true});
  }

  // Finds a variable that may be written again. Returns false if there is no such variable.
  bool target(std::uint32_t& v) {
    const auto n = static_cast<std::uint32_t>(program_.variables.size());
    const std::uint32_t from = below(n);
    for (std::uint32_t k = 0; k < n; ++k) {
      v = (from + k) % n;
      if (!program_.variables[v].isFixed) return true;
    }
    return false;
  }
  void assign() {
    std::uint32_t v = 0;
    if (!target(v)) return;
    const std::uint32_t depth = 1 + below(3);
    const std::uint32_t e = program_.variables[v].isFloat ? floats(depth) : ints(depth);
    add(Kind::Assign, v, e);
  }

  void block(std::vector<Statement>& body, std::uint32_t depth, bool inWhere) {
    std::vector<Statement>* const outer = block_;
    block_ = &body;
    for (std::uint32_t left = 1 + below(4); left > 0; --left) statement(depth + 1, inWhere);
    block_ = outer;
  }

  void statement(std::uint32_t depth, bool inWhere) {
    const std::uint32_t kind = below(16);
    if (kind < 6 || depth > 3) return assign();
    Statement s;
    switch (kind) {
      case 6:
      case 7:
      case 8:
      case 9:
        s.kind = kind < 8 ? Kind::If : Kind::Where;
        s.expression = kind < 8 ? condition(1) : mask(1);
        block(s.body, depth, inWhere || kind >= 8);
        if (oneIn(2)) block(s.other, depth, inWhere || kind >= 8);
        block_->push_back(std::move(s));
        return;
      default: break;
    }
    if (inWhere) return assign();
    switch (kind) {
      case 10:
      case 11:
        if (loops_ == 2) return assign();
        ++loops_;
        s.kind = Kind::Loop;
        s.variant = below(2);
        s.expression = oneIn(2) ? constant(below(4)) : make(Op::And, ints(1), constant(3));
        s.target = static_cast<std::uint32_t>(program_.variables.size());
        program_.variables.push_back({false, true, true});
        block(s.body, depth, false);
        program_.variables[s.target].isOpen = false;
        --loops_;
        block_->push_back(std::move(s));
        return;
      case 12:
      case 13: {
        const std::uint32_t e = ints(2);
        Statement& store = add(Kind::Store, below(kScratchSlots), e);
        store.variant = below(3);
        store.words = store.variant == 2 ? 1 + below(16) : 16;
        return;
      }
      case 14: return gathers();
      default: return assign();
    }
  }

  // Requests vectors, executes other statements, and then receives the vectors.
  void gathers() {
    const std::uint32_t count = 1 + below(3);
    std::vector<std::uint32_t> targets;
    for (std::uint32_t k = 0; k < count; ++k) {
      std::uint32_t v = 0;
      const auto n = static_cast<std::uint32_t>(program_.variables.size());
      const std::uint32_t from = below(n);
      bool found = false;
      for (std::uint32_t i = 0; i < n && !found; ++i) {
        v = (from + i) % n;
        found = !program_.variables[v].isFixed && !program_.variables[v].isFloat;
      }
      if (found) targets.push_back(v);
    }
    for (std::size_t k = 0; k < targets.size(); ++k) {
      const std::uint32_t e = ints(1);
      add(Kind::Gather, 0, e);
    }
    for (const std::uint32_t v : targets) {
      if (oneIn(3)) assign();
      add(Kind::Receive, v);
    }
  }

  Choices choices_;
  Program program_;
  std::vector<Statement>* block_ = nullptr;
  std::uint32_t loops_ = 0;
  std::uint32_t floatShare_ = 0, fixedShare_ = 0, loadShare_ = 0;
};

}  // namespace fuzz::pressure

#endif
