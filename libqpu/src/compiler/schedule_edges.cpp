#include <algorithm>

#include "compiler/schedule_nodes.hpp"
#include "compiler/spill.hpp"
#include "isa/access.hpp"

namespace qpu::compiler {
namespace {

namespace address = isa::address;

struct LooseEdge {
  std::uint32_t from, to;
  std::int32_t latency;
};

class EdgeBuilder {
 public:
  EdgeBuilder(const BlockContext& context, BlockNodes& nodes)
      : context_(context), block_(context.function->blocks[context.block]), graph_(nodes.graph),
        positions_(nodes.positions), definitions_(nodes.definitions), noSwap_(nodes.noSwap),
        accesses_(nodes.graph.values.size()) {
    loose_.reserve(block_.operations.size() * 4);
  }

  void run() {
    for (std::uint32_t i = 0; i < graph_.nodes.size(); ++i) {
      const Node& n = graph_.nodes[i];
      if (n.removed || n.isLiveOutCopy) continue;
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
      if (graph_.nodes[i].isLiveOutCopy) connectLiveOutCopy(i);
    sortEdges();
  }

 private:
  struct Accesses {
    std::uint32_t writer = kNone;        // the last node that wrote the value
    std::vector<std::uint32_t> readers;  // the nodes that have read the value since then
  };

  void edge(std::uint32_t from, std::uint32_t to, std::int32_t latency) {
    if (from == kNone || from == to) return;
    loose_.push_back({from, to, latency});
  }

  void connectValues(std::uint32_t i, const Node& n) {
    const auto read = [&](const Source& s) {
      if (!s.isValue()) return;
      Accesses& t = accesses_[s.number];
      edge(t.writer, i, resultLatency(t.writer));
      t.readers.push_back(i);
    };
    // The rotation amount occupies r5, so it is computed after the vector that is rotated.
    if (n.rotate == kRotateByR5 && n.a.isValue())
      edge(accesses_[n.a.number].writer, definitions_[n.b.number].node, 1);
    read(n.a);
    if (!(n.b.isValue() && n.a.isValue() && n.b.number == n.a.number)) read(n.b);
    if (n.target == kNone) return;
    Accesses& t = accesses_[n.target];
    const Value& v = graph_.values[n.target];
    if (definitions_[n.target].node != i) {
      edge(t.writer, i, resultLatency(t.writer));
    } else if (v.liveOut && v.home != kNowhere && n.result == kNowhere) {
      afterLiveInReads(i, n.target);
    }
    for (const std::uint32_t r : t.readers) edge(r, i, 0);
    t.readers.clear();
    t.writer = i;
  }

  // A live-out value is written to its home register only after all reads of the live-in value in
  // that register. Bundler::isTargetFree() enforces this order. These edges give the reads at least
  // the priority of the write.
  void afterLiveInReads(std::uint32_t i, std::uint32_t value) {
    const std::uint32_t old = liveInValue(graph_.values[value].vreg);
    if (old == kNone) return;
    edge(accesses_[old].writer, i, 1);
    for (const std::uint32_t r : accesses_[old].readers) edge(r, i, 0);
  }
  std::uint32_t liveInValue(Vreg v) {
    if (liveInValues_.empty()) {
      liveInValues_.assign(context_.function->registers, kNone);
      for (std::uint32_t k = 0; k < graph_.values.size(); ++k)
        if (graph_.values[k].liveIn) liveInValues_[graph_.values[k].vreg] = k;
    }
    return v == Operation::kNone ? kNone : liveInValues_[v];
  }
  void connectLiveOutCopy(std::uint32_t i) {
    const std::uint32_t value = graph_.nodes[i].a.number;
    edge(accesses_[value].writer, i, resultLatency(accesses_[value].writer));
    afterLiveInReads(i, value);
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
    // All spill operations use the same row of the VPM, so they must stay in order.
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
        // Other operations may be between the setup and the first read.
        if (o.op == Op::VpmRead && readSetup_ != kNone) {
          if (readSetup_ != readSide_) edge(readSetup_, i, kVpmReadLatency);
          readSetup_ = kNone;
        }
        if (o.op == Op::VpmReadSetup) readSetup_ = i;
        edge(barrier_, i, 1);
        if (o.op == Op::DmaLoadStart) edge(store_, i, 1);
        // A kernel that accesses the VPM directly may read data that it has written itself, and
        // overwrite data that it has read.
        if (o.unit != kSpillUnit && context_.function->usesVpmByHand) {
          edge(writeOfKernel_, i, 1);
          readOfKernel_ = i;
        }
        // The engine for loads may be busy with transfers of other QPUs while the engine for
        // stores is idle. A store therefore starts only after the wait for an earlier load.
        if (o.unit != kSpillUnit && (o.op == Op::DmaLoadStart || o.op == Op::DmaLoadWait)) load_ = i;
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
            edge(load_, i, 1);
            storeOfKernel_ = i;
          }
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
      ++graph_.nodes[e.to].predecessors;
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
  Graph& graph_;
  const std::vector<std::uint32_t>& positions_;
  const std::vector<Definition>& definitions_;
  const std::uint32_t noSwap_;
  std::vector<Accesses> accesses_;  // indexed by value
  std::vector<std::uint32_t> liveInValues_;
  std::vector<LooseEdge> loose_;
  std::vector<std::uint32_t> flagReaders_;
  std::array<std::vector<std::uint32_t>, 2> requests_, receives_;
  std::array<std::uint32_t, 2> lastRequest_{kNone, kNone}, lastReceive_{kNone, kNone};
  std::uint32_t uniform_ = kNone, readSide_ = kNone, readSetup_ = kNone, writeSide_ = kNone,
                store_ = kNone, storeOfKernel_ = kNone, readOfKernel_ = kNone,
                writeOfKernel_ = kNone, load_ = kNone, barrier_ = kNone, spill_ = kNone;
};

}  // namespace

void addEdges(const BlockContext& context, BlockNodes& nodes) { EdgeBuilder(context, nodes).run(); }

}  // namespace qpu::compiler
