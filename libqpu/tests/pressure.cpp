// Random kernels that keep more vectors alive than there are registers. QPU_FUZZ_KERNELS sets their number, and
// QPU_FUZZ_FIRST the number of the first one.
#include <doctest/doctest.h>

#include <cstdlib>

#include "fuzz/pressure.hpp"

namespace {

std::uint32_t setting(const char* name, std::uint32_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : static_cast<std::uint32_t>(std::strtoul(text, nullptr, 10));
}

}  // namespace

TEST_CASE("kernels with 30 to 120 live vectors are correct") {
  const std::uint32_t first = setting("QPU_FUZZ_FIRST", 0);
  const std::uint32_t count = setting("QPU_FUZZ_KERNELS", 60);
  std::uint32_t spilled = 0, slower = 0;
  std::array<std::uint64_t, 3> clocks{};
  for (std::uint32_t number = first; number < first + count; ++number) {
    CAPTURE(number);
    const fuzz::pressure::Outcome outcome = fuzz::pressure::check(number);
    CHECK_MESSAGE(outcome.fault.empty(), outcome.fault);
    spilled += outcome.spillBytes[2] > 0 ? 1 : 0;
    for (std::size_t level = 0; level < 3; ++level) clocks[level] += outcome.clocks[level];
    // The QPUs compete for DMA: a few kernels are slower at level 2 although they execute fewer instructions.
    slower += outcome.clocks[2] > outcome.clocks[0] ? 1 : 0;
    CHECK(outcome.clocks[2] * 100 <= outcome.clocks[0] * 120);
  }
  // In the emulator's model, for all kernels together.
  CHECK(slower <= 1 + count / 50);
  CHECK(clocks[1] <= clocks[0]);
  CHECK(clocks[2] <= clocks[1]);
  CHECK(spilled > count / 4);  // otherwise the kernels do not test spilling
  MESSAGE(count, " kernels, ", spilled, " of them with spilled vectors at level 2");
}
