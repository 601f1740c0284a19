// qpu-calibrate without its main() function, so that tests can call it.
#ifndef QPU_TOOLS_CALIBRATE_CALIBRATE_HPP
#define QPU_TOOLS_CALIBRATE_CALIBRATE_HPP

#include <iosfwd>
#include <string>
#include <vector>

#include "tools/calibrate/measure.hpp"
#include "tools/calibrate/provenance.hpp"

namespace qpu::calibrate {

struct Streams {
  std::ostream& out;
  std::ostream& errors;
};

// Returns the text of a model file for QPU_MODEL.
std::string modelFile(const Provenance& from, const std::vector<Measured>& all);

// Runs qpu-calibrate. Exit codes: 0 success, 1 failure, 2 usage error.
int run(const std::vector<std::string>& arguments, const Streams& streams);

}  // namespace qpu::calibrate

#endif
