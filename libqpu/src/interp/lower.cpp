// Lowers a kernel to instructions in one pass. If no mask is active, the code computes a value
// directly in the slot of the variable to which the value is assigned. An expression that occurs
// several times in a statement is computed once.
#include <map>
#include <utility>

#include "interp/code.hpp"
#include "lang/gathers.hpp"

namespace qpu::interp {
namespace {

using detail::Expression;
using detail::Op;
using detail::Source;
using detail::Statement;
using detail::StatementKind;

struct OpcodeOf {
  Op op;
  Opcode code;
};

Opcode opcode(Op op) {
  switch (op) {
    case Op::Add: return Opcode::Add;
    case Op::Sub: return Opcode::Sub;
    case Op::Mul24: return Opcode::Mul24;
    case Op::Min: return Opcode::Min;
    case Op::Max: return Opcode::Max;
    case Op::Shl: return Opcode::Shl;
    case Op::Asr: return Opcode::Asr;
    case Op::Shr: return Opcode::Shr;
    case Op::Ror: return Opcode::Ror;
    case Op::And: return Opcode::And;
    case Op::Or: return Opcode::Or;
    case Op::Xor: return Opcode::Xor;
    case Op::Not: return Opcode::Not;
    case Op::FAdd: return Opcode::FAdd;
    case Op::FSub: return Opcode::FSub;
    case Op::FMul: return Opcode::FMul;
    case Op::FMin: return Opcode::FMin;
    case Op::FMax: return Opcode::FMax;
    case Op::FMaxAbs: return Opcode::FMaxAbs;
    case Op::Recip: return Opcode::Recip;
    case Op::RecipSqrt: return Opcode::RecipSqrt;
    case Op::Exp2: return Opcode::Exp2;
    case Op::Log2: return Opcode::Log2;
    case Op::Broadcast: return Opcode::Broadcast;
    case Op::ItoF: return Opcode::ItoF;
    case Op::FtoI: return Opcode::FtoI;
    case Op::Rotate: return Opcode::Rotate;
    case Op::Load: return Opcode::Load;
    case Op::Eq: return Opcode::Eq;
    case Op::Ne: return Opcode::Ne;
    case Op::Lt: return Opcode::Lt;
    case Op::Le: return Opcode::Le;
    case Op::Gt: return Opcode::Gt;
    case Op::Ge: return Opcode::Ge;
    case Op::FEq: return Opcode::FEq;
    case Op::FNe: return Opcode::FNe;
    case Op::FLt: return Opcode::FLt;
    case Op::FLe: return Opcode::FLe;
    case Op::FGt: return Opcode::FGt;
    case Op::FGe: return Opcode::FGe;
    case Op::MaskAnd: return Opcode::MaskAnd;
    case Op::MaskOr: return Opcode::MaskOr;
    case Op::MaskNot: return Opcode::MaskNot;
    case Op::Any: return Opcode::Any;
    case Op::All: return Opcode::All;
    case Op::VpmRead: return Opcode::VpmRead;
    // Leaves have their own slots and need no instruction.
    case Op::Constant:
    case Op::Variable:
    case Op::ElementNumber:
    case Op::QpuNumber:
    case Op::QpuCount: break;
  }
  return Opcode::End;
}

class Lowering {
 public:
  explicit Lowering(const Source& source) : source_(source) {
    code_.name = source.name;
    code_.parameters = static_cast<std::uint32_t>(source.parameters.size());
    code_.slots = static_cast<std::uint32_t>(source.variables.size());
    slotOf_.resize(source.expressions.size(), 0);
    computedIn_.resize(source.expressions.size(), 0);
  }

  Code run() {
    code_.mostGathers = detail::planGathers(source_).most;
    block(source_.body);
    emit(Opcode::End);
    return std::move(code_);
  }

 private:
  static constexpr std::uint32_t kNone = Code::kNoSlot;

  std::uint32_t here() const { return static_cast<std::uint32_t>(code_.instructions.size()); }

  std::uint32_t emit(Opcode op, std::uint32_t target = 0, std::uint32_t a = 0,
                     std::uint32_t b = 0, std::uint32_t extra = 0) {
    code_.instructions.push_back({op, target, a, b, extra, site_});
    return here() - 1;
  }

  void target(std::uint32_t jump) { code_.instructions[jump].extra = here(); }

  std::uint32_t temporary() {
    if (used_ == temporaries_.size()) temporaries_.push_back(code_.slots++);
    return temporaries_[used_++];
  }

  static std::uint32_t lazily(std::uint32_t& slot, std::uint32_t& slots) {
    if (slot == kNone) slot = slots++;
    return slot;
  }

  std::uint32_t constant(std::uint32_t bits) {
    const auto [entry, fresh] = constants_.try_emplace(bits, code_.slots);
    if (fresh) code_.constants.push_back({code_.slots++, bits});
    return entry->second;
  }

  // Computes expression number `id`. The result goes to slot `wanted`, unless `wanted` is kNone.
  // Returns the slot that contains the result. A leaf stays in its own slot.
  std::uint32_t evaluate(std::uint32_t id, std::uint32_t wanted = kNone) {
    const Expression& e = source_.expressions[id];
    switch (e.op) {
      case Op::Constant: return constant(e.bits);
      case Op::Variable: return e.bits;
      case Op::ElementNumber: return lazily(code_.elementSlot, code_.slots);
      case Op::QpuNumber: return lazily(code_.qpuSlot, code_.slots);
      case Op::QpuCount: return lazily(code_.countSlot, code_.slots);
      default: break;
    }
    if (e.vpmReads == 0 && computedIn_[id] == statement_) return slotOf_[id];
    std::uint32_t a = 0;
    std::uint32_t b = 0;
    if (e.op != Op::VpmRead) {
      a = evaluate(e.a);
      if (isBinary(e.op)) b = evaluate(e.b);
    }
    const std::uint32_t slot = wanted != kNone ? wanted : temporary();
    emit(opcode(e.op), slot, a, b);
    computedIn_[id] = statement_;
    slotOf_[id] = slot;
    return slot;
  }

  // Emits a jump that is taken if the scalar condition does not hold. The caller must set the
  // target of the jump later.
  std::uint32_t unless(std::uint32_t condition) {
    const Expression& e = source_.expressions[condition];
    if (e.op == Op::Any) return emit(Opcode::JumpIfNone, 0, evaluate(e.a));
    if (e.op == Op::All) return emit(Opcode::JumpIfNotAll, 0, evaluate(e.a));
    return emit(Opcode::JumpIfNot, 0, evaluate(condition));
  }

  void assign(const Statement& s) {
    if (mask_ != kNone) {
      emit(Opcode::MoveWhere, s.target, evaluate(s.value), mask_);
      return;
    }
    const std::uint32_t slot = evaluate(s.value, s.target);
    if (slot != s.target) emit(Opcode::Move, s.target, slot);
  }

  void receive(const Statement& s) {
    if (mask_ == kNone) {
      emit(Opcode::Receive, s.target);
      return;
    }
    const std::uint32_t vector = temporary();
    emit(Opcode::Receive, vector);
    emit(Opcode::MoveWhere, s.target, vector, mask_);
  }

  void conditional(const Statement& s) {
    const std::uint32_t skip = unless(s.value);
    block(s.body);
    if (s.other.empty()) {
      target(skip);
      return;
    }
    const std::uint32_t done = emit(Opcode::Jump);
    target(skip);
    block(s.other);
    target(done);
  }

  void loop(const Statement& s) {
    const std::uint32_t head = here();
    const std::uint32_t leave = unless(s.value);
    block(s.body);
    block(s.other);
    emit(Opcode::JumpBack, 0, 0, 0, head);
    target(leave);
  }

  void where(const Statement& s) {
    const std::uint32_t outer = mask_;
    const std::uint32_t condition = code_.slots++;  // stays live until the end of the block
    const std::uint32_t value = evaluate(s.value, condition);
    if (value != condition) emit(Opcode::Move, condition, value);
    std::uint32_t inside = condition;
    if (outer != kNone) {
      inside = code_.slots++;
      emit(Opcode::MaskAnd, inside, condition, outer);
    }
    mask_ = inside;
    block(s.body);
    if (!s.other.empty()) {
      mask_ = condition;
      emit(Opcode::MaskNot, condition, condition);
      if (outer != kNone) emit(Opcode::MaskAnd, condition, condition, outer);
      block(s.other);
    }
    mask_ = outer;
  }

  void detailed(Opcode op, const Statement& s, std::uint32_t slot) {
    code_.details.push_back({s.element, s.direction, s.count, s.length, s.pitch, s.text});
    emit(op, 0, slot, 0, static_cast<std::uint32_t>(code_.details.size() - 1));
  }

  void block(const std::vector<Statement>& statements) {
    for (const Statement& s : statements) statement(s);
  }

  void statement(const Statement& s) {
    ++statement_;
    used_ = 0;
    site_ = static_cast<std::uint32_t>(code_.sites.size());
    code_.sites.push_back({s.site.construct, source_.describe(s.site)});
    switch (s.kind) {
      case StatementKind::Assign: return assign(s);
      case StatementKind::Store: {
        const std::uint32_t value = evaluate(s.value);
        const std::uint32_t address = evaluate(s.address);
        if (s.limit == detail::kNoExpression)
          emit(Opcode::Store, 0, value, address);
        else
          emit(Opcode::StoreFirst, 0, value, address, evaluate(s.limit));
        return;
      }
      case StatementKind::Gather: emit(Opcode::Gather, 0, evaluate(s.address)); return;
      case StatementKind::Receive: return receive(s);
      case StatementKind::If: return conditional(s);
      case StatementKind::While:
      case StatementKind::For: return loop(s);
      case StatementKind::Where: return where(s);
      case StatementKind::PrintText: return detailed(Opcode::PrintText, s, 0);
      case StatementKind::PrintVector:
        return detailed(Opcode::PrintVector, s, evaluate(s.value));
      case StatementKind::SemaphoreRelease: return detailed(Opcode::SemaphoreRelease, s, 0);
      case StatementKind::SemaphoreAcquire: return detailed(Opcode::SemaphoreAcquire, s, 0);
      case StatementKind::DmaReadPitch:
        return detailed(Opcode::DmaReadPitch, s, evaluate(s.value));
      case StatementKind::DmaReadSetup:
        return detailed(Opcode::DmaReadSetup, s, evaluate(s.address));
      case StatementKind::DmaReadStart:
        return detailed(Opcode::DmaReadStart, s, evaluate(s.address));
      case StatementKind::DmaReadWait: return detailed(Opcode::DmaReadWait, s, 0);
      case StatementKind::DmaWriteStride:
        return detailed(Opcode::DmaWriteStride, s, evaluate(s.value));
      case StatementKind::DmaWriteSetup:
        return detailed(Opcode::DmaWriteSetup, s, evaluate(s.address));
      case StatementKind::DmaWriteStart:
        return detailed(Opcode::DmaWriteStart, s, evaluate(s.address));
      case StatementKind::DmaWriteWait: return detailed(Opcode::DmaWriteWait, s, 0);
      case StatementKind::VpmReadSetup:
        return detailed(Opcode::VpmReadSetup, s, evaluate(s.address));
      case StatementKind::VpmWriteSetup:
        return detailed(Opcode::VpmWriteSetup, s, evaluate(s.address));
      case StatementKind::VpmWrite: return detailed(Opcode::VpmWrite, s, evaluate(s.value));
    }
  }

  const Source& source_;
  Code code_;
  std::map<std::uint32_t, std::uint32_t> constants_;
  std::vector<std::uint32_t> slotOf_;
  std::vector<std::uint32_t> computedIn_;
  std::vector<std::uint32_t> temporaries_;
  std::size_t used_ = 0;
  std::uint32_t statement_ = 0;
  std::uint32_t site_ = 0;
  std::uint32_t mask_ = kNone;
};

}  // namespace

Code lower(const Source& source) { return Lowering(source).run(); }

Uses uses(Opcode code) {
  switch (code) {
    case Opcode::Not:
    case Opcode::ItoF:
    case Opcode::FtoI:
    case Opcode::Recip:
    case Opcode::RecipSqrt:
    case Opcode::Exp2:
    case Opcode::Log2:
    case Opcode::MaskNot:
    case Opcode::Any:
    case Opcode::All:
    case Opcode::Move:
    case Opcode::Load: return {true, false, true};
    case Opcode::Store:
    case Opcode::StoreFirst: return {true, true, false};
    case Opcode::Receive:
    case Opcode::VpmRead: return {false, false, true};
    case Opcode::Gather:
    case Opcode::JumpIfNot:
    case Opcode::JumpIfNone:
    case Opcode::JumpIfNotAll:
    case Opcode::PrintVector:
    case Opcode::DmaReadPitch:
    case Opcode::DmaReadSetup:
    case Opcode::DmaReadStart:
    case Opcode::DmaWriteStride:
    case Opcode::DmaWriteSetup:
    case Opcode::DmaWriteStart:
    case Opcode::VpmReadSetup:
    case Opcode::VpmWriteSetup:
    case Opcode::VpmWrite: return {true, false, false};
    case Opcode::Jump:
    case Opcode::JumpBack:
    case Opcode::End:
    case Opcode::PrintText:
    case Opcode::SemaphoreRelease:
    case Opcode::SemaphoreAcquire:
    case Opcode::DmaReadWait:
    case Opcode::DmaWriteWait: return {};
    default: return {true, true, true};
  }
}

}  // namespace qpu::interp
