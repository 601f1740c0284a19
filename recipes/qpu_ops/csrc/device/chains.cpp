#include "chains.h"

#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <utility>

#include <qpu/ieee.h>

#include "kernel_parts.h"

namespace torch_qpu {
namespace {

using qpu::kernels::kShort;

enum class Step : std::uint8_t {
  add, sub, mul, div, max, min,
  neg, abs, exp, log, sqrt, rsqrt, recip, sigmoid, tanh, relu,
  gt, expm1, log1p, cdf,
  keep  // the first operand if it is NaN, otherwise the second operand
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
      {"tanh", {Step::tanh, 1}},   {"relu", {Step::relu, 1}}, {"gt", {Step::gt, 4}},
      {"expm1", {Step::expm1, 1}}, {"log1p", {Step::log1p, 1}}, {"cdf", {Step::cdf, 1}},
      {"keep", {Step::keep, 2}}};
  return *all;
}

struct Operation {
  Step step = Step::add;
  std::vector<std::size_t> of;
};

struct Chain {
  std::vector<bool> is_array;  // for each input, true if it is an array
  std::vector<Operation> operations;
  std::vector<std::size_t> stored;
};

[[noreturn]] void refuse(const std::string& text, const std::string& why) {
  throw std::invalid_argument("'" + text + "' is not an elementwise chain: " + why);
}

std::size_t number(const std::string& text, const std::string& word, std::size_t values) {
  if (word.empty() || word.size() > 4 ||
      !std::all_of(word.begin(), word.end(), [](char c) { return c >= '0' && c <= '9'; }))
    refuse(text, "'" + word + "' is not the number of a value");
  const std::size_t found = std::stoul(word);
  if (found >= values)
    refuse(text, "value " + word + " is used, but there are only " + std::to_string(values));
  return found;
}

Chain parsed(const std::string& text, std::vector<bool> is_array) {
  Chain chain;
  chain.is_array = std::move(is_array);
  std::size_t values = chain.is_array.size();
  const std::size_t mark = text.find('>');
  if (mark == std::string::npos) refuse(text, "'>' and the stored values are missing");
  std::istringstream parts(text.substr(0, mark));
  for (std::string part; std::getline(parts, part, ';');) {
    std::istringstream words(part);
    std::string word;
    words >> word;
    const auto known = steps().find(word);
    if (known == steps().end()) refuse(text, "unknown step '" + word + "'");
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

// Computes exp(x) - 1 without cancellation where the result is near 0. With x = n ln 2 + f, the
// result is (exp(f) - 1) 2^n + (2^n - 1).
FloatExpr expm1(const FloatExpr& x) {
  Float v = qpu::min(qpu::max(x, -30.0F), 89.4F);
  // Round to the nearest integer. The conversion truncates toward zero, so its operand is made
  // positive first. 2^128 cannot be represented, so n is at most 127.
  Int n = qpu::min(toInt(v * 1.44269504F + 64.5F) - 64, 127);
  Float f = v - toFloat(n) * 0.693359375F + toFloat(n) * 2.12194440e-4F;
  static const std::array<float, 7> c = {{1.0F / 5040, 1.0F / 720, 1.0F / 120, 1.0F / 24,
                                          1.0F / 6, 0.5F, 1.0F}};
  Float p = qpu::detail::polynomial(f, c.data(), 7) * f;
  Float power = asFloat((n + 127) << 23);
  return p * power + (power - 1);
}

// Computes log(1 + x) for x >= 0. The rounding error of 1 + x is added to the result.
FloatExpr log1p(const FloatExpr& x) {
  Float u = x + 1;
  return qpu::log(u) + (x - (u - 1)) * qpu::reciprocal(u);
}

// Computes the cumulative normal distribution with formula 7.1.26 in Abramowitz and Stegun,
// Handbook of Mathematical Functions. The error is at most 1.5e-7.
FloatExpr cdf(const FloatExpr& x) {
  static const std::array<float, 5> c = {{0.5F * 1.061405429F, 0.5F * -1.453152027F,
                                          0.5F * 1.421413741F, 0.5F * -0.284496736F,
                                          0.5F * 0.254829592F}};
  Float size = qpu::min(qpu::abs(x), 20.0F);
  Float t = qpu::reciprocal(size * (0.3275911F * 0.70710678F) + 1);
  Float tail = qpu::detail::polynomial(t, c.data(), 5) * t * qpu::exp(size * size * -0.5F);
  return qpu::select(x > 0, FloatExpr(1) - tail, tail);
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
    case Step::expm1: return qpu::ieee::keepNan(a, expm1(a));
    case Step::log1p: return qpu::ieee::keepNan(a, log1p(a));
    case Step::cdf: return qpu::ieee::keepNan(a, cdf(a));
    case Step::keep: return qpu::ieee::keepNan(a, *x[1]);
  }
  throw std::logic_error("step not implemented");
}

using Outputs = std::array<Ptr<Float>, kMaxOutputs>;
using Numbers = std::array<Float, kMaxNumbers>;

// Returns the values of a chain for one vector of elements. `arrays` and `numbers` are in the
// order of the inputs.
template <std::size_t N>
std::vector<FloatExpr> values(const Chain& chain, const qpu::kernels::Vectors<N>& arrays,
                              const Numbers& numbers) {
  std::deque<Float> made;  // a deque, because references to its elements stay valid
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
            const qpu::kernels::Pointers<N>& in, const Numbers& numbers, const IntExpr& worker) {
  const std::size_t outputs = chain.stored.size();
  std::vector<std::array<Float, kShort>> result(outputs);
  Int vpmRow = qpu::kernels::firstVpmRow<kShort>();
  qpu::kernels::walk<N, kShort>(
      n, in, worker, numQPUs(),
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

void record_any(const Chain& chain, std::size_t arrays, const Int& n, const Outputs& out,
                const qpu::kernels::Pointers<kMaxArrays>& in, const Numbers& numbers,
                const IntExpr& worker) {
  switch (arrays) {
    case 1: return record<1>(chain, n, out, {in[0]}, numbers, worker);
    case 2: return record<2>(chain, n, out, {in[0], in[1]}, numbers, worker);
    case 3: return record<3>(chain, n, out, {in[0], in[1], in[2]}, numbers, worker);
    default: return record<4>(chain, n, out, in, numbers, worker);
  }
}

using Array = Ptr<Float>;
using Compiled =
    Kernel<Int, Array, Array, Array, Array, Array, Array, Array, Float, Float, Float, Float,
           Float, Float>;

Compiled compiled(const Chain& chain, std::size_t arrays, const std::string& name) {
  Compiled kernel = compile(
      [&](Int n, Array o0, Array o1, Array o2, Array a, Array b, Array c, Array d, Float s0,
          Float s1, Float s2, Float s3, Float s4, Float s5) {
        const Outputs out{o0, o1, o2};
        const Numbers numbers{s0, s1, s2, s3, s4, s5};
        record_any(chain, arrays, n, out, {a, b, c, d}, numbers, me());
      },
      name.c_str());
  return kernel;
}

// The layout in memory of an entry for a list element: the number of elements, the addresses of
// the outputs and the arrays, and the numbers.
constexpr std::size_t kEntry = 16;
constexpr int kOutputsAt = 1, kArraysAt = kOutputsAt + static_cast<int>(kMaxOutputs),
              kNumbersAt = kArraysAt + static_cast<int>(kMaxArrays);
static_assert(kNumbersAt + kMaxNumbers <= kEntry);

using CompiledList = Kernel<Int, Ptr<Int>>;

CompiledList compiled_list(const Chain& chain, std::size_t arrays, const std::string& name) {
  CompiledList kernel = compile(
      [&](Int parts, Ptr<Int> table) {
        // To balance the load, each list element starts on a different QPU.
        Int worker = me();
        For (Int part = 0, part < parts, part = part + 1)
          Int entry;
          learning::read(entry, table + ((part << 4) + index()));
          const auto pointer = [&](int place) {
            return PtrExpr<Float>(qpu::detail::FromNode(broadcast(entry, place).node()));
          };
          Outputs out;
          for (std::size_t i = 0; i < chain.stored.size(); ++i)
            out.at(i) = pointer(kOutputsAt + static_cast<int>(i));
          qpu::kernels::Pointers<kMaxArrays> in;
          for (std::size_t i = 0; i < arrays; ++i)
            in.at(i) = pointer(kArraysAt + static_cast<int>(i));
          Numbers numbers;
          const auto used = static_cast<std::size_t>(
              std::count(chain.is_array.begin(), chain.is_array.end(), false));
          for (std::size_t i = 0; i < used; ++i)
            numbers.at(i) = asFloat(broadcast(entry, kNumbersAt + static_cast<int>(i)));
          Int n = broadcast(entry, 0);
          record_any(chain, arrays, n, out, in, numbers, worker);
          worker = worker + 1;
          If (worker >= numQPUs())
            worker = 0;
          End
        End
      },
      name.c_str());
  return kernel;
}

template <typename K>
struct Cache {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const K>> kernels;

  static Cache& instance() {
    static auto* const cache = new Cache;
    return *cache;
  }

  std::size_t size() {
    const std::lock_guard<std::mutex> lock(mutex);
    return kernels.size();
  }
};

// Returns the kernel of a chain. `make` compiles each kernel when it is first used.
template <typename K>
K kernel_of(const std::string& text, const std::vector<Operand>& inputs, std::size_t outputs,
            K (*make)(const Chain&, std::size_t, const std::string&)) {
  std::vector<bool> is_array;
  std::string key;
  for (const Operand& input : inputs) {
    is_array.push_back(input.data != nullptr);
    key += is_array.back() ? 'a' : 'n';
  }
  const auto arrays =
      static_cast<std::size_t>(std::count(is_array.begin(), is_array.end(), true));
  if (arrays > kMaxArrays || inputs.size() - arrays > kMaxNumbers)
    refuse(text, "it has more than " + std::to_string(kMaxArrays) + " arrays or " +
                     std::to_string(kMaxNumbers) + " numbers");
  if (arrays == 0) refuse(text, "it has no arrays");
  key += ':' + text;
  Cache<K>& cache = Cache<K>::instance();
  const std::lock_guard<std::mutex> lock(cache.mutex);
  auto& known = cache.kernels[key];
  if (!known) {
    const Chain chain = parsed(text, is_array);
    if (chain.stored.empty() || chain.stored.size() > kMaxOutputs)
      refuse(text, "it stores " + std::to_string(chain.stored.size()) + " values, not 1 to " +
                       std::to_string(kMaxOutputs));
    known = std::make_shared<const K>(make(chain, arrays, key));
  }
  const auto stored = static_cast<std::size_t>(std::count(
      text.begin() + static_cast<std::ptrdiff_t>(text.find('>')), text.end(), ','));
  if (outputs != stored + 1) refuse(text, std::to_string(outputs) + " outputs are given");
  return *known;
}

}  // namespace

void run_chain(const std::string& text, const std::vector<Operand>& inputs,
               const std::vector<float*>& outputs, int n, int qpus) {
  const auto kernel = kernel_of<Compiled>(text, inputs, outputs.size(), compiled);
  if (n <= 0) return;
  std::vector<const float*> arrays;
  std::array<float, kMaxNumbers> numbers{};
  std::size_t number = 0;
  for (const Operand& input : inputs) {
    if (input.data != nullptr) arrays.push_back(input.data);
    else numbers.at(number++) = input.value;
  }
  const auto input = [&](std::size_t i) { return learning::at(arrays[i < arrays.size() ? i : 0]); };
  const auto output = [&](std::size_t i) {
    return learning::at(outputs[i < outputs.size() ? i : 0]);
  };
  learning::run(kernel, qpus, n, output(0), output(1), output(2), input(0), input(1), input(2),
                input(3), numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]);
}

void run_chains(const std::string& text, const std::vector<Part>& parts, int qpus) {
  std::vector<int> entries;
  for (const Part& part : parts) {
    if (part.n <= 0) continue;
    std::array<int, kEntry> entry{};
    entry[0] = part.n;
    const auto put = [&](std::size_t place, const float* p) {
      entry.at(place) = static_cast<int>(learning::at(p).address());
    };
    for (std::size_t i = 0; i < part.outputs.size(); ++i) put(kOutputsAt + i, part.outputs[i]);
    std::size_t array = kArraysAt, number = kNumbersAt;
    for (const Operand& input : part.inputs) {
      if (input.data != nullptr) put(array++, input.data);
      else std::memcpy(&entry.at(number++), &input.value, sizeof(float));
    }
    entries.insert(entries.end(), entry.begin(), entry.end());
  }
  if (entries.empty()) return;
  const auto kernel =
      kernel_of<CompiledList>(text, parts[0].inputs, parts[0].outputs.size(), compiled_list);
  const learning::Table<int> table(entries);
  learning::run(kernel, qpus, static_cast<int>(entries.size() / kEntry), table.place());
}

std::size_t compiled_chains() {
  return Cache<Compiled>::instance().size() + Cache<CompiledList>::instance().size();
}

}  // namespace torch_qpu
