// Analyses kernels that set up the VPM themselves ("by hand") to determine which of their setups
// the compiler must restore after using the VPM for a load or store. Backward and forward
// data-flow analyses: Gary A. Kildall, "A Unified Approach to Global Program Optimization", 1973.
#ifndef QPU_SRC_COMPILER_LOWER_VPM_HPP
#define QPU_SRC_COMPILER_LOWER_VPM_HPP

#include <cstdint>
#include <vector>

#include "lang/source.hpp"

namespace qpu::compiler {

// Setups that are live after a statement: some path uses them before setting them up again.
struct VpmNeeds {
  bool writeWindow = false;  // of vpmPut
  bool storeSetup = false;   // of dmaStartWrite
  bool loadSetup = false;    // of dmaStartRead

  void add(const VpmNeeds& o) {
    writeWindow = writeWindow || o.writeWindow;
    storeSetup = storeSetup || o.storeSetup;
    loadSetup = loadSetup || o.loadSetup;
  }
  bool operator==(const VpmNeeds& o) const {
    return writeWindow == o.writeWindow && storeSetup == o.storeSetup &&
           loadSetup == o.loadSetup;
  }
};

struct VpmByHand {
  // Indexed by Site::number: the setups that are live after the statement or within it.
  std::vector<VpmNeeds> needs;
  // Whether vectors announced by vpmSetupRead may still be unread when the statement starts.
  std::vector<bool> unread;
};

VpmByHand analyseVpm(const detail::Source& source);

}  // namespace qpu::compiler

#endif
