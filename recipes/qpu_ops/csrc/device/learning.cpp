#include "learning.h"

#include <qpu/ieee.h>

#include "kernel_parts.h"

namespace torch_qpu::learning {
namespace {

// --- indices -------------------------------------------------------------------

void take_planes(Int planes, Int size, Ptr<Int> firsts, Ptr<Int> places, Ptr<Float> out,
                 Ptr<Float> in) {
  overPlanes<kShort>(planes, size, out, [&](const Int& plane, const IntExpr& first) {
    Int start, place;
    gather(firsts + plane);
    gather(places + min(first + index(), size - 1));
    receive(start);
    receive(place);
    Float v;
    read(v, in + (start + max(place, 0)));
    return qpu::select(place >= 0, v, 0);
  });
}

// Each index consists of two words, of which the low word comes first. `rows` and `columns` contain
// the first row and column of the window for each output.
void places_in_planes(Int planes, Int words, Int height, Int width, Ptr<Int> rows,
                      Ptr<Int> columns, Int kernel_height, Int kernel_width, Int step_y,
                      Int step_x, Ptr<Float> out, Ptr<Float> in) {
  Int size = height * width;
  overPlanes<kShort>(planes, words, out, [&](const Int& plane, const IntExpr& first) {
    Int word = first + index();
    Int pixel = min(word, words - 1) >> 1;
    Int row, left;
    gather(rows + pixel);
    gather(columns + pixel);
    receive(row);
    receive(left);
    Ptr<Float> image = in + plane * size;
    Float most = -std::numeric_limits<float>::infinity();
    Int place = -1;
    For (Int y = 0, y < kernel_height, y = y + 1)
      Int column = left;
      For (Int x = 0, x < kernel_width, x = x + 1)
        Int here = qpu::select(row >= 0 && row < height && column >= 0 && column < width,
                               row * width + column, -1);
        Float v;
        read(v, image + max(here, 0));
        Where (here >= 0 && (v > most || place < 0))
          most = v;
          place = here;
        End
        column = column + step_x;
      End
      row = row + step_y;
    End
    return asFloat(qpu::select((word & 1) == 0, place, place >> 31));
  });
}

// Each element is in at most `covers` windows. Entry [i][element] of the table is the output that
// belongs to one of these windows, or a negative number.
void pooled_gradient(Int planes, Int size, Int pixels, Int covers, Ptr<Int> table,
                     Ptr<Int> places, Ptr<Float> gradient, Ptr<Float> out) {
  overPlanes<kShort>(planes, size, out, [&](const Int& plane, const IntExpr& first) {
    Int own = min(first + index(), size - 1);
    Ptr<Int> entry = table + own;
    Int before = plane * pixels;
    Float sum = 0;
    For (Int i = 0, i < covers, i = i + 1)
      Int pixel;
      read(pixel, entry);
      Int from = before + max(pixel, 0);
      Int place;
      Float g;
      gather(places + (from + from));
      gather(gradient + from);
      receive(place);
      receive(g);
      sum = sum + qpu::select(pixel >= 0 && place == own, g, 0);
      entry = entry + size;
    End
    return sum;
  });
}

// --- channels ------------------------------------------------------------------

// Calls body(plane, channel) for the planes that this QPU computes.
template <typename Body>
void over_channels(const Int& planes, const Int& channels, Body body) {
  Int channel = me();
  For (Int plane = me(), plane < planes, plane = plane + numQPUs())
    While (channel >= channels)
      channel = channel - channels;
    End
    body(plane, channel);
    channel = channel + numQPUs();
  End
}

void plane_moments(Int planes, Int channels, Int size, Ptr<Float> middle_a, Ptr<Float> middle_b,
                   Ptr<Float> out, Ptr<Float> a, Ptr<Float> b) {
  over_channels(planes, channels, [&](const Int& plane, const Int& channel) {
    Float p, q;
    gather(middle_a + channel);
    gather(middle_b + channel);
    receive(p);
    receive(q);
    Int start = plane * size;
    Pointers<2> from;
    from[0] = a + start;
    from[1] = b + start;
    Sum sum, product;
    walk<2, kShort>(
        size, from, 0, 1,
        [&](int /*place*/, Vectors<2>& x) {
          Float d = x[0] - p;
          sum.add(d);
          product.add(d * (x[1] - q));
        },
        [](const IntExpr& /*first*/) {},
        [&](Vectors<2>& x, const Int& /*first*/, const Int& count) {
          Float d = qpu::select(index() < count, x[0] - p, 0);
          sum.add(d);
          product.add(d * (x[1] - q));
        });
    Float first = qpu::sumOf(sum.total - sum.lost);
    Float second = qpu::sumOf(product.total - product.lost);
    store(qpu::select(index() == 0, first, second), out + (plane + plane), 2);
  });
}

void blend_planes(Int planes, Int channels, Int size, Ptr<Float> table, Ptr<Float> out,
                  Ptr<Float> a, Ptr<Float> b) {
  Int vpm_row = firstVpmRow<kShort>();
  over_channels(planes, channels, [&](const Int& plane, const Int& channel) {
    std::array<Float, 4> c;
    Ptr<Float> entry = table + (channel << 2);
    for (int i = 0; i < 4; ++i) gather(entry + i);
    for (Float& v : c) receive(v);
    Int start = plane * size;
    Pointers<2> from;
    from[0] = a + start;
    from[1] = b + start;
    Ptr<Float> to = out + start;
    const auto value = [&](const Vectors<2>& x) {
      return (x[0] - c[0]) * c[1] + (x[1] - c[2]) * c[3];
    };
    std::array<Float, kShort> result;
    walk<2, kShort>(
        size, from, 0, 1,
        [&](int j, Vectors<2>& x) { result[static_cast<std::size_t>(j)] = value(x); },
        [&](const IntExpr& first) { burst(result, to + first, vpm_row); },
        [&](Vectors<2>& x, const Int& first, const Int& count) {
          finishBursts();
          store(value(x), to + first, count);
        });
    finishBursts();
  });
}

// --- rows of classes -----------------------------------------------------------

void log_softmax_rows(Int rows, Int columns, Ptr<Float> out, Ptr<Float> a) {
  Int vpm_row = firstVpmRow<kShort>();
  For (Int row = me(), row < rows, row = row + numQPUs())
    Pointers<1> from;
    from[0] = a + row * columns;
    Float most = -std::numeric_limits<float>::max();
    Int size = 0;
    const auto raise = [&](const Float& x) {
      most = max(most, x);
      size = max(size, qpu::ieee::magnitude(x));
    };
    // The last vectors repeat the last element, which does not change the maximum.
    walk<1, kShort>(
        columns, from, 0, 1, [&](int /*place*/, Vectors<1>& x) { raise(x[0]); },
        [](const IntExpr& /*first*/) {},
        [&](Vectors<1>& x, const Int& /*first*/, const Int& /*count*/) { raise(x[0]); });
    Float greatest = qpu::maxOf(most);
    Float total = sum_of_row<1>(
        columns, from, [&](const Vectors<1>& x) { return qpu::exp(x[0] - greatest); });
    // If a row contains NaN or +Inf, or only -Inf, its results are NaN.
    Float shift = qpu::select(qpu::maxOf(size) > qpu::ieee::kInf || total == 0,
                              qpu::ieee::nan(), qpu::log(total));
    store_row<1>(columns, from, out + row * columns, vpm_row, [&](const Vectors<1>& x) {
      return qpu::ieee::keepNan(shift, x[0] - greatest - shift);
    });
  End
}

template <bool of_log>
void softmax_gradient(Int rows, Int columns, Ptr<Float> out, Ptr<Float> gradient,
                      Ptr<Float> result) {
  Int vpm_row = firstVpmRow<kShort>();
  For (Int row = me(), row < rows, row = row + numQPUs())
    Int start = row * columns;
    Pointers<2> from;
    from[0] = gradient + start;
    from[1] = result + start;
    Float total = sum_of_row<2>(columns, from, [](const Vectors<2>& x) -> FloatExpr {
      if (of_log) return x[0];
      return x[0] * x[1];
    });
    store_row<2>(columns, from, out + start, vpm_row, [&](const Vectors<2>& x) -> FloatExpr {
      if (of_log) return x[0] - qpu::exp(x[1]) * total;
      return x[1] * (x[0] - total);
    });
  End
}

// Reads targets of two words each. Determines whether each target is a class, and which class that
// is.
struct Target {
  Int low;
  Int high;

  explicit Target(const PtrExpr<Int>& from) {
    gather(from);
    gather(from + 1);
    receive(low);
    receive(high);
  }
  BoolExpr is(const Int& lows, const Int& highs) const { return low == lows && high == highs; }
  BoolExpr is_class(const Int& classes) const {
    return high == 0 && low >= 0 && low < classes;
  }
  // Returns the class, or an arbitrary valid class if the target is not a class.
  Int known(const Int& classes) const { return qpu::select(is_class(classes), low, 0); }
};

void nll_rows(Int rows, Int classes, Int ignored_low, Int ignored_high, Ptr<Float> losses,
              Ptr<Float> sums, Ptr<Float> a, Ptr<Int> targets, Ptr<Float> weights,
              Int weight_step) {
  Sum loss, weight;
  Int unknown = 0;
  For (Int first = me() << 4, first < rows, first = first + (numQPUs() << 4))
    Int row = min(first + index(), rows - 1);
    const Target target(targets + (row + row));
    Int known = target.known(classes);
    Float v, w;
    gather(a + (row * classes + known));
    gather(weights + known * weight_step);
    receive(v);
    receive(w);
    Int counts = qpu::select(target.is(ignored_low, ignored_high), IntExpr(0), 1);
    w = qpu::select(counts == 1, w, 0);
    Float term = FloatExpr(0) - v * w;
    store(term, losses + first, min(rows - first, 16));
    Int own = qpu::select(first + index() < rows, IntExpr(1), 0);
    loss.add(qpu::select(own == 1, term, 0));
    weight.add(qpu::select(own == 1, w, 0));
    unknown = unknown | qpu::select(target.is_class(classes), 0, own & counts);
  End
  Float total = qpu::sumOf(loss.total - loss.lost);
  Float weights_sum = qpu::sumOf(weight.total - weight.lost);
  Float faults = toFloat(qpu::sumOf(unknown));
  Float row = qpu::select(index() == 0, total, qpu::select(index() == 1, weights_sum, faults));
  store(row, sums + (me() << 4), 3);
}

void nll_gradient(Int rows, Int classes, Int ignored_low, Int ignored_high, Float factor,
                  Ptr<Float> out, Ptr<Float> gradient, Int gradient_step, Ptr<Int> targets,
                  Ptr<Float> weights, Int weight_step) {
  For (Int row = me(), row < rows, row = row + numQPUs())
    const Target target(targets + (row + row));
    Int known = target.known(classes);
    Float w, g;
    gather(weights + known * weight_step);
    gather(gradient + row * gradient_step);
    receive(w);
    receive(g);
    Float value = qpu::select(target.is_class(classes), g * w * factor, 0);
    Where (target.is(ignored_low, ignored_high))
      value = 0;
    End
    Ptr<Float> to = out + row * classes;
    For (Int c = 0, c < classes, c = c + 16)
      store(qpu::select(c + index() == known, value, 0), to + c, min(classes - c, 16));
    End
  End
}

// For each element of a plane, the outputs whose windows contain the element. The table contains
// `covers` entries per element.
struct Covers {
  int covers = 0;
  std::vector<int> table;
};

Covers covers(const Pooling& s) {
  const auto size = static_cast<std::size_t>(s.height) * static_cast<std::size_t>(s.width);
  std::vector<std::vector<int>> of(size);
  for (int y = 0; y < s.out_height; ++y)
    for (int x = 0; x < s.out_width; ++x)
      for (int i = 0; i < s.kernel_height; ++i)
        for (int j = 0; j < s.kernel_width; ++j) {
          const int row = y * s.stride_y - s.padding_y + i * s.dilation_y;
          const int column = x * s.stride_x - s.padding_x + j * s.dilation_x;
          if (row < 0 || row >= s.height || column < 0 || column >= s.width) continue;
          of[static_cast<std::size_t>(row) * static_cast<std::size_t>(s.width) +
             static_cast<std::size_t>(column)]
              .push_back(y * s.out_width + x);
        }
  Covers found;
  for (const auto& outputs : of)
    found.covers = std::max(found.covers, static_cast<int>(outputs.size()));
  found.table.assign(size * static_cast<std::size_t>(found.covers), -1);
  for (std::size_t element = 0; element < size; ++element)
    for (std::size_t i = 0; i < of[element].size(); ++i)
      found.table[i * size + element] = of[element][i];
  return found;
}

constexpr std::size_t kVector = 16;

}  // namespace

void take(float* out, const float* in, const std::vector<int>& firsts,
          const std::vector<int>& places, int qpus) {
  if (firsts.empty() || places.empty()) return;
  static const auto kernel = compile(take_planes, "take");
  const Table<int> starts(firsts), table(places);
  run(kernel, qpus, static_cast<int>(firsts.size()), static_cast<int>(places.size()),
      starts.place(), table.place(), at(out), at(in));
}

void pool_places(std::int64_t* places, const float* in, const Pooling& s, int qpus) {
  std::vector<int> rows, columns;
  for (int y = 0; y < s.out_height; ++y)
    for (int x = 0; x < s.out_width; ++x) {
      rows.push_back(y * s.stride_y - s.padding_y);
      columns.push_back(x * s.stride_x - s.padding_x);
    }
  if (rows.empty() || s.planes == 0) return;
  static const auto kernel = compile(places_in_planes, "max-places");
  const Table<int> first_rows(rows), first_columns(columns);
  run(kernel, qpus, s.planes, 2 * static_cast<int>(rows.size()), s.height, s.width,
      first_rows.place(), first_columns.place(), s.kernel_height, s.kernel_width, s.dilation_y,
      s.dilation_x, float_words(places), at(in));
}

void pool_backward(float* out, const float* gradient, const std::int64_t* places,
                   const Pooling& s, int qpus) {
  if (s.planes == 0) return;
  static const auto kernel = compile(pooled_gradient, "max-gradient");
  const Covers found = covers(s);
  const Table<int> table(found.table);
  run(kernel, qpus, s.planes, s.height * s.width, s.out_height * s.out_width, found.covers,
      table.place(), words(places), at(gradient), at(out));
}

Moments moments(const float* a, const float* b, const std::vector<float>& middle_a,
                const std::vector<float>& middle_b, const Planes& s, int qpus) {
  const auto channels = static_cast<std::size_t>(s.channels);
  Moments found{std::vector<double>(channels, 0), std::vector<double>(channels, 0)};
  const auto planes = static_cast<std::size_t>(s.batch) * channels;
  if (planes == 0 || s.size == 0) return found;
  static const auto kernel = compile(plane_moments, "moments");
  const std::vector<float> none(channels, 0);
  const Table<float> first(middle_a.empty() ? none : middle_a),
      second(middle_b.empty() ? none : middle_b), sums(2 * planes);
  run(kernel, qpus, static_cast<int>(planes), s.channels, s.size, first.place(), second.place(),
      sums.place(), at(a), at(b));
  for (std::size_t plane = 0; plane < planes; ++plane) {
    found.sum[plane % channels] += sums.data()[2 * plane];
    found.product[plane % channels] += sums.data()[2 * plane + 1];
  }
  return found;
}

void blend(float* out, const float* a, const float* b, const std::vector<Blend>& channels,
           const Planes& s, int qpus) {
  const int planes = s.batch * s.channels;
  if (planes == 0 || s.size == 0) return;
  static const auto kernel = compile(blend_planes, "blend");
  std::vector<float> numbers;
  for (const Blend& c : channels)
    numbers.insert(numbers.end(), {c.middle_a, c.factor_a, c.middle_b, c.factor_b});
  const Table<float> table(numbers);
  run(kernel, qpus, planes, s.channels, s.size, table.place(), at(out), at(a), at(b));
}

void log_softmax(float* out, const float* a, int rows, int columns, int qpus) {
  if (rows == 0 || columns == 0) return;
  static const auto kernel = compile(log_softmax_rows, "log-softmax");
  run(kernel, qpus, rows, columns, at(out), at(a));
}

void log_softmax_backward(float* out, const float* gradient, const float* result, int rows,
                          int columns, int qpus) {
  if (rows == 0 || columns == 0) return;
  static const auto kernel = compile(softmax_gradient<true>, "log-softmax-gradient");
  run(kernel, qpus, rows, columns, at(out), at(gradient), at(result));
}

void softmax_backward(float* out, const float* gradient, const float* result, int rows,
                      int columns, int qpus) {
  if (rows == 0 || columns == 0) return;
  static const auto kernel = compile(softmax_gradient<false>, "softmax-gradient");
  run(kernel, qpus, rows, columns, at(out), at(gradient), at(result));
}

Loss nll(float* losses, const float* a, const Classes& of, int qpus) {
  Loss found;
  if (of.rows == 0) return found;
  static const auto kernel = compile(nll_rows, "nll");
  const auto count = static_cast<std::size_t>(all_if_0(qpus));
  const Table<float> sums(kVector * count), one(std::vector<float>{1});
  run(kernel, qpus, of.rows, of.classes, low_word(of.ignored), high_word(of.ignored), at(losses),
      sums.place(), at(a), words(of.targets), of.weights == nullptr ? one.place() : at(of.weights),
      of.weights == nullptr ? 0 : 1);
  for (std::size_t i = 0; i < count; ++i) {
    const float* const part = sums.data() + kVector * i;
    found.sum += part[0];
    found.weight += part[1];
    found.any_unknown = found.any_unknown || part[2] != 0;
  }
  return found;
}

void nll_backward(float* out, const float* gradient, bool one_gradient, float factor,
                  const Classes& of, int qpus) {
  if (of.rows == 0 || of.classes == 0) return;
  static const auto kernel = compile(nll_gradient, "nll-gradient");
  const Table<float> one(std::vector<float>{1});
  run(kernel, qpus, of.rows, of.classes, low_word(of.ignored), high_word(of.ignored), factor,
      at(out), at(gradient), one_gradient ? 0 : 1, words(of.targets),
      of.weights == nullptr ? one.place() : at(of.weights), of.weights == nullptr ? 0 : 1);
}

}  // namespace torch_qpu::learning
