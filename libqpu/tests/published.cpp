// Compares the cycle model with published measurements of programs on hardware.
#include "tests/published.hpp"

#include <doctest/doctest.h>

TEST_CASE("modelled times are close to published measurements") {
  (void)setenv("QPU_CACHE", "off", 1);
  for (const published::Row& row : published::rows()) {
    if (row.kind == published::Kind::Other) continue;
    INFO(row.name);
    const published::Compared c = published::compare(row);
    INFO(c.value << " s in the model, " << row.measured << " s measured");
    CHECK(c.value > 0.75 * row.measured);
    CHECK(c.value < 1.33 * row.measured);
    CHECK(c.low < 1.1 * row.measured);
    CHECK(c.high > 0.9 * row.measured);
  }
}
