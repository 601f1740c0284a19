#include "compiler/lower_blocks.hpp"

#include <algorithm>

namespace qpu::compiler {

using ir::kNone;
using ir::Value;

std::uint32_t BlockBuilder::newBlock() {
  c_.graph.blocks.emplace_back();
  return static_cast<std::uint32_t>(c_.graph.blocks.size() - 1);
}

void BlockBuilder::place(std::uint32_t b) {
  order_.push_back(b);
  c_.graph.blocks[b].loop = loop_;
  c_.builder.at(b);
}

void BlockBuilder::jump(std::uint32_t to) {
  ir::Block& b = c_.graph.blocks[c_.builder.block()];
  b.exit = ir::Block::Exit::Jump;
  b.next = to;
  c_.graph.blocks[to].preds.push_back(c_.builder.block());
}

void BlockBuilder::branch(Value mask, bool all, std::uint32_t yes, std::uint32_t no) {
  ir::Block& b = c_.graph.blocks[c_.builder.block()];
  b.exit = ir::Block::Exit::Branch;
  b.condition = mask;
  b.all = all;
  b.taken = yes;
  b.next = no;
  b.site = c_.site;
  c_.graph.blocks[yes].preds.push_back(c_.builder.block());
  c_.graph.blocks[no].preds.push_back(c_.builder.block());
}

void BlockBuilder::merge(const std::vector<std::uint32_t>& variables, std::size_t count,
           const std::vector<Value>& first, const std::vector<Value>& second) {
  const std::uint32_t b = c_.builder.block();
  const std::size_t predecessors = c_.graph.blocks[b].preds.size();
  for (std::size_t i = 0; i < variables.size(); ++i) {
    Value& v = c_.environment[variables[i]];
    if (count == 0 || count == predecessors || first[i] == second[i]) {
      v = count == 0 ? second[i] : first[i];
      continue;
    }
    v = c_.builder.phi(b);
    std::vector<Value>& arguments = c_.graph.arguments(v);
    arguments.assign(predecessors, second[i]);
    std::fill_n(arguments.begin(), count, first[i]);
  }
}

std::vector<Value> BlockBuilder::valuesOf(const std::vector<std::uint32_t>& variables) const {
  std::vector<Value> values(variables.size());
  for (std::size_t i = 0; i < variables.size(); ++i) values[i] = c_.environment[variables[i]];
  return values;
}

void BlockBuilder::restore(const std::vector<std::uint32_t>& variables, const std::vector<Value>& values) {
  for (std::size_t i = 0; i < variables.size(); ++i) c_.environment[variables[i]] = values[i];
}

void BlockBuilder::number() {
  std::vector<std::uint32_t> to(c_.graph.blocks.size(), kNone);
  for (std::uint32_t i = 0; i < order_.size(); ++i) to[order_[i]] = i;
  std::vector<ir::Block> blocks;
  blocks.reserve(order_.size());
  const auto renumber = [&to](std::uint32_t& b) {
    if (b != kNone) b = to[b];
  };
  for (const std::uint32_t b : order_) blocks.push_back(std::move(c_.graph.blocks[b]));
  for (ir::Block& b : blocks) {
    renumber(b.taken);
    renumber(b.next);
    for (std::uint32_t& p : b.preds) renumber(p);
  }
  c_.graph.blocks = std::move(blocks);
  for (ir::Instruction& i : c_.graph.values) renumber(i.block);
  for (ir::Loop& l : c_.graph.loops) {
    renumber(l.preheader);
    renumber(l.header);
    renumber(l.last);
  }
}


std::uint32_t BlockBuilder::beginLoop(const ir::Loop& loop) {
  const std::uint32_t outer = loop_;
  loop_ = static_cast<std::uint32_t>(c_.graph.loops.size());
  c_.graph.loops.push_back(loop);
  return outer;
}

}  // namespace qpu::compiler
