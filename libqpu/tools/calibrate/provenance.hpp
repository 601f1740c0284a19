// The machine that was measured, and whether the results are marked as measured on hardware.
#ifndef QPU_TOOLS_CALIBRATE_PROVENANCE_HPP
#define QPU_TOOLS_CALIBRATE_PROVENANCE_HPP

#include <string>

namespace qpu::calibrate {

enum class Source { Hardware, Emulator, Unverified };

struct Provenance {
  Source source = Source::Unverified;
  std::string board;  // a value for QPU_BOARD, or "" if the board is unknown
  std::string text;   // the value for "source" in a model file
};

// `tree` is the path of a device tree such as /proc/device-tree. The results of `backend` are
// marked as measured on hardware only if the tree belongs to a Raspberry Pi and contains the
// revision code and the serial number that the firmware writes.
Provenance provenance(const std::string& backend, const std::string& tree);

}  // namespace qpu::calibrate

#endif
