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
  std::string missing;  // why there is no value, else ""
  int measurement = 0;  // 1..10
  double spread = 0;    // worst of the measurement's repeats
};

constexpr int kMeasurements = 10;
// What measurement 1..10 is about.
const char* title(int measurement);

// All of them, in order; `before` is called with the number of each. Throws
// std::runtime_error when a program fails.
std::vector<Measured> measureAll(Bench& bench, const std::function<void(int)>& before);

}  // namespace qpu::calibrate

#endif
