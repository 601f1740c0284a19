// The ten measurements that determine the parameters of the cycle model.
#ifndef QPU_TOOLS_CALIBRATE_MEASURE_HPP
#define QPU_TOOLS_CALIBRATE_MEASURE_HPP

#include <functional>
#include <string>
#include <vector>

#include "tools/calibrate/bench.hpp"

namespace qpu::calibrate {

struct Measured {
  std::string parameter;
  double value = 0;     // in the parameter's unit
  std::string missing;  // why the value is missing; empty if it is not
  int measurement = 0;  // 1..10
  double spread = 0;    // largest spread among the measurement's repeats
};

constexpr int kMeasurements = 10;
// The title of measurement 1..10.
const char* title(int measurement);

// Runs all measurements in order, and calls `before` with the number of each. Throws
// std::runtime_error if a program fails.
std::vector<Measured> measureAll(Bench& bench, const std::function<void(int)>& before);

}  // namespace qpu::calibrate

#endif
