// Memory of spilled vectors: shared where that is right, and only there.
#include <doctest/doctest.h>

#include <vector>

#include "compiler/spill_slots.hpp"

namespace {

using qpu::compiler::Block;
using qpu::compiler::Function;
using qpu::compiler::SlotAccess;
using Slots = std::vector<std::uint32_t>;

constexpr std::uint32_t kA = 3, kB = 5, kC = 9;

Block jumpTo(std::uint32_t next) {
  Block b;
  b.exit = Block::Exit::Jump;
  b.next = next;
  return b;
}
Block branchTo(std::uint32_t taken, std::uint32_t next) {
  Block b = jumpTo(next);
  b.exit = Block::Exit::Branch;
  b.taken = taken;
  return b;
}
Function function(std::vector<Block> blocks) {
  Function f;
  f.registers = 10;
  f.blocks = std::move(blocks);
  return f;
}

SlotAccess store(std::uint32_t block, std::uint32_t vector) { return {vector, block, 0, true}; }
SlotAccess reload(std::uint32_t block, std::uint32_t vector) { return {vector, block, 0, false}; }

Slots share(const Function& f, const std::vector<SlotAccess>& accesses, std::uint32_t number) {
  std::uint32_t slots = 77;
  Slots found = qpu::compiler::colourSlots(f, accesses, slots);
  CHECK(slots == number);
  return found;
}

}  // namespace

TEST_CASE("nothing is spilled") { CHECK(share(function({Block()}), {}, 0).empty()); }

TEST_CASE("one after the other") {
  const Function f = function({Block()});
  CHECK(share(f, {store(0, kA), reload(0, kA), store(0, kB), reload(0, kB)}, 1) == Slots{0, 0, 0, 0});
  // What is read again, or stored anew and read, is kept in between.
  CHECK(share(f, {store(0, kA), reload(0, kA), store(0, kB), reload(0, kB), reload(0, kA)}, 2) ==
        Slots{0, 0, 1, 1, 0});
  CHECK(share(f, {store(0, kA), reload(0, kA), store(0, kB), store(0, kA), reload(0, kB), reload(0, kA)},
              2) == Slots{0, 0, 1, 0, 1, 0});
  CHECK(share(f, {store(0, kA), store(0, kB), reload(0, kA), store(0, kC), reload(0, kC), reload(0, kB)},
              2) == Slots{0, 1, 0, 0, 0, 1});
}

TEST_CASE("a store that nobody reads does no harm") {
  const Function f = function({Block()});
  CHECK(share(f, {store(0, kA), store(0, kB), reload(0, kA)}, 2) == Slots{0, 1, 0});
}

TEST_CASE("what is read in the next turn of a loop is kept to its end") {
  const Function f = function({jumpTo(1), branchTo(1, 2), Block()});
  CHECK(share(f, {store(0, kA), reload(1, kA), store(1, kB), reload(1, kB), store(2, kC), reload(2, kC)},
              2) == Slots{0, 0, 1, 1, 0, 0});
  // Stored in each turn before it is read: free from the read on.
  CHECK(share(f, {store(1, kA), reload(1, kA), store(1, kB), reload(1, kB)}, 1) == Slots{0, 0, 0, 0});
  // Read in a turn before it is stored for the next.
  CHECK(share(f, {store(0, kA), reload(1, kA), store(1, kB), reload(1, kB), store(1, kA)}, 1) ==
        Slots{0, 0, 0, 0, 0});
}

TEST_CASE("both ways of a branch count") {
  const Function f = function({branchTo(2, 1), jumpTo(3), jumpTo(3), Block()});
  // B lies between A's store and its read on one way only.
  CHECK(share(f, {store(0, kA), store(1, kB), reload(1, kB), reload(3, kA)}, 2) == Slots{0, 1, 1, 0});
  // On each way before A is stored.
  CHECK(share(f, {store(1, kB), reload(1, kB), store(1, kA), store(2, kC), reload(2, kC), store(2, kA),
                  reload(3, kA)},
              1) == Slots{0, 0, 0, 0, 0, 0, 0});
  // One way each.
  CHECK(share(f, {store(1, kB), reload(1, kB), store(2, kC), reload(2, kC)}, 1) == Slots{0, 0, 0, 0});
  // Not stored on one way: what is read then is of no matter, what others have there is.
  CHECK(share(f, {store(1, kA), store(2, kC), reload(3, kA), reload(3, kC)}, 2) == Slots{0, 1, 0, 1});
}
