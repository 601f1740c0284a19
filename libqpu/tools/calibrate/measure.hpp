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
  double value = 0;     // in the unit of the parameter
  std::string missing;  // the reason why the value is missing, or "" if there is a value
  int measurement = 0;  // 1..10
  double spread = 0;    // largest spread of the repetitions in this measurement
};

constexpr int kMeasurements = 10;
// Returns the title of a measurement. The measurements have the numbers 1..10.
const char* title(int measurement);

// Runs all measurements in order. Before each measurement, calls `before` with the measurement's
// number. Throws std::runtime_error if a program fails.
std::vector<Measured> measureAll(Bench& bench, const std::function<void(int)>& before);

}  // namespace qpu::calibrate

#endif
