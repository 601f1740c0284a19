#include "compiler/tmu_requests.hpp"

#include <algorithm>

#include "compiler/liveness.hpp"
#include "compiler/schedule_graph.hpp"

namespace qpu::compiler {

RequestsInFlight findRequestsInFlight(const Function& function) {
  const std::size_t n = function.blocks.size();
  RequestsInFlight result;
  auto& [fewest, most] = result;
  fewest.assign(n, {UINT32_MAX, UINT32_MAX});
  most.assign(n, {0, 0});
  fewest[0] = {0, 0};
  std::vector<std::uint32_t> work{0};
  std::vector<char> queued(n, 0);
  while (!work.empty()) {
    const std::uint32_t b = work.back();
    work.pop_back();
    queued[b] = 0;
    std::array<std::uint32_t, 2> low = fewest[b];
    std::array<std::uint32_t, 2> high = most[b];
    for (const Operation& o : function.blocks[b].operations) {
      const std::size_t u = o.unit & 1U;
      if (o.op == Op::TmuRequest) {
        ++low[u];
        high[u] = std::min(high[u] + 1, kTmuDepth);
      }
      if (o.op == Op::TmuReceive) {
        low[u] -= low[u] > 0 ? 1 : 0;
        high[u] -= high[u] > 0 ? 1 : 0;
      }
    }
    for (const std::uint32_t s : successors(function.blocks[b])) {
      bool changed = false;
      for (std::size_t u = 0; u < 2; ++u) {
        changed |= low[u] < fewest[s][u] || high[u] > most[s][u];
        fewest[s][u] = std::min(fewest[s][u], low[u]);
        most[s][u] = std::max(most[s][u], high[u]);
      }
      if (!changed || queued[s] != 0) continue;
      queued[s] = 1;
      work.push_back(s);
    }
  }
  return result;
}

}  // namespace qpu::compiler
