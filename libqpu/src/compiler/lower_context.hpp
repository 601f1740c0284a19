// State that the parts of lowering share.
#ifndef QPU_SRC_COMPILER_LOWER_CONTEXT_HPP
#define QPU_SRC_COMPILER_LOWER_CONTEXT_HPP

#include <cstdint>
#include <vector>

#include "compiler/compile.hpp"
#include "compiler/ir_builder.hpp"
#include "compiler/lower_facts.hpp"
#include "lang/gathers.hpp"

namespace qpu::compiler {

struct LowerContext {
  LowerContext(const detail::Source& kernel, const Options& options, bool mergeStores)
      : source(kernel), optimise(options.level > 0), mergesStores(mergeStores),
        gathers(detail::planGathers(kernel)), facts(findFacts(kernel)), builder(graph, optimise) {}

  ir::Value& hidden(Hidden h) { return environment[source.variables.size() + static_cast<std::size_t>(h)]; }

  // Whether the kernel counts its outstanding gathers at run time.
  bool countsGathers() const { return facts.gathers && !gathers.endIsKnown; }

  const detail::Source& source;
  const bool optimise;
  const bool mergesStores;  // stores to adjacent addresses become one DMA transfer
  const detail::GatherPlan gathers;
  const KernelFacts facts;
  ir::Graph graph;
  IrBuilder builder;
  std::vector<ir::Value> environment;  // current value of each variable; hidden ones last
  ir::Value qpuCount = ir::kNone;
  std::uint32_t site = code::Object::kNoSite;
};

}  // namespace qpu::compiler

#endif
