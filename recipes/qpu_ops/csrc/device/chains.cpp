#include "chains.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <utility>

#include <QPULib.h>
#include <qpu/ieee.h>
#include <qpu/stream.h>

namespace torch_qpu {
namespace {

using qpu::kernels::kShort;

enum class Step : std::uint8_t {
  add, sub, mul, div, max, min,
  neg, abs, exp, log, sqrt, rsqrt, recip, sigmoid, tanh, relu,
  gt
};

struct Known {
  Step step;
  std::size_t operands;
};

const std::map<std::string, Known>& steps() {
  static const auto* const all = new std::map<std::string, Known>{
      {"add", {Step::add, 2}},     {"sub", {Step::sub, 2}},   {"mul", {Step::mul, 2}},
      {"div", {Step::div, 2}},     {"max", {Step::max, 2}},   {"min", {Step::min, 2}},
      {"neg", {Step::neg, 1}},     {"abs", {Step::abs, 1}},   {"exp", {Step::exp, 1}},
      {"log", {Step::log, 1}},     {"sqrt", {Step::sqrt, 1}}, {"rsqrt", {Step::rsqrt, 1}},
      {"recip", {Step::recip, 1}}, {"sigmoid", {Step::sigmoid, 1}},
      {"tanh", {Step::tanh, 1}},   {"relu", {Step::relu, 1}}, {"gt", {Step::gt, 4}}};
  return *all;
}

struct Operation {
  Step step = Step::add;
  std::vector<std::size_t> of;
};

struct Chain {
  std::vector<bool> is_array;  // of each input
  std::vector<Operation> operations;
  std::vector<std::size_t> stored;
};

[[noreturn]] void refuse(const std::string& text, const std::string& why) {
  throw std::invalid_argument("'" + text + "' is no elementwise chain: " + why);
}

std::size_t number(const std::string& text, const std::string& word, std::size_t values) {
  if (word.empty() || word.size() > 4 ||
      !std::all_of(word.begin(), word.end(), [](char c) { return c >= '0' && c <= '9'; }))
    refuse(text, "'" + word + "' is no number of a value");
  const std::size_t found = std::stoul(word);
  if (found >= values)
    refuse(text, "value " + word + " is used where there are " + std::to_string(values));
  return found;
}

Chain parsed(const std::string& text, std::vector<bool> is_array) {
  Chain chain;
  chain.is_array = std::move(is_array);
  std::size_t values = chain.is_array.size();
  const std::size_t mark = text.find('>');
  if (mark == std::string::npos) refuse(text, "'>' with the stored values is missing");
  std::istringstream parts(text.substr(0, mark));
  for (std::string part; std::getline(parts, part, ';');) {
    std::istringstream words(part);
    std::string word;
    words >> word;
    const auto known = steps().find(word);
    if (known == steps().end()) refuse(text, "there is no step '" + word + "'");
    Operation operation{known->second.step, {}};
    while (words >> word) operation.of.push_back(number(text, word, values));
    if (operation.of.size() != known->second.operands)
      refuse(text, "'" + part + "' has " + std::to_string(operation.of.size()) + " operands, not " +
                       std::to_string(known->second.operands));
    chain.operations.push_back(std::move(operation));
    ++values;
  }
  std::istringstream stored(text.substr(mark + 1));
  for (std::string word; std::getline(stored, word, ',');)
    chain.stored.push_back(number(text, word, values));
  return chain;
}

FloatExpr evaluated(Step step, const std::vector<const Float*>& x) {
  const Float& a = *x[0];
  switch (step) {
    case Step::add: return a + *x[1];
    case Step::sub: return a - *x[1];
    case Step::mul: return a * *x[1];
    case Step::div: return qpu::ieee::div(a, *x[1]);
    case Step::max: return qpu::ieee::max(a, *x[1]);
    case Step::min: return qpu::ieee::min(a, *x[1]);
    case Step::neg: return qpu::ieee::negative(a);
    case Step::abs: return qpu::abs(a);
    case Step::exp: return qpu::ieee::exp(a);
    case Step::log: return qpu::ieee::log(a);
    case Step::sqrt: return qpu::ieee::sqrt(a);
    case Step::rsqrt: return qpu::ieee::reciprocalSqrt(a);
    case Step::recip: return qpu::ieee::reciprocal(a);
    case Step::sigmoid: return qpu::ieee::sigmoid(a);
    case Step::tanh: return qpu::ieee::tanh(a);
    case Step::relu: return qpu::ieee::relu(a);
    case Step::gt: return qpu::select(qpu::ieee::isNan(a) || a > *x[1], *x[2], *x[3]);
  }
  throw std::logic_error("a step without a meaning");
}

using Outputs = std::array<Ptr<Float>, kMostOutputs>;
using Numbers = std::array<Float, kMostNumbers>;

// The values of one vector of elements. `arrays` and `numbers` are in the order of
// the inputs.
template <std::size_t N>
std::vector<FloatExpr> values(const Chain& chain, const qpu::kernels::Vectors<N>& arrays,
                              const Numbers& numbers) {
  std::deque<Float> made;  // its elements stay where they are
  std::vector<const Float*> all;
  std::size_t array = 0, number = 0;
  for (const bool is_array : chain.is_array)
    all.push_back(is_array ? &arrays.at(array++) : &numbers.at(number++));
  for (const Operation& operation : chain.operations) {
    std::vector<const Float*> operands;
    for (const std::size_t i : operation.of) operands.push_back(all[i]);
    made.emplace_back(evaluated(operation.step, operands));
    all.push_back(&made.back());
  }
  std::vector<FloatExpr> stored;
  for (const std::size_t i : chain.stored) stored.emplace_back(*all[i]);
  return stored;
}

template <std::size_t N>
void record(const Chain& chain, const Int& n, const Outputs& out,
            const qpu::kernels::Pointers<N>& in, const Numbers& numbers) {
  const std::size_t outputs = chain.stored.size();
  std::vector<std::array<Float, kShort>> result(outputs);
  Int vpmRow = qpu::kernels::firstVpmRow<kShort>();
  qpu::kernels::walk<N, kShort>(
      n, in, me(), numQPUs(),
      [&](int j, qpu::kernels::Vectors<N>& x) {
        const auto stored = values<N>(chain, x, numbers);
        for (std::size_t o = 0; o < outputs; ++o)
          result[o][static_cast<std::size_t>(j)] = stored[o];
      },
      [&](const IntExpr& first) {
        for (std::size_t o = 0; o < outputs; ++o)
          qpu::kernels::burst(result[o], out.at(o) + first, vpmRow);
      },
      [&](qpu::kernels::Vectors<N>& x, const Int& first, const Int& count) {
        qpu::kernels::finishBursts();
        const auto stored = values<N>(chain, x, numbers);
        for (std::size_t o = 0; o < outputs; ++o) store(stored[o], out.at(o) + first, count);
      });
  qpu::kernels::finishBursts();
}

using Floats = Ptr<Float>;
using Compiled =
    Kernel<Int, Floats, Floats, Floats, Floats, Floats, Floats, Floats, Float, Float, Float, Float,
           Float, Float>;

Compiled compiled(const Chain& chain, std::size_t arrays, const std::string& name) {
  Compiled kernel = compile(
      [&](Int n, Floats o0, Floats o1, Floats o2, Floats a, Floats b, Floats c, Floats d, Float s0,
          Float s1, Float s2, Float s3, Float s4, Float s5) {
        const Outputs out{o0, o1, o2};
        const Numbers numbers{s0, s1, s2, s3, s4, s5};
        switch (arrays) {
          case 1: return record<1>(chain, n, out, {a}, numbers);
          case 2: return record<2>(chain, n, out, {a, b}, numbers);
          case 3: return record<3>(chain, n, out, {a, b, c}, numbers);
          default: return record<4>(chain, n, out, {a, b, c, d}, numbers);
        }
      },
      name.c_str());
  return kernel;
}

struct Cache {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const Compiled>> kernels;

  static Cache& instance() {
    static auto* const cache = new Cache;
    return *cache;
  }
};

}  // namespace

void run_chain(const std::string& text, const std::vector<Operand>& inputs,
               const std::vector<float*>& outputs, int n, int qpus) {
  std::vector<bool> is_array;
  std::array<const float*, kMostArrays> arrays{};
  std::array<float, kMostNumbers> numbers{};
  std::size_t array = 0, number = 0;
  std::string key;
  for (const Operand& input : inputs) {
    const bool has_data = input.data != nullptr;
    key += has_data ? 'a' : 'n';
    is_array.push_back(has_data);
    if (has_data ? array == kMostArrays : number == kMostNumbers)
      refuse(text, "it has more than " + std::to_string(kMostArrays) + " arrays or " +
                       std::to_string(kMostNumbers) + " numbers");
    if (has_data) arrays.at(array++) = input.data;
    else numbers.at(number++) = input.value;
  }
  if (array == 0) refuse(text, "it has no array");
  key += ':' + text;

  std::shared_ptr<const Compiled> kernel;
  {
    Cache& cache = Cache::instance();
    const std::lock_guard<std::mutex> lock(cache.mutex);
    auto& known = cache.kernels[key];
    if (!known) {
      const Chain chain = parsed(text, is_array);
      if (chain.stored.empty() || chain.stored.size() > kMostOutputs)
        refuse(text, "it stores " + std::to_string(chain.stored.size()) + " values, not 1 to " +
                         std::to_string(kMostOutputs));
      Compiled made = compiled(chain, array, key);
      known = std::make_shared<const Compiled>(std::move(made));
    }
    kernel = known;
  }
  if (outputs.size() != static_cast<std::size_t>(
                            std::count(text.begin() + static_cast<long>(text.find('>')),
                                       text.end(), ',')) + 1)
    refuse(text, std::to_string(outputs.size()) + " outputs are given");
  if (n <= 0) return;
  const auto at = [](const float* p) {
    return qpu::BusPointer<float>(const_cast<float*>(p));  // kernels read and write alike
  };
  const auto input = [&](std::size_t i) { return at(arrays.at(i < array ? i : 0)); };
  const auto output = [&](std::size_t i) { return at(outputs.at(i < outputs.size() ? i : 0)); };
  Compiled own = *kernel;  // the QPU count is the copy's
  own.setNumQPUs(qpus == 0 ? 12 : qpus);
  own(n, output(0), output(1), output(2), input(0), input(1), input(2), input(3), numbers[0],
      numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]);
}

std::size_t compiled_chains() {
  Cache& cache = Cache::instance();
  const std::lock_guard<std::mutex> lock(cache.mutex);
  return cache.kernels.size();
}

}  // namespace torch_qpu
