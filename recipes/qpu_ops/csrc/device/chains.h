// Elementwise chains: several operations on the same elements as one QPU kernel,
// made when it is first needed. Nothing of torch here and nothing of QPULib: its
// macros stay in chains.cpp.
#ifndef TORCH_QPU_CHAINS_H
#define TORCH_QPU_CHAINS_H

#include <cstddef>
#include <string>
#include <vector>

namespace torch_qpu {

// An input of a chain: an array, or one number for all elements.
struct Operand {
  const float* data = nullptr;
  float value = 0;
};

constexpr std::size_t kMostArrays = 4;
constexpr std::size_t kMostNumbers = 6;
constexpr std::size_t kMostOutputs = 3;

// `text` is steps "name value .." divided by ";", then ">" and the values that are
// stored, divided by ",": "mul 1 2;add 0 3>4". Values are numbered: inputs first,
// then steps, from 0. The steps:
//
//   add sub mul div max min    of two values
//   neg abs exp log sqrt rsqrt recip sigmoid tanh relu    of one
//   expm1 log1p cdf    of one: exp(x) - 1, log(1 + x) for x >= 0, the normal distribution's
//   gt    of four: the third where the first is greater than the second, else the fourth
//
// Computes n elements of each output. Arrays are in shared memory; outputs may be
// inputs. `qpus` is 1..12, 0 for all. Throws std::invalid_argument for a text that is
// no chain or does not fit the inputs, and qpu::Error.
void run_chain(const std::string& text, const std::vector<Operand>& inputs,
               const std::vector<float*>& outputs, int n, int qpus);

// One of the arrays of a list that a chain runs over.
struct Part {
  std::vector<Operand> inputs;  // arrays and numbers in the same places in all parts
  std::vector<float*> outputs;
  int n = 0;
};

// The chain over all parts, in one launch. Parts must not write what others read.
void run_chains(const std::string& text, const std::vector<Part>& parts, int qpus);

// How many different chains have been compiled in this process.
std::size_t compiled_chains();

}  // namespace torch_qpu

#endif
