// The state that the parts of the lowering pass share.
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

  // Returns true if the kernel must count its outstanding gathers at run time.
  bool countsGathers() const { return facts.gathers && !gathers.endIsKnown; }

  const detail::Source& source;
  const bool optimise;
  // If true, stores to adjacent addresses are merged into one DMA transfer.
  const bool mergesStores;
  const detail::GatherPlan gathers;
  const KernelFacts facts;
  ir::Graph graph;
  IrBuilder builder;
  std::vector<ir::Value> environment;  // the current value of each variable; the hidden variables come last
  ir::Value qpuCount = ir::kNone;
  std::uint32_t site = code::Object::kNoSite;
};

}  // namespace qpu::compiler

#endif
