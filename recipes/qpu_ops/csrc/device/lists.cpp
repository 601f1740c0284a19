// Operators on lists of tensors, including the optimisers. Each list is processed in a single
// launch.
#include "operators.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace torch_qpu::lists {  // operators.cpp has functions with the same names
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

// A chain that runs on lists. `arrays` contains the lists of tensors. `written` contains the
// indices of the lists that receive the chain's results, in the order of the results. `numbers`
// contains, for each position in the lists, the chain's inputs that are numbers.
struct Lists {
  std::vector<Tensors> arrays;
  std::vector<std::size_t> written;
  std::vector<std::vector<float>> numbers;

  std::size_t size() const { return arrays[0].size(); }
};

// Returns true if kernels can process the elements in memory order. This requires that all tensors
// have the same sizes and are dense in the same order. Operands that are only read are copied if
// they do not meet this requirement. Also returns false if an output overlaps an operand but is not
// the same view. In this case, the CPU reports the error.
bool make_alike(Lists& lists) {
  for (const Tensors& list : lists.arrays)
    if (list.size() != lists.size()) return false;
  const auto is_written = [&](std::size_t a) {
    return std::find(lists.written.begin(), lists.written.end(), a) != lists.written.end();
  };
  for (std::size_t i = 0; i < lists.size(); ++i) {
    const Tensor& first = lists.arrays[0][i];
    for (std::size_t a = 0; a < lists.arrays.size(); ++a) {
      Tensor& t = lists.arrays[a][i];
      if (!usable(t) || t.sizes() != first.sizes()) return false;
      for (const std::size_t w : lists.written)
        if (at::get_overlap_status(lists.arrays[w][i], t) == at::MemOverlapStatus::Partial)
          return false;
      if (t.strides() == first.strides() && t.is_non_overlapping_and_dense()) continue;
      if (is_written(a) || !first.is_contiguous()) return false;
      t = dense(t);
    }
  }
  return true;
}

// Returns true if the output of each list element is separate from the memory that other elements
// read or write. The outputs must be separate because list elements are computed in parallel.
bool are_apart(const std::vector<Part>& parts) {
  struct Range {
    std::uintptr_t start, end;
    std::size_t part;
    bool written;
  };
  std::vector<Range> ranges;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto add = [&](const float* p, bool written) {
      const auto start = reinterpret_cast<std::uintptr_t>(p);
      ranges.push_back(
          {start, start + static_cast<std::size_t>(parts[i].n) * sizeof(float), i, written});
    };
    for (const Operand& input : parts[i].inputs)
      if (input.data != nullptr) add(input.data, false);
    for (const float* output : parts[i].outputs) add(output, true);
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.start < b.start; });
  for (std::size_t i = 0; i < ranges.size(); ++i)
    for (std::size_t j = i + 1; j < ranges.size() && ranges[j].start < ranges[i].end; ++j)
      if (ranges[i].part != ranges[j].part && (ranges[i].written || ranges[j].written))
        return false;
  return true;
}

// Runs a chain on lists. The results go to `outputs` or, if `outputs` is empty, to the arrays.
// Returns false if the QPUs cannot run the chain.
bool run_lists(const char* name, const std::string& steps, Lists lists,
               const std::vector<Tensors>& outputs = {}) {
  if (lists.size() == 0) return true;
  for (const std::vector<float>& numbers : lists.numbers)
    for (const float number : numbers)
      if (!std::isfinite(number)) return false;
  if (!make_alike(lists)) return false;
  std::vector<Part> parts;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < lists.size(); ++i) {
    Part part;
    part.n = static_cast<int>(lists.arrays[0][i].numel());
    if (part.n == 0) continue;
    for (const Tensors& list : lists.arrays)
      part.inputs.push_back({list[i].const_data_ptr<float>(), 0});
    for (const float number : lists.numbers[i]) part.inputs.push_back({nullptr, number});
    for (const std::size_t a : lists.written)
      part.outputs.push_back(lists.arrays[a][i].mutable_data_ptr<float>());
    for (const Tensors& list : outputs)
      part.outputs.push_back(list[i].mutable_data_ptr<float>());
    bytes += (part.inputs.size() - lists.numbers[i].size() + part.outputs.size()) *
             lists.arrays[0][i].nbytes();
    parts.push_back(std::move(part));
  }
  if (parts.empty()) return true;
  if (!are_apart(parts)) return false;
  launch(name, bytes, [&] { run_chains(steps, parts, qpus()); });
  return true;
}

// --- operators on lists --------------------------------------------------------

// The form in which an operator receives its numbers: none, one for all tensors, one for each
// tensor, or a tensor.
enum class Given : std::uint8_t { none, one, each, tensor };

// Returns the numbers for each position in the lists, or std::nullopt if one of them is complex.
// Numbers beyond the range of float32 become infinities.
std::optional<std::vector<std::vector<float>>> numbers_of(const Call& call, std::size_t place,
                                                          Given given, std::size_t count) {
  if (given == Given::none) return std::vector<std::vector<float>>(count);
  std::vector<at::Scalar> scalars;
  if (given == Given::tensor) {
    const Tensor& t = call.tensor(place);
    if (t.dim() != 0 || !t.is_floating_point()) return std::nullopt;
    scalars.assign(count, t.item());
  } else if (given == Given::one) {
    scalars.assign(count, call[place].toScalar());
  } else {
    for (const c10::IValue& value : call[place].toListRef()) scalars.push_back(value.toScalar());
  }
  std::vector<std::vector<float>> found;
  for (const at::Scalar& scalar : scalars) {
    if (scalar.isComplex()) return std::nullopt;
    found.push_back({static_cast<float>(scalar.to<double>())});
  }
  if (found.size() != count) return std::nullopt;
  return found;
}

struct Spec {
  const char* name;
  const char* steps;
};

// Arguments: `count` lists, followed by the numbers.
template <const Spec& spec, std::size_t count, Given given, bool in_place>
bool on_lists(Call& call) {
  Lists lists;
  for (std::size_t i = 0; i < count; ++i) lists.arrays.push_back(call[i].toTensorVector());
  auto numbers = numbers_of(call, count, given, lists.size());
  if (!numbers.has_value()) return false;
  lists.numbers = std::move(*numbers);
  if (in_place) {
    lists.written = {0};
    if (!run_lists(spec.name, spec.steps, lists)) return false;
    call.finish({});
    return true;
  }
  Lists alike = lists;
  if (!make_alike(alike)) return false;
  Tensors results;
  for (const Tensor& t : alike.arrays[0]) results.push_back(at::empty_like(t));
  if (!run_lists(spec.name, spec.steps, std::move(alike), {results})) return false;
  call.finish({results});
  return true;
}

constexpr Spec kAddScaled{"foreach_add", "mul 1 2;add 0 3>4"};
constexpr Spec kSubScaled{"foreach_sub", "mul 1 2;sub 0 3>4"};
constexpr Spec kAddNumber{"foreach_add", "add 0 1>2"};
constexpr Spec kSubNumber{"foreach_sub", "sub 0 1>2"};
constexpr Spec kMul{"foreach_mul", "mul 0 1>2"};
constexpr Spec kDiv{"foreach_div", "div 0 1>2"};
constexpr Spec kMaximum{"foreach_maximum", "max 0 1>2"};
constexpr Spec kMinimum{"foreach_minimum", "min 0 1>2"};
constexpr Spec kAddcmul{"foreach_addcmul", "mul 1 2;mul 4 3;add 0 5>6"};
constexpr Spec kAddcdiv{"foreach_addcdiv", "div 1 2;mul 4 3;add 0 5>6"};
constexpr Spec kSqrt{"foreach_sqrt", "sqrt 0>1"};
constexpr Spec kNeg{"foreach_neg", "neg 0>1"};
constexpr Spec kAbs{"foreach_abs", "abs 0>1"};
constexpr Spec kReciprocal{"foreach_reciprocal", "recip 0>1"};
constexpr Spec kLerp{"foreach_lerp", "sub 1 0;mul 3 2;add 0 4>5"};

// The formula of kLerp is used only for weights with a magnitude below one half.
template <Given given, bool in_place>
bool lerp(Call& call) {
  const auto weights = numbers_of(call, 2, given, call[0].toTensorVector().size());
  if (!weights.has_value()) return false;
  for (const std::vector<float>& w : *weights)
    if (!(std::abs(w[0]) < 0.5F)) return false;
  return on_lists<kLerp, 2, given, in_place>(call);
}

// --- optimisers ----------------------------------------------------------------

// Adds a number to counters, which are tensors without dimensions. Before each step, fused
// optimisers increment one counter per parameter. The CPU adds the number in place, as for
// batch normalisation's counter, so that an optimiser's step is a single launch.
bool add_number(Call& call) {
  const Tensors counters = call[0].toTensorVector();
  const auto is_counter = [](const Tensor& t) { return usable(t) && t.dim() == 0; };
  if (!call.is_real(1) || !std::all_of(counters.begin(), counters.end(), is_counter))
    return on_lists<kAddNumber, 1, Given::one, true>(call);
  const Span span(Kind::copy, "counter", counters.size() * sizeof(float));
  for (const Tensor& counter : counters) {
    float count = 0;
    copy_words(&count, counter.const_data_ptr(), sizeof count);
    count += static_cast<float>(call[1].toScalar().to<double>());
    copy_words(counter.mutable_data_ptr(), &count, sizeof count);
  }
  call.finish({});
  return true;
}

// Writes the text of a chain. Values are identified by their numbers.
class Writer {
 public:
  explicit Writer(std::size_t inputs) : next_(inputs) {}

  std::size_t operator()(const char* step, std::initializer_list<std::size_t> of) {
    if (!text_.empty()) text_ += ';';
    text_ += step;
    for (const std::size_t value : of) text_ += ' ' + std::to_string(value);
    return next_++;
  }
  std::string stored(std::initializer_list<std::size_t> values) const {
    std::string all = text_;
    char mark = '>';
    for (const std::size_t value : values) {
      all += mark + std::to_string(value);
      mark = ',';
    }
    return all;
  }

 private:
  std::size_t next_;
  std::string text_;
};

float rate_of(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor().item<float>() : value.toScalar().to<float>();
}

// Arguments: self, gradients, averages, averages of squares, maxima of these averages, steps,
// rate, beta1, beta2, decay, epsilon, amsgrad, maximize, scale?, overflow?.
template <bool decoupled>
bool adam(Call& call) {
  if (call[11].toBool() || optional(call[13]).has_value() || optional(call[14]).has_value())
    return false;
  Lists lists;
  for (std::size_t i = 0; i < 4; ++i) lists.arrays.push_back(call[i].toTensorVector());
  lists.written = {0, 2, 3};
  const Tensors steps = call[5].toTensorVector();
  if (steps.size() != lists.size()) return false;
  const double rate = rate_of(call[6]), beta1 = call[7].toDouble(), beta2 = call[8].toDouble();
  const double decay = call[9].toDouble(), epsilon = call[10].toDouble();
  const bool maximize = call[12].toBool();
  // With c1 = 1 - beta1^step and c2 = sqrt(1 - beta2^step), the change of a parameter is
  //   rate / c1 m / (sqrt(v) / c2 + epsilon) = (rate c2 / c1) m / (sqrt(v) + epsilon c2).
  for (const Tensor& step : steps) {
    if (step.numel() != 1 || step.scalar_type() != at::kFloat) return false;
    const double count = step.item<float>();
    const double c1 = 1 - std::pow(beta1, count), c2 = std::sqrt(1 - std::pow(beta2, count));
    std::vector<float> numbers;
    for (const double number : {1 - beta1, beta2, 1 - beta2, epsilon * c2, rate * c2 / c1,
                                decoupled ? 1 - rate * decay : decay})
      numbers.push_back(static_cast<float>(number));
    if (decay == 0) numbers.pop_back();
    lists.numbers.push_back(std::move(numbers));
  }
  constexpr std::size_t one_less_beta1 = 4, beta2_at = 5, one_less_beta2 = 6, epsilon_at = 7,
                        rate_at = 8, decay_at = 9;
  Writer write(decay == 0 ? 9 : 10);
  std::size_t p = 0, g = 1;
  if (maximize) g = write("neg", {g});
  if (decay != 0 && decoupled) p = write("mul", {p, decay_at});
  if (decay != 0 && !decoupled) g = write("add", {g, write("mul", {p, decay_at})});
  const std::size_t m =
      write("add", {2, write("mul", {write("sub", {g, 2}), one_less_beta1})});
  const std::size_t squares = write("mul", {write("mul", {g, g}), one_less_beta2});
  const std::size_t v = write("add", {write("mul", {3, beta2_at}), squares});
  const std::size_t below = write("add", {write("sqrt", {v}), epsilon_at});
  const std::size_t move = write("mul", {write("div", {m, below}), rate_at});
  p = write("sub", {p, move});
  if (!run_lists(decoupled ? "fused_adamw" : "fused_adam", write.stored({p, m, v}),
                 std::move(lists)))
    return false;
  call.finish({});
  return true;
}

// Arguments: self, gradients, momenta, decay, momentum, rate, dampening, nesterov, maximize,
// first step, scale?, overflow?.
bool sgd(Call& call) {
  if (optional(call[10]).has_value() || optional(call[11]).has_value()) return false;
  const double decay = call[3].toDouble(), momentum = call[4].toDouble();
  const double rate = rate_of(call[5]), dampening = call[6].toDouble();
  const bool nesterov = call[7].toBool(), maximize = call[8].toBool(), first = call[9].toBool();
  Lists lists;
  const std::size_t arrays = momentum == 0 ? 2 : 3;
  for (std::size_t i = 0; i < arrays; ++i) lists.arrays.push_back(call[i].toTensorVector());
  lists.written = momentum == 0 ? std::vector<std::size_t>{0} : std::vector<std::size_t>{0, 2};
  const std::size_t rate_at = arrays, decay_at = arrays + 1, momentum_at = arrays + 2,
                    rest_at = arrays + 3;
  lists.numbers.assign(lists.size(),
                       {static_cast<float>(rate), static_cast<float>(decay),
                        static_cast<float>(momentum), static_cast<float>(1 - dampening)});
  Writer write(arrays + 4);
  std::size_t g = 1;
  if (maximize) g = write("neg", {g});
  if (decay != 0) g = write("add", {g, write("mul", {0, decay_at})});
  std::size_t buffer = g;
  if (momentum != 0 && !first)
    buffer = write("add", {write("mul", {2, momentum_at}), write("mul", {g, rest_at})});
  std::size_t step = buffer;
  if (momentum != 0 && nesterov) step = write("add", {g, write("mul", {buffer, momentum_at})});
  const std::size_t p = write("sub", {0, write("mul", {step, rate_at})});
  const std::string steps = momentum == 0 ? write.stored({p}) : write.stored({p, buffer});
  if (!run_lists("fused_sgd", steps, std::move(lists))) return false;
  call.finish({});
  return true;
}

// Registers both the functional form and the in-place form of an operator on lists.
template <const Spec& spec, std::size_t count, Given given>
void both(torch::Library& m, const std::string& name, const std::string& overload) {
  const std::string dot = overload.empty() ? "" : "." + overload;
  m.impl(("_foreach_" + name + dot).c_str(), kernel<on_lists<spec, count, given, false>>());
  m.impl(("_foreach_" + name + "_" + dot).c_str(), kernel<on_lists<spec, count, given, true>>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  both<kAddScaled, 2, Given::one>(m, "add", "List");
  m.impl("_foreach_add.Scalar", kernel<on_lists<kAddNumber, 1, Given::one, false>>());
  m.impl("_foreach_add_.Scalar", kernel<add_number>());
  both<kAddNumber, 1, Given::each>(m, "add", "ScalarList");
  both<kSubScaled, 2, Given::one>(m, "sub", "List");
  both<kSubNumber, 1, Given::one>(m, "sub", "Scalar");
  both<kSubNumber, 1, Given::each>(m, "sub", "ScalarList");
  both<kMul, 2, Given::none>(m, "mul", "List");
  both<kMul, 1, Given::one>(m, "mul", "Scalar");
  both<kMul, 1, Given::each>(m, "mul", "ScalarList");
  both<kMul, 1, Given::tensor>(m, "mul", "Tensor");
  both<kDiv, 2, Given::none>(m, "div", "List");
  both<kDiv, 1, Given::one>(m, "div", "Scalar");
  both<kDiv, 1, Given::each>(m, "div", "ScalarList");
  both<kDiv, 1, Given::tensor>(m, "div", "Tensor");
  both<kMaximum, 2, Given::none>(m, "maximum", "List");
  both<kMaximum, 1, Given::one>(m, "maximum", "Scalar");
  both<kMinimum, 2, Given::none>(m, "minimum", "List");
  both<kMinimum, 1, Given::one>(m, "minimum", "Scalar");
  both<kAddcmul, 3, Given::one>(m, "addcmul", "Scalar");
  both<kAddcmul, 3, Given::each>(m, "addcmul", "ScalarList");
  both<kAddcdiv, 3, Given::one>(m, "addcdiv", "Scalar");
  both<kAddcdiv, 3, Given::each>(m, "addcdiv", "ScalarList");
  both<kSqrt, 1, Given::none>(m, "sqrt", "");
  both<kNeg, 1, Given::none>(m, "neg", "");
  both<kAbs, 1, Given::none>(m, "abs", "");
  both<kReciprocal, 1, Given::none>(m, "reciprocal", "");
  m.impl("_foreach_lerp.Scalar", kernel<lerp<Given::one, false>>());
  m.impl("_foreach_lerp_.Scalar", kernel<lerp<Given::one, true>>());
  m.impl("_foreach_lerp.ScalarList", kernel<lerp<Given::each, false>>());
  m.impl("_foreach_lerp_.ScalarList", kernel<lerp<Given::each, true>>());

  m.impl("_fused_adam_", kernel<adam<false>>());
  m.impl("_fused_adam_.tensor_lr", kernel<adam<false>>());
  m.impl("_fused_adamw_", kernel<adam<true>>());
  m.impl("_fused_adamw_.tensor_lr", kernel<adam<true>>());
  m.impl("_fused_sgd_", kernel<sgd>());
  m.impl("_fused_sgd_.tensor_lr", kernel<sgd>());
}

}  // namespace
}  // namespace torch_qpu::lists
