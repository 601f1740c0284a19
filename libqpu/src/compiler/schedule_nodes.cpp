#include "compiler/schedule_nodes.hpp"

#include <algorithm>
#include <stdexcept>

namespace qpu::compiler {
namespace {

namespace address = isa::address;

bool isPure(const Operation& o) {
  switch (o.op) {
    case Op::Add: case Op::Mul: case Op::Move: case Op::Load: case Op::LoadPerElement:
    case Op::ElementNumber: case Op::Rotate: case Op::Broadcast: case Op::Sfu:
      return !o.setsFlags;
    default: return false;
  }
}

class NodeBuilder {
 public:
  explicit NodeBuilder(const BlockContext& context)
      : context_(context),
        block_(context.function->blocks[context.block]),
        current_(context.function->registers, kNone) {}

  BlockNodes run() {
    findDead();
    graph_.nodes.reserve(block_.operations.size() * 5 / 4 + 8);
    graph_.values.reserve(block_.operations.size() + 16);
    if (context_.setNoSwap) addNoSwap();
    for (position_ = 0; position_ < block_.operations.size(); ++position_)
      if (dead_[position_] == 0) addOperation(block_.operations[position_]);
    finishValues();
    return std::move(nodes_);
  }

 private:
  // Finds dead operations, and results that are updated conditionally before the next write of
  // all elements.
  void findDead() {
    const auto& operations = block_.operations;
    dead_.assign(operations.size(), 0);
    std::vector<char> needed(context_.function->registers, 0);
    for (std::size_t g = 0; g < context_.live->globals.size(); ++g)
      if (context_.live->out[context_.block].has(g)) needed[context_.live->globals[g]] = 1;
    updated_.assign(operations.size(), 0);
    std::vector<char> updatedLater(context_.function->registers, 0);
    for (std::size_t i = operations.size(); i-- > 0;) {
      const Operation& o = operations[i];
      const bool writes = o.target != Operation::kNone;
      if (isPure(o) && (!writes || needed[o.target] == 0)) {
        dead_[i] = 1;
        continue;
      }
      if (writes) {
        if (isUpdate(o)) {
          updatedLater[o.target] = 1;
        } else {
          needed[o.target] = 0;
          updated_[i] = updatedLater[o.target];
          updatedLater[o.target] = 0;
        }
      }
      forEachRead(o, [&](Vreg v) { needed[v] = 1; });
    }
  }

  std::uint32_t newValue(Vreg v, bool isLiveIn) {
    const auto id = static_cast<std::uint32_t>(graph_.values.size());
    Value value;
    value.vreg = v;
    value.liveIn = isLiveIn;
    if (v != Operation::kNone && context_.live->indexOf[v] != Liveness::kLocal &&
        (isLiveIn || context_.live->liveOut(context_.block, v)))
      value.home = (*context_.homes)[context_.live->indexOf[v]];
    graph_.values.push_back(value);
    definitions_.emplace_back();
    return id;
  }

  std::uint32_t valueOf(Vreg v) {
    if (current_[v] == kNone) current_[v] = newValue(v, true);
    return current_[v];
  }

  void endValue(Vreg v) {
    if (current_[v] != kNone)
      definitions_[current_[v]].end =
          std::min(definitions_[current_[v]].end, static_cast<std::uint32_t>(position_));
  }

  Source source(const Operand& o) {
    switch (o.kind) {
      case Operand::Kind::Register: return {Source::Kind::Value, valueOf(o.value)};
      case Operand::Kind::Immediate: {
        const auto code = isa::smallImmediateCode(o.value);
        if (!code) throw std::logic_error("an immediate operand without a small-immediate code");
        return {Source::Kind::Small, *code};
      }
      default: return {};
    }
  }

  static Node nodeOf(const Operation& o) {
    Node n;
    n.site = o.site;
    n.cond = o.cond;
    n.setsFlags = o.setsFlags;
    return n;
  }

  static void makeMove(Node& n) {
    n.pipes = kAddPipe | kMulPipe;
    if (n.setsFlags) n.pipes = kAddPipe;
    n.add = isa::AddOp::Or;
    n.mul = isa::MulOp::V8Min;
  }

  std::uint32_t push(const Node& n) {
    graph_.nodes.push_back(n);
    positions_.push_back(static_cast<std::uint32_t>(position_));
    return static_cast<std::uint32_t>(graph_.nodes.size() - 1);
  }

  // Makes the node write the target of operation o.
  void define(Node& n, const Operation& o) {
    if (o.target == Operation::kNone) return;
    if (isUpdate(o)) {
      n.target = valueOf(o.target);
      ++graph_.values[n.target].updates;
      endsHere(n.target);
    } else {
      endValue(o.target);
      n.target = newValue(o.target, false);
      definitions_[n.target].node = static_cast<std::uint32_t>(graph_.nodes.size());
      pendingTarget_ = o.target;
    }
  }
  void endsHere(std::uint32_t value) {
    definitions_[value].end =
        std::min(definitions_[value].end, static_cast<std::uint32_t>(position_));
  }

  // Adds a node whose result the hardware puts into r4 or r5. If the result is updated later, a
  // second node immediately moves it to another register, where it becomes a new value.
  void pushResult(Node n, const Operation& o, Place result) {
    n.result = result;
    n.cond = isa::Cond::Always;
    n.setsFlags = false;
    if (o.target == Operation::kNone) {
      n.target = newValue(Operation::kNone, false);
      push(n);
      return;
    }
    endValue(o.target);
    if (updated_[position_] != 0) {
      n.target = newValue(Operation::kNone, false);
      definitions_[n.target].node = push(n);
      Node move;
      move.site = o.site;
      makeMove(move);
      move.a = {Source::Kind::Value, n.target};
      current_[o.target] = move.target = newValue(o.target, false);
      definitions_[move.target].node = push(move);
      positions_.back() = kNone;
    } else {
      current_[o.target] = n.target = newValue(o.target, false);
      definitions_[n.target].node = push(n);
      inR4OrR5_.push_back(n.target);
    }
  }

  void pushPlain(Node n, const Operation& o) {
    pendingTarget_ = Operation::kNone;
    define(n, o);
    push(n);
    if (pendingTarget_ != Operation::kNone) current_[pendingTarget_] = n.target;
  }

  void pushWrite(Node n, const Operation& o, std::uint8_t to, std::uint8_t files,
                 std::uint8_t exclusive) {
    makeMove(n);
    n.a = source(o.a);
    n.cond = isa::Cond::Always;
    n.address = to;
    n.files = files;
    n.exclusive = exclusive;
    push(n);
  }

  void addNoSwap() {
    position_ = 0;
    Node n;
    makeMove(n);
    n.a = {Source::Kind::Small, 1};
    n.address = address::kTmuNoSwap;
    n.exclusive = kUnitAccess;
    nodes_.noSwap = push(n);
    positions_[nodes_.noSwap] = kNone;
  }

  void addOperation(const Operation& o) {
    Node n = nodeOf(o);
    switch (o.op) {
      case Op::Add:
        n.pipes = kAddPipe;
        n.add = o.add;
        if (!o.setsFlags && o.add == isa::AddOp::V8AddS) allowBothPipes(n, isa::MulOp::V8AddS);
        if (!o.setsFlags && o.add == isa::AddOp::V8SubS) allowBothPipes(n, isa::MulOp::V8SubS);
        n.a = source(o.a);
        n.b = source(o.b);
        pushPlain(n, o);
        break;
      case Op::Mul:
        n.pipes = kMulPipe;
        n.mul = o.mul;
        if (o.mul == isa::MulOp::V8AddS) allowBothPipes(n, isa::AddOp::V8AddS);
        if (o.mul == isa::MulOp::V8SubS) allowBothPipes(n, isa::AddOp::V8SubS);
        if (o.setsFlags && n.pipes != kMulPipe) n.pipes = kAddPipe;
        n.a = source(o.a);
        n.b = source(o.b);
        pushPlain(n, o);
        break;
      case Op::Move:
        makeMove(n);
        n.a = source(o.a);
        pushPlain(n, o);
        break;
      case Op::Load: addLoad(n, o); break;
      case Op::LoadPerElement: addPerElement(n, o); break;
      case Op::ElementNumber:
        makeMove(n);
        n.a = {Source::Kind::ReadA, address::kElementNumber};
        pushPlain(n, o);
        break;
      case Op::Uniform:
        makeMove(n);
        n.a = {Source::Kind::ReadEither, address::kUniform};
        pushPlain(n, o);
        break;
      case Op::Rotate: addRotate(n, o); break;
      case Op::Broadcast: addBroadcast(n, o); break;
      case Op::Sfu:
        makeMove(n);
        n.a = source(o.a);
        n.address = static_cast<std::uint8_t>(o.constant);
        n.exclusive = kUnitAccess;
        pushResult(n, o, kR4);
        break;
      case Op::TmuRequest:
        n.unit = o.unit;
        pushWrite(n, o, o.unit == 0 ? address::kTmu0S : address::kTmu1S, kToNeither, kUnitAccess);
        break;
      case Op::TmuReceive:
        n.form = Node::Form::Receive;
        n.unit = o.unit;
        n.exclusive = kUnitAccess | kVpmAccess;
        pushResult(n, o, kR4);
        break;
      case Op::VpmReadSetup: pushWrite(n, o, address::kVpmSetup, kToA, kVpmAccess); break;
      case Op::VpmWriteSetup: pushWrite(n, o, address::kVpmSetup, kToB, kVpmAccess); break;
      case Op::VpmRead:
        makeMove(n);
        n.a = {Source::Kind::ReadEither, address::kVpm};
        n.exclusive = kVpmAccess;
        pushPlain(n, o);
        break;
      case Op::VpmWrite: pushWrite(n, o, address::kVpm, kToNeither, kVpmAccess); break;
      case Op::DmaLoadStart: pushWrite(n, o, address::kDmaAddress, kToA, kVpmAccess); break;
      case Op::DmaStoreStart: pushWrite(n, o, address::kDmaAddress, kToB, kVpmAccess); break;
      case Op::DmaLoadWait: addWait(n, Source::Kind::ReadA); break;
      case Op::DmaStoreWait: addWait(n, Source::Kind::ReadB); break;
      case Op::SemaphoreAcquire: addSemaphore(n, (o.constant & 15U) | 16U); break;
      case Op::SemaphoreRelease: addSemaphore(n, o.constant & 15U); break;
      case Op::MutexAcquire:
        // Acquiring the mutex requires an ALU operation. It was observed that a read without an ALU
        // operation does not acquire the mutex.
        makeMove(n);
        n.a = {Source::Kind::ReadEither, address::kMutex};
        n.exclusive = kUnitAccess | kVpmAccess;
        push(n);
        break;
      case Op::MutexRelease:
        makeMove(n);
        n.a = {Source::Kind::Small, 0};
        n.address = address::kMutex;
        n.exclusive = kUnitAccess | kVpmAccess;
        push(n);
        break;
      case Op::HostInterrupt:
        makeMove(n);
        n.a = {Source::Kind::Small, 1};
        n.address = address::kHostInterrupt;
        push(n);
        break;
    }
  }

  static void allowBothPipes(Node& n, isa::MulOp mul) {
    n.pipes = kAddPipe | kMulPipe;
    n.mul = mul;
  }
  static void allowBothPipes(Node& n, isa::AddOp add) {
    n.pipes = kAddPipe | kMulPipe;
    n.add = add;
  }

  void addLoad(Node& n, const Operation& o) {
    const auto code = isa::smallImmediateCode(o.constant);
    if (code) {
      makeMove(n);
      n.a = {Source::Kind::Small, *code};
    } else {
      n.form = Node::Form::Load;
      n.constant = o.constant;
    }
    pushPlain(n, o);
  }

  void addPerElement(Node& n, const Operation& o) {
    n.form = Node::Form::LoadUnsigned;
    n.constant = o.constant;
    pushPlain(n, o);
  }

  void addWait(Node& n, Source::Kind file) {
    n.form = Node::Form::Wait;
    n.a = {file, address::kDmaWait};
    n.exclusive = kVpmAccess;
    push(n);
  }

  void addSemaphore(Node& n, std::uint32_t word) {
    n.form = Node::Form::Semaphore;
    n.constant = word;
    n.exclusive = kUnitAccess;
    push(n);
  }

  void addRotate(Node& n, const Operation& o) {
    n.pipes = kMulPipe;
    n.mul = isa::MulOp::V8Min;
    n.a = source(o.a);
    if (o.b.kind == Operand::Kind::Immediate) {
      n.rotate = static_cast<std::uint8_t>(o.b.value & 15U);
      if (n.rotate == 0) makeMove(n);
    } else {
      Node count;
      count.site = o.site;
      makeMove(count);
      count.a = source(o.b);
      count.address = address::kR5;
      count.files = kToA | kToB;
      count.exclusive = kR5Access;
      count.result = kR5;
      count.target = newValue(Operation::kNone, false);
      definitions_[count.target].node = push(count);
      n.rotate = kRotateByR5;
      n.b = {Source::Kind::Value, count.target};
    }
    pushPlain(n, o);
  }

  void addBroadcast(Node& n, const Operation& o) {
    const std::uint32_t element = o.constant & 15U;
    makeMove(n);
    n.a = source(o.a);
    n.address = address::kR5;
    n.files = kToB;
    n.exclusive = kR5Access;
    if (element != 0) {
      n.pipes = kMulPipe;
      n.rotate = static_cast<std::uint8_t>(16 - element);
      n.quadSource = element < 4;
    }
    pushResult(n, o, kR5);
  }

  void finishValues() {
    for (const Vreg v : context_.live->globals) {
      if (current_[v] == kNone || !context_.live->liveOut(context_.block, v)) continue;
      graph_.values[current_[v]].liveOut = true;
    }
    position_ = block_.operations.size();
    for (const std::uint32_t v : inR4OrR5_) {
      if (!graph_.values[v].liveOut) continue;
      Node n;
      n.site = graph_.nodes[definitions_[v].node].site;
      makeMove(n);
      n.a = {Source::Kind::Value, v};
      n.isLiveOutCopy = true;
      push(n);
    }
    graph_.countReads();
  }

  const BlockContext& context_;
  const Block& block_;
  BlockNodes nodes_;
  Graph& graph_ = nodes_.graph;
  std::vector<Definition>& definitions_ = nodes_.definitions;
  std::vector<std::uint32_t>& positions_ = nodes_.positions;
  std::size_t position_ = 0;
  Vreg pendingTarget_ = Operation::kNone;
  std::vector<char> dead_;
  // Indexed by operation: true if the operation's target is updated before the next write of all
  // its elements.
  std::vector<char> updated_;
  std::vector<std::uint32_t> current_;   // indexed by register: the value that the register holds
  std::vector<std::uint32_t> inR4OrR5_;  // the values that the hardware puts into r4 or r5
};

}  // namespace

BlockNodes buildNodes(const BlockContext& context) { return NodeBuilder(context).run(); }

}  // namespace qpu::compiler
