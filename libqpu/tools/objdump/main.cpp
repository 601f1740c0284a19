// qpu-objdump: lists, verifies and assembles QPU programs.
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <iostream>

#include "tools/objdump/objdump.hpp"

int main(int count, char** values) {
  try {
    return qpu::objdump::run({values + (count > 0 ? 1 : 0), values + count},
                             {std::cin, std::cout, std::cerr, isatty(STDOUT_FILENO) == 1});
  } catch (const std::exception& e) {
    (void)std::fprintf(stderr, "qpu-objdump: %s\n", e.what());
    return 1;
  }
}
