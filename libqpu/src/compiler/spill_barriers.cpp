#include "compiler/spill_barriers.hpp"

#include <algorithm>

namespace qpu::compiler {
namespace {

bool isReadSide(Op op) {
  return op == Op::VpmReadSetup || op == Op::VpmRead || op == Op::DmaLoadStart || op == Op::DmaLoadWait;
}

bool isWriteSide(Op op) {
  return op == Op::VpmWriteSetup || op == Op::VpmWrite || op == Op::DmaStoreStart;
}

// Marks the operations after a write setup, up to the DMA store of the vectors. If no DMA store
// follows, marks the operations up to the last operation on the VPM's write side. No store can be
// inserted before a marked operation.
void findWriteBarriers(const std::vector<Operation>& operations, std::vector<char>& noStore) {
  std::size_t lastWrite = 0;
  for (std::size_t i = 0; i < operations.size(); ++i)
    if (isWriteSide(operations[i].op)) lastWrite = i;
  bool isOpen = false;
  for (std::size_t i = 0; i < operations.size(); ++i) {
    noStore[i] = isOpen ? 1 : 0;
    if (operations[i].op == Op::VpmWriteSetup) isOpen = true;
    if (operations[i].op == Op::DmaStoreStart || i == lastWrite) isOpen = false;
  }
}

// Marks the operations after an operation on the VPM's read side, up to and including the next
// read-side operation, if the latter depends on the state that the former left: a setup, a started
// DMA load or a partly read sequence. No reload can be inserted before a marked operation.
void findReadBarriers(const std::vector<Operation>& operations, std::vector<char>& noReload) {
  std::size_t next = operations.size();  // the next operation on the read side
  for (std::size_t i = operations.size(); i-- > 0;) {
    const Op op = operations[i].op;
    if (!isReadSide(op)) continue;
    if (next < operations.size()) {
      const bool isOpen = op == Op::VpmReadSetup || op == Op::DmaLoadStart ||
                          (op == Op::VpmRead && operations[next].op == Op::VpmRead);
      if (isOpen)
        for (std::size_t k = i + 1; k <= next; ++k) noReload[k] = 1;
    }
    next = i;
  }
}

}  // namespace

SpillBarriers findSpillBarriers(const std::vector<Operation>& operations, std::size_t ready) {
  const std::size_t n = operations.size();
  SpillBarriers barriers{std::vector<char>(n + 1, 0), std::vector<char>(n + 1, 0)};
  findWriteBarriers(operations, barriers.noStore);
  findReadBarriers(operations, barriers.noReload);
  for (std::size_t i = 0; i < std::min(ready, n); ++i) barriers.noStore[i] = barriers.noReload[i] = 1;
  return barriers;
}

}  // namespace qpu::compiler
