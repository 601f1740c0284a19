// Records a program from pressure_program.hpp through the language's public interface.
#ifndef QPU_FUZZ_PRESSURE_RECORD_HPP
#define QPU_FUZZ_PRESSURE_RECORD_HPP

#include <deque>
#include <stdexcept>

#include "fuzz/pressure_program.hpp"
#include "qpu/qpu.hpp"

namespace fuzz::pressure {

class Record {
 public:
  Record(const Program& program, qpu::Int& n, qpu::Float& x, qpu::Ptr<qpu::Int>& in, qpu::Ptr<qpu::Float>& inFloat,
         qpu::Ptr<qpu::Int>& out)
      : program_(program), in_(in), inFloat_(inFloat), area_(out + qpu::me() * static_cast<int>(kAreaWords)),
        ints_(program.variables.size()), floats_(program.variables.size()) {
    ints_[0].push_back(n);
    floats_[1].push_back(x);
  }

  void run() {
    block(program_.statements);
    int at = 16 * static_cast<int>(kScratchSlots);
    for (const std::uint32_t v : program_.results) {
      if (program_.variables[v].isFloat)
        store(qpu::asInt(floats_[v].front()), area_ + at);
      else
        store(ints_[v].front(), area_ + at);
      at += 16;
    }
  }

 private:
  const Expression& at(std::uint32_t e) const { return program_.expressions[e]; }
  static int asNumber(std::uint32_t x) { return static_cast<int>(x); }

  qpu::IntExpr ints(std::uint32_t e) {
    const Expression& x = at(e);
    switch (x.op) {
      case Op::Constant: return asNumber(x.value);
      case Op::Variable: return ints_[x.value].front();
      case Op::Index: return qpu::index();
      case Op::Me: return qpu::me();
      case Op::NumQpus: return qpu::numQPUs();
      case Op::Add: return ints(x.a) + ints(x.b);
      case Op::Sub: return ints(x.a) - ints(x.b);
      case Op::Mul: return ints(x.a) * ints(x.b);
      case Op::Shl: return ints(x.a) << ints(x.b);
      case Op::Asr: return ints(x.a) >> ints(x.b);
      case Op::Shr: return shr(ints(x.a), ints(x.b));
      case Op::Ror: return ror(ints(x.a), ints(x.b));
      case Op::And: return ints(x.a) & ints(x.b);
      case Op::Or: return ints(x.a) | ints(x.b);
      case Op::Xor: return ints(x.a) ^ ints(x.b);
      case Op::Min: return min(ints(x.a), ints(x.b));
      case Op::Max: return max(ints(x.a), ints(x.b));
      case Op::Not: return ~ints(x.a);
      case Op::Negate: return -ints(x.a);
      case Op::RotateBy: return rotate(ints(x.a), asNumber(x.value));
      case Op::RotateVariable: return rotate(ints(x.a), ints(x.b));
      case Op::Broadcast: return broadcast(ints(x.a), asNumber(x.value));
      case Op::ToInt: return qpu::toInt(floats(x.a));
      case Op::AsInt: return qpu::asInt(floats(x.a));
      case Op::Special: return special(x);
      case Op::Load: return in_[asNumber(x.value)];
      case Op::LoadAt: return in_[ints(x.a) & 1023];
      case Op::LoadScratch: return area_[16 * asNumber(x.value)];
      default: throw std::logic_error("not an integer expression");
    }
  }
  // The results of the special function unit are accurate to about 11 bits. Only these bits are
  // kept.
  qpu::IntExpr special(const Expression& x) {
    const qpu::IntExpr k = ints(x.a) & 7;
    const qpu::FloatExpr power = qpu::toFloat(qpu::IntExpr(1) << k);
    switch (x.value) {
      case kRecip: return qpu::toInt(recip(power) * 256.0F + 0.5F);
      case kRootRecip: return qpu::toInt(rsqrt(power * power) * 256.0F + 0.5F);
      case kExponential: return qpu::toInt(exp2(qpu::toFloat(k)) + 0.5F);
      default: return qpu::toInt(log2(power) + 0.5F);
    }
  }

  qpu::FloatExpr floats(std::uint32_t e) {
    const Expression& x = at(e);
    switch (x.op) {
      case Op::FConstant: return qpu::asFloat(asNumber(x.value));
      case Op::FVariable: return floats_[x.value].front();
      case Op::FAdd: return floats(x.a) + floats(x.b);
      case Op::FSub: return floats(x.a) - floats(x.b);
      case Op::FMul: return floats(x.a) * floats(x.b);
      case Op::FMin: return min(floats(x.a), floats(x.b));
      case Op::FMax: return max(floats(x.a), floats(x.b));
      case Op::FAbs: return abs(floats(x.a));
      case Op::FNegate: return -floats(x.a);
      case Op::ToFloat: return qpu::toFloat(ints(x.a));
      case Op::FRotateBy: return rotate(floats(x.a), asNumber(x.value));
      case Op::FBroadcast: return broadcast(floats(x.a), asNumber(x.value));
      case Op::FLoad: return inFloat_[asNumber(x.value)];
      default: throw std::logic_error("not a float expression");
    }
  }

  qpu::BoolExpr mask(std::uint32_t e) {
    const Expression& x = at(e);
    switch (x.op) {
      case Op::Eq: return ints(x.a) == ints(x.b);
      case Op::Ne: return ints(x.a) != ints(x.b);
      case Op::Lt: return ints(x.a) < ints(x.b);
      case Op::Le: return ints(x.a) <= ints(x.b);
      case Op::Gt: return ints(x.a) > ints(x.b);
      case Op::Ge: return ints(x.a) >= ints(x.b);
      case Op::FEq: return floats(x.a) == floats(x.b);
      case Op::FNe: return floats(x.a) != floats(x.b);
      case Op::FLt: return floats(x.a) < floats(x.b);
      case Op::FLe: return floats(x.a) <= floats(x.b);
      case Op::FGt: return floats(x.a) > floats(x.b);
      case Op::FGe: return floats(x.a) >= floats(x.b);
      case Op::MaskAnd: return mask(x.a) && mask(x.b);
      case Op::MaskOr: return mask(x.a) || mask(x.b);
      case Op::MaskNot: return !mask(x.a);
      default: throw std::logic_error("not a boolean expression");
    }
  }
  qpu::Cond condition(std::uint32_t e) {
    const Expression& x = at(e);
    switch (x.op) {
      case Op::Any: return qpu::any(mask(x.a));
      case Op::All: return qpu::all(mask(x.a));
      case Op::Both: return condition(x.a) && condition(x.b);
      case Op::Either: return condition(x.a) || condition(x.b);
      case Op::Neither: return !condition(x.a);
      default: throw std::logic_error("not a condition");
    }
  }

  void block(const std::vector<Statement>& statements) {
    for (const Statement& s : statements) statement(s);
  }

  void statement(const Statement& s) {
    switch (s.kind) {
      case Kind::Declare:
        if (program_.variables[s.target].isFloat)
          floats_[s.target].emplace_back(floats(s.expression));
        else
          ints_[s.target].emplace_back(ints(s.expression));
        return;
      case Kind::Assign:
        if (program_.variables[s.target].isFloat)
          floats_[s.target].front() = floats(s.expression);
        else
          ints_[s.target].front() = ints(s.expression);
        return;
      case Kind::If:
      case Kind::Where:
        if (s.kind == Kind::If)
          qpu::If_(condition(s.expression));
        else
          qpu::Where_(mask(s.expression));
        block(s.body);
        if (!s.other.empty()) {
          qpu::Else_();
          block(s.other);
        }
        qpu::End_();
        return;
      case Kind::Loop: {
        ints_[s.target].emplace_back(ints(s.expression));
        qpu::Int& counter = ints_[s.target].front();
        if (s.variant == 0) {
          qpu::While_(qpu::any(counter > 0));
          counter -= 1;
        } else {
          qpu::For_(qpu::any(counter > 0));
          counter -= 1;
          qpu::ForBody_();
        }
        block(s.body);
        qpu::End_();
        return;
      }
      case Kind::Store: {
        const qpu::PtrExpr<qpu::Int> to = area_ + 16 * asNumber(s.target);
        if (s.variant == 0)
          *to = ints(s.expression);
        else if (s.variant == 1)
          store(ints(s.expression), to);
        else
          store(ints(s.expression), to, asNumber(s.words));
        return;
      }
      case Kind::Gather: return gather(in_ + (ints(s.expression) & 1023));
      case Kind::Receive: return receive(ints_[s.target].front());
    }
  }

  const Program& program_;
  qpu::Ptr<qpu::Int>& in_;
  qpu::Ptr<qpu::Float>& inFloat_;
  qpu::Ptr<qpu::Int> area_;
  // One entry per variable. The entry is filled in when the variable is declared.
  std::vector<std::deque<qpu::Int>> ints_;
  std::vector<std::deque<qpu::Float>> floats_;
};

}  // namespace fuzz::pressure

#endif
