// Elementwise chains: several operations on the same elements as one QPU kernel, compiled
// on first use. Independent of torch and of QPULib, whose macros are used in chains.cpp only.
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

constexpr std::size_t kMaxArrays = 4;
constexpr std::size_t kMaxNumbers = 6;
constexpr std::size_t kMaxOutputs = 3;

// `text` consists of steps "name value ..." separated by ";", then ">" and the values to
// store, separated by ",": "mul 1 2;add 0 3>4". Values are numbered from 0, first the
// inputs, then the steps. The steps:
//
//   add sub mul div max min    of two values
//   neg abs exp log sqrt rsqrt recip sigmoid tanh relu    of one value
//   expm1 log1p cdf    of one value: exp(x) - 1, log(1 + x) for x >= 0, the cumulative
//         normal distribution
//   gt    of four values: the third if the first is greater than the second, else the fourth
//
// Computes n elements of each output. Arrays are in shared memory; outputs may be
// inputs. `qpus` is 1 to 12, or 0 for all. Throws std::invalid_argument if the text is
// invalid or does not match the inputs, and qpu::Error.
void run_chain(const std::string& text, const std::vector<Operand>& inputs,
               const std::vector<float*>& outputs, int n, int qpus);

// The operands of a chain for one element of the lists that it runs over.
struct Part {
  std::vector<Operand> inputs;  // arrays and numbers in the same order in all parts
  std::vector<float*> outputs;
  int n = 0;
};

// Runs the chain over all parts in one launch. A part must not write memory that another part
// reads.
void run_chains(const std::string& text, const std::vector<Part>& parts, int qpus);

// The number of different chains that this process has compiled.
std::size_t compiled_chains();

}  // namespace torch_qpu

#endif
