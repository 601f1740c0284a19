// Generates the code that stores a vector to memory, and the code that reloads it. Both kinds of
// code use the DMA engines and one row of the VPM.
#ifndef QPU_SRC_COMPILER_SPILL_CODE_HPP
#define QPU_SRC_COMPILER_SPILL_CODE_HPP

#include <cstdint>
#include <vector>

#include "compiler/spill_slots.hpp"

namespace qpu::compiler {

class SpillCode {
 public:
  explicit SpillCode(Function& function) : f_(function) {}

  // Adds code to the start of the entry block. The code computes the address of the spill area
  // and the VPM row. Returns the number of operations that must run before a vector can be
  // spilled.
  std::size_t addPrologue();
  // Returns true if the spill code itself uses the register.
  bool isReserved(Vreg v) const { return v == base_ || v == row_; }

  // Append spill code to `code`.
  void store(std::vector<Operation>& code, std::size_t block, Vreg v);
  void reload(std::vector<Operation>& code, std::size_t block, Vreg v);

  // Assigns the spill slots and inserts their offsets into the code. Returns the size of the
  // spill area in bytes.
  std::uint32_t assignSlots();

 private:
  Vreg loadConstant(std::vector<Operation>& code, std::uint32_t bits);
  Vreg rowWord(std::vector<Operation>& code, std::uint32_t bits, std::uint32_t shift);
  Vreg slotAddress(std::vector<Operation>& code, std::size_t block, Vreg v, bool isStore);

  Function& f_;
  Vreg base_ = Operation::kNone;  // holds the address of the spill area
  Vreg row_ = Operation::kNone;   // holds the number of the VPM row
  std::vector<SlotAccess> accesses_;
};

}  // namespace qpu::compiler

#endif
