// qpu-calibrate: measures the parameters of the emulator's cycle model.
#include <iostream>

#include "tools/calibrate/calibrate.hpp"

int main(int count, char** values) {
  return qpu::calibrate::run({values + (count > 0 ? 1 : 0), values + count},
                             {std::cout, std::cerr});
}
