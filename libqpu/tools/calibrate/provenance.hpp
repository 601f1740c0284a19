// What measurements were taken on, and whether they count as such.
#ifndef QPU_TOOLS_CALIBRATE_PROVENANCE_HPP
#define QPU_TOOLS_CALIBRATE_PROVENANCE_HPP

#include <string>

namespace qpu::calibrate {

enum class Source { Hardware, Emulator, Unverified };

struct Provenance {
  Source source = Source::Unverified;
  std::string board;  // as QPU_BOARD names it; "" when that is not known
  std::string text;   // the line "source" of a model's file
};

// `tree` is a device tree, /proc/device-tree. Only a Raspberry Pi's own, with the
// revision code and the serial number that its firmware writes, makes what `backend`
// measured a measurement on hardware.
Provenance provenance(const std::string& backend, const std::string& tree);

}  // namespace qpu::calibrate

#endif
