// What the compiler's own use of the VPM must leave as a kernel that uses it by
// hand expects it.
#ifndef QPU_SRC_COMPILER_LOWER_VPM_HPP
#define QPU_SRC_COMPILER_LOWER_VPM_HPP

#include <cstdint>
#include <vector>

#include "lang/source.hpp"

namespace qpu::compiler {

// Set-ups that some way from a statement on uses without making them anew.
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
  // By Site::number. After the statement, and within it.
  std::vector<VpmNeeds> needs;
  // Whether announced vectors may be unread when the statement starts.
  std::vector<bool> unread;
};

VpmByHand analyseVpm(const detail::Source& source);

}  // namespace qpu::compiler

#endif
