// The machine that was measured, and whether the results count as measured on hardware.
#ifndef QPU_TOOLS_CALIBRATE_PROVENANCE_HPP
#define QPU_TOOLS_CALIBRATE_PROVENANCE_HPP

#include <string>

namespace qpu::calibrate {

enum class Source { Hardware, Emulator, Unverified };

struct Provenance {
  Source source = Source::Unverified;
  std::string board;  // a value of QPU_BOARD; empty if unknown
  std::string text;   // the value of "source" in a model file
};

// `tree` is a device tree such as /proc/device-tree. A measurement with `backend` counts as
// measured on hardware only if the tree is a Raspberry Pi's and contains the revision code and
// the serial number that the firmware writes.
Provenance provenance(const std::string& backend, const std::string& tree);

}  // namespace qpu::calibrate

#endif
