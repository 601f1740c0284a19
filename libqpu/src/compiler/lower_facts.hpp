// Facts about a kernel and its statements that the lowering pass needs in advance.
#ifndef QPU_SRC_COMPILER_LOWER_FACTS_HPP
#define QPU_SRC_COMPILER_LOWER_FACTS_HPP

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lang/source.hpp"

namespace qpu::compiler {

constexpr std::size_t kSemaphores = 16;

struct KernelFacts {
  std::bitset<kSemaphores> semaphores;
  bool stores = false;
  bool gathers = false;
  bool loads = false;
  bool vpmByHand = false;
};

KernelFacts findFacts(const detail::Source& source);

// Variables that the compiler adds. Hidden variables are numbered after the variables in the
// source.
enum class Hidden : std::uint8_t {
  StoreSetup,       // setup word for the next store
  WriteWindow,      // VPM window for the next store, unless all stores use the same window
  Outstanding,      // number of outstanding gathers, if it is not known at compile time
  HandWriteWindow,  // current setups of a kernel that sets up the VPM itself
  HandStoreSetup,
  HandLoadSetup,
  Count
};

// The effects of all statements that a statement contains.
struct Summary {
  std::vector<std::uint32_t> assigned;  // variables that are assigned
  bool stores = false;
  bool waitsForStore = false;
  bool acquires = false;
};

class Summariser {
 public:
  Summariser(const detail::Source& source, bool countsGathers);

  Summary summarise(const detail::Statement& s);

 private:
  std::uint32_t hidden(Hidden h) const { return variables_ + static_cast<std::uint32_t>(h); }
  void assign(Summary& summary, std::uint32_t variable);
  void add(const std::vector<detail::Statement>& statements, Summary& summary);

  std::uint32_t variables_;
  bool countsGathers_;
  std::vector<std::uint32_t> assignedIn_;  // indexed by variable: last summary with this variable
  std::uint32_t summaries_ = 0;
};

}  // namespace qpu::compiler

#endif
