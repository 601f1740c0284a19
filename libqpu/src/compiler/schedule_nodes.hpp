// The two parts of buildGraph(): one part creates nodes for a block's operations, and the other
// part adds the dependences between the nodes.
#ifndef QPU_SRC_COMPILER_SCHEDULE_NODES_HPP
#define QPU_SRC_COMPILER_SCHEDULE_NODES_HPP

#include <cstdint>
#include <vector>

#include "compiler/schedule_graph.hpp"

namespace qpu::compiler {

struct Definition {
  std::uint32_t node = kNone;
  std::uint32_t end = UINT32_MAX;  // position of the operation that next writes the register
};

struct BlockNodes {
  Graph graph;                           // the graph without its edges
  std::vector<std::uint32_t> positions;  // indexed by node: the operation's position, or kNone
  std::vector<Definition> definitions;   // indexed by value
  std::uint32_t noSwap = kNone;          // the node that sets TMU_NOSWAP
};

BlockNodes buildNodes(const BlockContext& context);

void addEdges(const BlockContext& context, BlockNodes& nodes);

}  // namespace qpu::compiler

#endif
