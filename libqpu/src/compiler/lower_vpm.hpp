// Analyses kernels that set up the VPM themselves ("by hand"). If the compiler itself uses the VPM
// for one of the kernel's loads or stores, it must restore some of the kernel's setups afterwards.
// The analysis determines which setups must be restored. The method is a backward and a forward
// data-flow analysis. Reference: Gary A. Kildall, "A Unified Approach to Global Program
// Optimization", 1973.
#ifndef QPU_SRC_COMPILER_LOWER_VPM_HPP
#define QPU_SRC_COMPILER_LOWER_VPM_HPP

#include <cstdint>
#include <vector>

#include "lang/source.hpp"

namespace qpu::compiler {

// The setups that are live after a statement. A setup is live if it is used on some path before
// it is replaced.
struct VpmNeeds {
  bool writeWindow = false;  // vpmPut uses this setup
  bool storeSetup = false;   // dmaStartWrite uses this setup
  bool loadSetup = false;    // dmaStartRead uses this setup

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
  // Indexed by Site::number: true if vectors that vpmSetupRead announced may still be unread when
  // the statement starts.
  std::vector<bool> unread;
};

VpmByHand analyseVpm(const detail::Source& source);

}  // namespace qpu::compiler

#endif
