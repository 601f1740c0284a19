#include "compiler/schedule_graph.hpp"

#include <algorithm>

#include "compiler/schedule_nodes.hpp"
#include "isa/access.hpp"

namespace qpu::compiler {
namespace {

namespace address = isa::address;

// Computes the length of the critical path from each node to the end of the block. `ofRequest` is
// a lower bound for the length of the path from a TMU request.
void findHeights(Graph& graph, std::int32_t ofRequest) {
  // Every edge leads to a later node, so the nodes are in topological order.
  for (std::size_t i = graph.nodes.size(); i-- > 0;) {
    Node& n = graph.nodes[i];
    std::int32_t height = 1;
    if (graph.branches && i == graph.lastFlags) height = 5;
    if (isRequest(n)) height = std::max(height, ofRequest);
    for (const Edge& edge : graph.edgesOf(static_cast<std::uint32_t>(i)))
      height = std::max(height, graph.nodes[edge.to].height + edge.latency);
    n.height = height;
  }
}

// If the only use of an operation's result is a write to an I/O address, combines the operation
// with the write.
class Fusion {
 public:
  explicit Fusion(BlockNodes& nodes)
      : graph_(nodes.graph), positions_(nodes.positions), definitions_(nodes.definitions) {}

  void run() {
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
      if (!plain || !isUnchanged(m.a, positions_[i]) || !isUnchanged(m.b, positions_[i])) continue;
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
    graph_.countReads();
  }

 private:
  bool isUnchanged(const Source& s, std::uint32_t position) const {
    return !s.isValue() || definitions_[s.number].end >= position;
  }

  Graph& graph_;
  const std::vector<std::uint32_t>& positions_;
  const std::vector<Definition>& definitions_;
};

}  // namespace

void Graph::countReads() {
  for (Value& v : values) v.reads = v.rotations = 0;
  for (const Node& n : nodes) {
    const auto count = [&](const Source& s) {
      Value& v = values[s.number];
      ++v.reads;
      if (n.rotate != 0 && !n.quadSource && &s == &n.a) ++v.rotations;
    };
    if (n.a.isValue()) count(n.a);
    if (n.b.isValue() && !(n.a.isValue() && n.a.number == n.b.number)) count(n.b);
  }
}

Graph buildGraph(const BlockContext& context) {
  BlockNodes nodes = buildNodes(context);
  if (context.fuse) Fusion(nodes).run();
  addEdges(context, nodes);
  Graph graph = std::move(nodes.graph);
  graph.branches = context.function->blocks[context.block].exit == Block::Exit::Branch;
  findHeights(graph, 1);
  return graph;
}

bool isRequest(const Node& node) { return node.target == kNone && isa::isTmuStart(node.address); }

void prioritiseRequests(Graph& graph) { findHeights(graph, 1 + kTmuLatency); }

}  // namespace qpu::compiler
