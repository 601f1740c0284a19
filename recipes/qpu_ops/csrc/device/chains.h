// Elementwise chains. A chain performs several operations on the same elements in one QPU kernel,
// which is compiled when it is first used. This file does not depend on torch or on QPULib. Only
// chains.cpp uses QPULib's macros.
#ifndef TORCH_QPU_CHAINS_H
#define TORCH_QPU_CHAINS_H

#include <cstddef>
#include <string>
#include <vector>

namespace torch_qpu {

// An input of a chain: an array, or a number that applies to all elements.
struct Operand {
  const float* data = nullptr;
  float value = 0;
};

constexpr std::size_t kMaxArrays = 4;
constexpr std::size_t kMaxNumbers = 6;
constexpr std::size_t kMaxOutputs = 3;

// Runs a chain. `text` consists of steps in the form "name value ...", which are separated by ";".
// A ">" precedes the values to store, which are separated by ",". Example: "mul 1 2;add 0 3>4".
// Values are numbered from 0: first the inputs, then the results of the steps. These are the steps:
//
//   step                                                  operands
//   add sub mul div max min                               two values
//   neg abs exp log sqrt rsqrt recip sigmoid tanh relu    one value
//   expm1 log1p cdf                                       one value
//   keep                                                  two values
//   gt                                                    four values
//
// expm1 is exp(x) - 1, log1p is log(1 + x) for x >= 0, and cdf is the cumulative normal
// distribution. keep returns the first value if it is NaN, and the second value otherwise. gt
// returns the third value if the first value is greater than the second, and the fourth value
// otherwise.
//
// The function computes n elements of each output. Arrays must be in shared memory. Outputs may be
// the same arrays as inputs. `qpus` is 1 to 12, or 0 for all QPUs. Throws std::invalid_argument if
// the text is invalid or does not match the inputs, and qpu::Error if the run fails.
void run_chain(const std::string& text, const std::vector<Operand>& inputs,
               const std::vector<float*>& outputs, int n, int qpus);

// The operands of a chain for one element of the lists on which the chain runs.
struct Part {
  std::vector<Operand> inputs;  // arrays and numbers must be in the same order in all parts
  std::vector<float*> outputs;
  int n = 0;
};

// Runs the chain on all parts in a single launch. A part must not write to memory that another
// part reads.
void run_chains(const std::string& text, const std::vector<Part>& parts, int qpus);

// Returns the number of different chains that this process has compiled.
std::size_t compiled_chains();

}  // namespace torch_qpu

#endif
