// Schedules a block in several ways and chooses the best schedule.
#ifndef QPU_SRC_COMPILER_SCHEDULE_SEARCH_HPP
#define QPU_SRC_COMPILER_SCHEDULE_SEARCH_HPP

#include <cstdint>
#include <optional>
#include <vector>

#include "compiler/schedule_estimate.hpp"
#include "compiler/tmu_requests.hpp"

namespace qpu::compiler {

class ScheduleSearch {
 public:
  ScheduleSearch(const Function& function, const Options& options, const Liveness& live,
                 const std::vector<Place>& homes)
      : function_(function), options_(options), live_(live), homes_(homes),
        inFlight_(findRequestsInFlight(function)) {}

  // Returns the best schedule that was found, or std::nullopt if there are not enough registers.
  // `unreadable` contains the registers that the instruction before the block may write.
  std::optional<ScheduledBlock> run(std::uint32_t b, std::uint64_t unreadable) const;

  Surroundings surroundings(std::uint32_t b) const {
    return {inFlight_.fewest[b], function_.blocks[b].loopDepth > 0, isLoop(b)};
  }

 private:
  std::uint64_t homesOf(const Bits& globals) const;
  bool readsVpmOften(std::uint32_t b) const;
  bool isLoop(std::uint32_t b) const;
  std::ptrdiff_t requestsOf(std::uint32_t b) const;
  void reduceStalls(const Graph& graph, ScheduleOptions options, ScheduledBlock& best, std::uint32_t b) const;

  const Function& function_;
  const Options& options_;
  const Liveness& live_;
  const std::vector<Place>& homes_;
  RequestsInFlight inFlight_;
};

}  // namespace qpu::compiler

#endif
