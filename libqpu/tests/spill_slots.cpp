// Checks that vectors share a spill slot if, and only if, their live ranges in memory do not
// overlap.
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

TEST_CASE("without spills, no slots are assigned") { CHECK(share(function({Block()}), {}, 0).empty()); }

TEST_CASE("disjoint live ranges share a slot") {
  const Function f = function({Block()});
  CHECK(share(f, {store(0, kA), reload(0, kA), store(0, kB), reload(0, kB)}, 1) == Slots{0, 0, 0, 0});
  // A vector that will be reloaded again is live between its reloads.
  CHECK(share(f, {store(0, kA), reload(0, kA), store(0, kB), reload(0, kB), reload(0, kA)}, 2) ==
        Slots{0, 0, 1, 1, 0});
  CHECK(share(f, {store(0, kA), reload(0, kA), store(0, kB), store(0, kA), reload(0, kB), reload(0, kA)},
              2) == Slots{0, 0, 1, 0, 1, 0});
  CHECK(share(f, {store(0, kA), store(0, kB), reload(0, kA), store(0, kC), reload(0, kC), reload(0, kB)},
              2) == Slots{0, 1, 0, 0, 0, 1});
}

TEST_CASE("a store that is never reloaded can share its slot") {
  const Function f = function({Block()});
  CHECK(share(f, {store(0, kA), store(0, kB), reload(0, kA)}, 2) == Slots{0, 1, 0});
}

TEST_CASE("a vector reloaded in the next iteration stays live") {
  const Function f = function({jumpTo(1), branchTo(1, 2), Block()});
  CHECK(share(f, {store(0, kA), reload(1, kA), store(1, kB), reload(1, kB), store(2, kC), reload(2, kC)},
              2) == Slots{0, 0, 1, 1, 0, 0});
  // In each iteration, A is stored before it is reloaded, so it is dead after the reload.
  CHECK(share(f, {store(1, kA), reload(1, kA), store(1, kB), reload(1, kB)}, 1) == Slots{0, 0, 0, 0});
  // A is reloaded before it is stored for the next iteration.
  CHECK(share(f, {store(0, kA), reload(1, kA), store(1, kB), reload(1, kB), store(1, kA)}, 1) ==
        Slots{0, 0, 0, 0, 0});
}

TEST_CASE("both paths of a branch affect liveness") {
  const Function f = function({branchTo(2, 1), jumpTo(3), jumpTo(3), Block()});
  // Only one of the paths accesses B between A's store and A's reload.
  CHECK(share(f, {store(0, kA), store(1, kB), reload(1, kB), reload(3, kA)}, 2) == Slots{0, 1, 1, 0});
  // Both paths access another vector before they store A.
  CHECK(share(f, {store(1, kB), reload(1, kB), store(1, kA), store(2, kC), reload(2, kC), store(2, kA),
                  reload(3, kA)},
              1) == Slots{0, 0, 0, 0, 0, 0, 0});
  // Each vector is accessed on only one path.
  CHECK(share(f, {store(1, kB), reload(1, kB), store(2, kC), reload(2, kC)}, 1) == Slots{0, 0, 0, 0});
  // One path does not store A. The value that is reloaded on this path is not used, but the value
  // of C is used.
  CHECK(share(f, {store(1, kA), store(2, kC), reload(3, kA), reload(3, kC)}, 2) == Slots{0, 1, 0, 1});
}
