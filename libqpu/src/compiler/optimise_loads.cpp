#include <utility>

#include "compiler/optimise.hpp"

namespace qpu::compiler {

using ir::Graph;
using ir::Instruction;
using ir::Kind;
using ir::kNone;
using ir::Value;
using isa::AddOp;

void lowerLoads(Graph& graph, const std::vector<Stride>& known) {
  Value offsets = kNone;  // the byte offsets 0, 4, .., 60 of the elements
  std::vector<Value> prologue;
  const auto add = [&graph](Instruction i, const Instruction& at) {
    i.block = at.block;
    i.site = at.site;
    graph.values.push_back(i);
    return static_cast<Value>(graph.values.size() - 1);
  };
  for (std::uint32_t b = 0; b < graph.blocks.size(); ++b) {
    std::vector<Value> body;
    const std::vector<Value> old = graph.blocks[b].body;
    for (const Value v : old) {
      const Instruction load = graph.values[v];
      if (load.kind != Kind::Load) {
        body.push_back(v);
        continue;
      }
      const Stride stride = load.a < known.size() ? known[load.a] : Stride{};
      Value address = load.a;
      if (!stride.known || stride.step != 4) {
        if (offsets == kNone) {
          Instruction entry;
          entry.block = 0;
          Instruction element;
          element.kind = Kind::Element;
          prologue.push_back(add(element, entry));
          Instruction two;
          two.kind = Kind::Constant;
          two.bits = 2;
          Instruction shift;
          shift.kind = Kind::Alu;
          shift.add = AddOp::Shl;
          shift.a = prologue.back();
          shift.b = add(two, {});
          offsets = add(shift, entry);
          prologue.push_back(offsets);
        }
        if (!stride.known || stride.step != 0) {
          Instruction broadcast;
          broadcast.kind = Kind::Broadcast;
          broadcast.a = address;
          address = add(broadcast, load);
          body.push_back(address);
        }
        Instruction sum;
        sum.kind = Kind::Alu;
        sum.add = AddOp::Add;
        sum.a = address;
        sum.b = offsets;
        address = add(sum, load);
        body.push_back(address);
      }
      const std::uint8_t unit = load.unit;
      Instruction request;
      request.kind = Kind::Effect;
      request.op = Op::TmuRequest;
      request.unit = unit;
      request.a = address;
      body.push_back(add(request, load));
      Instruction& receive = graph.values[v];
      receive.kind = Kind::Effect;
      receive.op = Op::TmuReceive;
      receive.unit = unit;
      receive.a = kNone;
      body.push_back(v);
    }
    graph.blocks[b].body = std::move(body);
  }
  std::vector<Value>& entry = graph.blocks[0].body;
  entry.insert(entry.begin(), prologue.begin(), prologue.end());
}

}  // namespace qpu::compiler
