#include "compiler/schedule_graph.hpp"

#include <algorithm>
#include <stdexcept>

#include "compiler/spill.hpp"
#include "isa/access.hpp"

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

struct LooseEdge {
  std::uint32_t from, to;
  std::int32_t latency;
};

// `ofRequest`: the least height of a request of a TMU.
void findHeights(Graph& graph, std::int32_t ofRequest) {
  // Nodes after the operations come last, so that a topological order is
  // needed only where edges go back: from homecomings, which have no
  // successors but those after the old tenant.
  for (std::size_t i = graph.nodes.size(); i-- > 0;) {
    Node& n = graph.nodes[i];
    std::int32_t height = 1;
    if (graph.branches && i == graph.lastFlags) height = 5;
    if (isRequest(n)) height = std::max(height, ofRequest);
    for (std::uint32_t e = graph.firstEdge[i]; e < graph.firstEdge[i + 1]; ++e)
      height = std::max(height, graph.nodes[graph.edges[e].to].height + graph.edges[e].latency);
    n.height = height;
  }
}

class Builder {
 public:
  explicit Builder(const BlockContext& context)
      : context_(context),
        block_(context.function->blocks[context.block]),
        current_(context.function->registers, kNone) {}

  Graph build() {
    findDead();
    graph_.nodes.reserve(block_.operations.size() * 5 / 4 + 8);
    graph_.values.reserve(block_.operations.size() + 16);
    loose_.reserve(block_.operations.size() * 4);
    if (context_.setNoSwap) addNoSwap();
    for (position_ = 0; position_ < block_.operations.size(); ++position_)
      if (dead_[position_] == 0) addOperation(block_.operations[position_]);
    finishValues();
    if (context_.fuse) fuse();
    connect();
    graph_.branches = block_.exit == Block::Exit::Branch;
    findHeights(graph_, 1);
    return std::move(graph_);
  }

 private:
  struct Track {                        // what the edges need to know of a value
    std::uint32_t writer = kNone;       // last node that wrote it
    std::vector<std::uint32_t> readers; // since then
  };
  struct Definition {
    std::uint32_t node = kNone;
    std::uint32_t endsAt = UINT32_MAX;  // position of the next write of its register
  };

  void findDead() {
    const auto& operations = block_.operations;
    dead_.assign(operations.size(), 0);
    std::vector<char> wanted(context_.function->registers, 0);
    for (std::size_t g = 0; g < context_.live->globals.size(); ++g)
      if (context_.live->out[context_.block].has(g)) wanted[context_.live->globals[g]] = 1;
    updated_.assign(operations.size(), 0);
    std::vector<char> updatedLater(context_.function->registers, 0);
    for (std::size_t i = operations.size(); i-- > 0;) {
      const Operation& o = operations[i];
      const bool writes = o.target != Operation::kNone;
      if (isPure(o) && (!writes || wanted[o.target] == 0)) {
        dead_[i] = 1;
        continue;
      }
      if (writes) {
        if (isUpdate(o)) {
          updatedLater[o.target] = 1;
        } else {
          wanted[o.target] = 0;
          updated_[i] = updatedLater[o.target];
          updatedLater[o.target] = 0;
        }
      }
      forEachRead(o, [&](Vreg v) { wanted[v] = 1; });
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
    track_.emplace_back();
    definitions_.emplace_back();
    return id;
  }

  std::uint32_t valueOf(Vreg v) {
    if (current_[v] == kNone) current_[v] = newValue(v, true);
    return current_[v];
  }

  void endValue(Vreg v) {
    if (current_[v] != kNone)
      definitions_[current_[v]].endsAt =
          std::min(definitions_[current_[v]].endsAt, static_cast<std::uint32_t>(position_));
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

  static Node blank(const Operation& o) {
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

  // The node writes the target of `o`.
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
    definitions_[value].endsAt =
        std::min(definitions_[value].endsAt, static_cast<std::uint32_t>(position_));
  }

  // Results in r4 and r5 that must be elsewhere at once go through a value of
  // their own.
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
      throughR_.push_back(n.target);
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
    noSwap_ = push(n);
    positions_[noSwap_] = kNone;
  }

  void addOperation(const Operation& o) {
    Node n = blank(o);
    switch (o.op) {
      case Op::Add:
        n.pipes = kAddPipe;
        n.add = o.add;
        if (!o.setsFlags && o.add == isa::AddOp::V8AddS) flexible(n, isa::MulOp::V8AddS);
        if (!o.setsFlags && o.add == isa::AddOp::V8SubS) flexible(n, isa::MulOp::V8SubS);
        n.a = source(o.a);
        n.b = source(o.b);
        pushPlain(n, o);
        break;
      case Op::Mul:
        n.pipes = kMulPipe;
        n.mul = o.mul;
        if (o.mul == isa::MulOp::V8AddS) flexible(n, isa::AddOp::V8AddS);
        if (o.mul == isa::MulOp::V8SubS) flexible(n, isa::AddOp::V8SubS);
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
        // With an ALU operation: a bare read was seen not to take the mutex.
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

  static void flexible(Node& n, isa::MulOp mul) {
    n.pipes = kAddPipe | kMulPipe;
    n.mul = mul;
  }
  static void flexible(Node& n, isa::AddOp add) {
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
    for (const std::uint32_t v : throughR_) {
      if (!graph_.values[v].liveOut) continue;
      Node n;
      n.site = graph_.nodes[definitions_[v].node].site;
      makeMove(n);
      n.a = {Source::Kind::Value, v};
      n.homecoming = true;
      push(n);
    }
    for (const Node& n : graph_.nodes) countReads(n, 1);
  }

  void countReads(const Node& n, int by) {
    const auto count = [&](const Source& s) {
      Value& v = graph_.values[s.number];
      v.reads = static_cast<std::uint32_t>(static_cast<int>(v.reads) + by);
      if (n.rotate != 0 && !n.quadSource && &s == &n.a)
        v.rotations = static_cast<std::uint32_t>(static_cast<int>(v.rotations) + by);
    };
    if (n.a.isValue()) count(n.a);
    if (n.b.isValue() && !(n.a.isValue() && n.a.number == n.b.number)) count(n.b);
  }

  // A vector whose one use is to be written to an I/O address is computed right
  // into it.
  void fuse() {
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
      Node& n = graph_.nodes[i];
      const bool writes = n.address != address::kNop && n.address != address::kR5 && n.rotate == 0;
      if (!writes || n.form != Node::Form::Alu || !n.a.isValue()) continue;
      const Value& v = graph_.values[n.a.number];
      const std::uint32_t d = definitions_[n.a.number].node;
      if (d == kNone || v.reads != 1 || v.liveOut || v.liveIn || v.updates != 0) continue;
      Node& m = graph_.nodes[d];
      const bool plain = (m.form == Node::Form::Alu || m.form == Node::Form::Load ||
                          m.form == Node::Form::LoadUnsigned) &&
                         m.rotate == 0 && !m.setsFlags && m.cond == isa::Cond::Always && m.result == kNowhere &&
                         m.exclusive == 0 && m.a.kind != Source::Kind::ReadEither;
      if (!plain || !lasts(m.a, positions_[i]) || !lasts(m.b, positions_[i])) continue;
      n.form = m.form;
      n.pipes = m.pipes;
      n.add = m.add;
      n.mul = m.mul;
      n.a = m.a;
      n.b = m.b;
      n.constant = m.constant;
      m.removed = true;
      m.target = kNone;
      m.a = m.b = {};
    }
    for (Value& v : graph_.values) v.reads = v.rotations = 0;
    for (const Node& n : graph_.nodes) countReads(n, 1);
  }
  bool lasts(const Source& s, std::uint32_t position) const {
    return !s.isValue() || definitions_[s.number].endsAt >= position;
  }

  void edge(std::uint32_t from, std::uint32_t to, std::int32_t latency) {
    if (from == kNone || from == to) return;
    loose_.push_back({from, to, latency});
  }

  void connect() {
    for (std::uint32_t i = 0; i < graph_.nodes.size(); ++i) {
      const Node& n = graph_.nodes[i];
      if (n.removed || n.homecoming) continue;
      connectValues(i, n);
      connectFlags(i, n);
      const std::uint32_t at = positions_[i];
      if (i == noSwap_) {
        for (std::uint32_t& r : lastRequest_) r = i;
      } else if (at != kNone) {
        connectEffects(i, n, block_.operations[at]);
      }
    }
    for (std::uint32_t i = 0; i < graph_.nodes.size(); ++i)
      if (graph_.nodes[i].homecoming) connectHomecoming(i);
    sortEdges();
  }

  void connectValues(std::uint32_t i, const Node& n) {
    const auto read = [&](const Source& s) {
      if (!s.isValue()) return;
      Track& t = track_[s.number];
      edge(t.writer, i, resultLatency(t.writer));
      t.readers.push_back(i);
    };
    // The amount of a rotation stays in r5, so it comes after the vector.
    if (n.rotate == kRotateByR5 && n.a.isValue())
      edge(track_[n.a.number].writer, definitions_[n.b.number].node, 1);
    read(n.a);
    if (!(n.b.isValue() && n.a.isValue() && n.b.number == n.a.number)) read(n.b);
    if (n.target == kNone) return;
    Track& t = track_[n.target];
    const Value& v = graph_.values[n.target];
    if (definitions_[n.target].node != i) {
      edge(t.writer, i, resultLatency(t.writer));
    } else if (v.liveOut && v.home != kNowhere && n.result == kNowhere) {
      afterOldTenant(i, n.target);
    }
    for (const std::uint32_t r : t.readers) edge(r, i, 0);
    t.readers.clear();
    t.writer = i;
  }

  // The vector that entered the block in the register must have been read.
  void afterOldTenant(std::uint32_t i, std::uint32_t value) {
    const std::uint32_t old = entrant(graph_.values[value].vreg);
    if (old == kNone) return;
    edge(track_[old].writer, i, 1);
    for (const std::uint32_t r : track_[old].readers) edge(r, i, 0);
  }
  std::uint32_t entrant(Vreg v) {
    if (entrants_.empty()) {
      entrants_.assign(context_.function->registers, kNone);
      for (std::uint32_t k = 0; k < graph_.values.size(); ++k)
        if (graph_.values[k].liveIn) entrants_[graph_.values[k].vreg] = k;
    }
    return v == Operation::kNone ? kNone : entrants_[v];
  }
  void connectHomecoming(std::uint32_t i) {
    const std::uint32_t value = graph_.nodes[i].a.number;
    edge(track_[value].writer, i, resultLatency(track_[value].writer));
    afterOldTenant(i, value);
  }

  std::int32_t resultLatency(std::uint32_t writer) const {
    if (writer == kNone) return 1;
    const Node& w = graph_.nodes[writer];
    if (w.result == kR4 && w.form != Node::Form::Receive) return kSfuLatency;
    return 1;
  }

  void connectFlags(std::uint32_t i, const Node& n) {
    const bool reads = n.cond != isa::Cond::Always && n.cond != isa::Cond::Never;
    if (reads) {
      edge(graph_.lastFlags, i, 1);
      flagReaders_.push_back(i);
    }
    if (!n.setsFlags) return;
    edge(graph_.lastFlags, i, 1);
    for (const std::uint32_t r : flagReaders_) edge(r, i, 0);
    flagReaders_.clear();
    graph_.lastFlags = i;
  }

  void connectEffects(std::uint32_t i, const Node& n, const Operation& o) {
    // Spills share one row of the VPM, so one ends before the next begins.
    if (o.unit == kSpillUnit && (n.exclusive & kVpmAccess) != 0 &&
        n.form != Node::Form::Receive) {
      edge(spill_, i, 1);
      spill_ = i;
    }
    switch (o.op) {
      case Op::Uniform:
        edge(uniform_, i, 1);
        uniform_ = i;
        break;
      case Op::TmuRequest: {
        const std::size_t u = n.unit;
        edge(lastRequest_[u], i, lastRequest_[u] != kNone && lastRequest_[u] == noSwap_ ? kNoSwapLatency : 1);
        edge(barrier_, i, 1);
        edge(storeOfKernel_, i, 1);
        lastRequest_[u] = i;
        const std::size_t need = requests_[u].size() + context_.mostInFlight[u] + 1;
        requests_[u].push_back(i);
        if (need > kTmuDepth) {
          const std::size_t r = need - kTmuDepth - 1;
          if (r < receives_[u].size()) edge(receives_[u][r], i, 1);
        }
        break;
      }
      case Op::TmuReceive: {
        const std::size_t u = n.unit;
        edge(lastReceive_[u], i, 1);
        edge(barrier_, i, 1);
        lastReceive_[u] = i;
        const std::size_t k = receives_[u].size();
        receives_[u].push_back(i);
        const std::size_t before = context_.fewestInFlight[u];
        if (k >= before && k - before < requests_[u].size())
          edge(requests_[u][k - before], i, kTmuLatency);
        break;
      }
      case Op::VpmReadSetup:
      case Op::VpmRead:
      case Op::DmaLoadStart:
      case Op::DmaLoadWait: {
        const std::uint8_t before =
            readSide_ == kNone ? address::kNop : graph_.nodes[readSide_].address;
        edge(readSide_, i,
             o.op == Op::VpmRead && before == address::kVpmSetup         ? kVpmReadLatency
             : o.op == Op::DmaLoadWait && before == address::kDmaAddress ? kDmaLoadSetup + kDmaLoadRow
                                                                         : 1);
        edge(barrier_, i, 1);
        if (o.op == Op::DmaLoadStart) edge(store_, i, 1);
        // What is read may be what was written just before, and the other way round.
        if (o.unit != kSpillUnit && context_.function->usesVpmByHand) {
          edge(writeOfKernel_, i, 1);
          readOfKernel_ = i;
        }
        if (o.op == Op::DmaLoadStart) loadStart_ = i;
        readSide_ = i;
        break;
      }
      case Op::VpmWriteSetup:
      case Op::VpmWrite:
      case Op::DmaStoreStart:
      case Op::DmaStoreWait:
        edge(writeSide_, i,
             o.op == Op::DmaStoreWait && writeSide_ != kNone &&
                     graph_.nodes[writeSide_].address == address::kDmaAddress
                 ? kDmaStoreSetup + kDmaStoreRow
                 : 1);
        edge(barrier_, i, 1);
        writeSide_ = i;
        if (o.unit != kSpillUnit && context_.function->usesVpmByHand) {
          edge(readOfKernel_, i, 1);
          writeOfKernel_ = i;
        }
        if (o.op == Op::DmaStoreStart || o.op == Op::DmaStoreWait) {
          if (o.unit != kSpillUnit) {
            edge(lastRequest_[0], i, 1);
            edge(lastRequest_[1], i, 1);
            storeOfKernel_ = i;
          }
          edge(loadStart_, i, 1);
          store_ = i;
        }
        break;
      case Op::SemaphoreAcquire:
      case Op::SemaphoreRelease:
      case Op::MutexAcquire:
      case Op::MutexRelease:
      case Op::HostInterrupt:
        for (const std::uint32_t last :
             {lastRequest_[0], lastRequest_[1], lastReceive_[0], lastReceive_[1], readSide_,
              writeSide_, barrier_})
          edge(last, i, 1);
        barrier_ = i;
        break;
      default: break;
    }
  }

  void sortEdges() {
    const std::size_t n = graph_.nodes.size();
    graph_.firstEdge.assign(n + 1, 0);
    for (const LooseEdge& e : loose_) ++graph_.firstEdge[e.from + 1];
    for (std::size_t i = 0; i < n; ++i) graph_.firstEdge[i + 1] += graph_.firstEdge[i];
    graph_.edges.resize(loose_.size());
    std::vector<std::uint32_t> next(graph_.firstEdge.begin(), graph_.firstEdge.end() - 1);
    for (const LooseEdge& e : loose_) {
      graph_.edges[next[e.from]++] = {e.to, e.latency};
      ++graph_.nodes[e.to].waitsFor;
    }
    std::uint32_t at = 0;
    for (Value& v : graph_.values) {
      v.firstUse = at;
      at += v.reads;
    }
    graph_.users.resize(at);
    for (std::uint32_t i = 0; i < n; ++i) {
      const Node& m = graph_.nodes[i];
      const auto use = [&](const Source& s) {
        Value& v = graph_.values[s.number];
        graph_.users[v.firstUse + v.uses++] = i;
      };
      if (m.a.isValue()) use(m.a);
      if (m.b.isValue() && !(m.a.isValue() && m.a.number == m.b.number)) use(m.b);
    }
  }

  const BlockContext& context_;
  const Block& block_;
  Graph graph_;
  std::size_t position_ = 0;
  Vreg pendingTarget_ = Operation::kNone;
  std::uint32_t noSwap_ = kNone;
  std::vector<char> dead_;
  std::vector<char> updated_;               // the target is updated before it is written anew
  std::vector<std::uint32_t> current_;      // value of each register
  std::vector<Definition> definitions_;     // by value
  std::vector<Track> track_;                // by value
  std::vector<std::uint32_t> throughR_;     // values that come out in r4 or r5
  std::vector<std::uint32_t> positions_;    // of the operation of each node
  std::vector<std::uint32_t> entrants_;
  std::vector<LooseEdge> loose_;
  std::vector<std::uint32_t> flagReaders_;
  std::array<std::vector<std::uint32_t>, 2> requests_, receives_;
  std::array<std::uint32_t, 2> lastRequest_{kNone, kNone}, lastReceive_{kNone, kNone};
  std::uint32_t uniform_ = kNone, readSide_ = kNone, writeSide_ = kNone, store_ = kNone,
                storeOfKernel_ = kNone, readOfKernel_ = kNone, writeOfKernel_ = kNone,
                loadStart_ = kNone, barrier_ = kNone, spill_ = kNone;
};

}  // namespace

Graph buildGraph(const BlockContext& context) { return Builder(context).build(); }

bool isRequest(const Node& node) { return node.target == kNone && isa::isTmuStart(node.address); }

void hurryRequests(Graph& graph) { findHeights(graph, 1 + kTmuLatency); }

}  // namespace qpu::compiler
