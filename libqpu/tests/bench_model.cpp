// Compares the emulator's cycle model with published measurements of programs on the QPUs of a
// Raspberry Pi. Prints the time in the model divided by the measured time, and the range of this
// ratio when all parameters are at the bounds of their ranges. These figures are results of the
// model. This project has not measured any of these figures on hardware.
#include <cstdio>

#include "tests/published.hpp"

int main() {
  (void)setenv("QPU_CACHE", "off", 1);
  (void)std::printf("| program | board | measured, ms | model, ms | model / measured | range | "
                    "source |\n|---|---|---|---|---|---|---|\n");
  for (const published::Row& row : published::rows()) {
    const published::Compared c = published::compare(row);
    const char* const note = row.kind == published::Kind::Fitted  ? " (a)"
                             : row.kind == published::Kind::Other ? " (b)"
                                                                  : "";
    (void)std::printf("| %s%s | %s | %.3f | %.3f | %.2f | %.2f to %.2f | %s |\n", row.name.c_str(),
                      note, row.board, 1e3 * row.measured, 1e3 * c.value, c.value / row.measured,
                      c.low / row.measured, c.high / row.measured, row.source);
    (void)std::fflush(stdout);
  }
  (void)std::printf("\nResults of the model. (a) A parameter was fitted to this line. (b) Another program that "
                    "computes\nthe same: the ratio compares our kernel in the model with that program "
                    "as measured.\n");
  return 0;
}
