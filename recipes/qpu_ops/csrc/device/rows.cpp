#include "rows.h"

#include <qpu/ieee.h>

#include "kernel_parts.h"

namespace torch_qpu::learning {
namespace {

// If there are no weights or biases, the row's own elements are read instead and multiplied by 0.
void layer_norm_rows(Int rows, Int columns, Ptr<Float> out, Ptr<Float> mean, Ptr<Float> spread,
                     Ptr<Float> a, Ptr<Float> weight, Float has_weight, Ptr<Float> bias,
                     Float has_bias, Float one_part, Float epsilon) {
  Int vpm_row = firstVpmRow<kShort>();
  Int keep_weight = qpu::select(has_weight > 0, IntExpr(0), -1);
  Int keep_bias = qpu::select(has_bias > 0, IntExpr(0), -1);
  Float no_weight = FloatExpr(1) - has_weight;
  For (Int row = me(), row < rows, row = row + numQPUs())
    Int start = row * columns;
    Pointers<1> own;
    own[0] = a + start;
    // If a row contains Inf or NaN, its results must be NaN, but sums do not preserve NaN.
    Int worst = 0;
    Float middle = sum_of_row<1>(columns, own, [&](const Vectors<1>& x) -> FloatExpr {
      worst = max(worst, qpu::ieee::magnitude(x[0]));
      return x[0];
    }) * one_part;
    worst = qpu::maxOf(worst);
    // The second pass also computes the rounding error of the mean.
    Sum rest, squares;
    walk<1, kShort>(
        columns, own, 0, 1,
        [&](int /*place*/, Vectors<1>& x) {
          Float d = x[0] - middle;
          rest.add(d);
          squares.add(d * d);
        },
        [](const IntExpr& /*first*/) {},
        [&](Vectors<1>& x, const Int& /*first*/, const Int& count) {
          Float d = qpu::select(index() < count, x[0] - middle, 0);
          rest.add(d);
          squares.add(d * d);
        });
    Float shift = qpu::sumOf(rest.total - rest.lost) * one_part;
    Float variance =
        qpu::max(qpu::sumOf(squares.total - squares.lost) * one_part - shift * shift, 0);
    middle = middle + shift;
    Float factor = qpu::reciprocalSqrt(variance + epsilon);
    const auto finite = [&](const FloatExpr& x) {
      return qpu::select(worst >= qpu::ieee::kInf, qpu::ieee::nan(), x);
    };
    store(finite(middle), mean + row, 1);
    store(finite(factor), spread + row, 1);
    Pointers<3> from;
    from[0] = a + start;
    from[1] = weight + (start & keep_weight);
    from[2] = bias + (start & keep_bias);
    store_row<3>(columns, from, out + start, vpm_row, [&](const Vectors<3>& x) -> FloatExpr {
      return finite((x[0] - middle) * factor * (x[1] * has_weight + no_weight) + x[2] * has_bias);
    });
  End
}

void layer_norm_gradient(Int rows, Int columns, Ptr<Float> out, Ptr<Float> gradient, Ptr<Float> a,
                         Ptr<Float> mean, Ptr<Float> spread, Ptr<Float> weight, Float has_weight,
                         Float one_part) {
  Int vpm_row = firstVpmRow<kShort>();
  Int keep_weight = qpu::select(has_weight > 0, IntExpr(0), -1);
  Float no_weight = FloatExpr(1) - has_weight;
  For (Int row = me(), row < rows, row = row + numQPUs())
    Float middle, factor;
    gather(mean + row);
    gather(spread + row);
    receive(middle);
    receive(factor);
    Int start = row * columns;
    Pointers<3> from;
    from[0] = gradient + start;
    from[1] = a + start;
    from[2] = weight + (start & keep_weight);
    Sum sum, product;
    const auto add = [&](const FloatExpr& g, const FloatExpr& x) {
      Float scaled = g;
      sum.add(scaled);
      product.add(scaled * x);
    };
    walk<3, kShort>(
        columns, from, 0, 1,
        [&](int /*place*/, Vectors<3>& x) {
          add(x[0] * (x[2] * has_weight + no_weight), (x[1] - middle) * factor);
        },
        [](const IntExpr& /*first*/) {},
        [&](Vectors<3>& x, const Int& /*first*/, const Int& count) {
          add(qpu::select(index() < count, x[0] * (x[2] * has_weight + no_weight), 0),
              (x[1] - middle) * factor);
        });
    Float first = qpu::sumOf(sum.total - sum.lost) * one_part;
    Float second = qpu::sumOf(product.total - product.lost) * one_part;
    store_row<3>(columns, from, out + start, vpm_row, [&](const Vectors<3>& x) -> FloatExpr {
      return qpu::ieee::keepNan(
          factor,
          (x[0] * (x[2] * has_weight + no_weight) - first - (x[1] - middle) * factor * second) *
              factor);
    });
  End
}

// Distributes groups of 1 << Shift elements of each part among the QPUs. Calls body(part, first)
// for each group.
template <int Shift, typename Body>
void over_parts(const Int& parts, const Int& elements, Body body) {
  constexpr int group = 1 << Shift;
  Int first = me() << Shift, part = 0;
  Int rounded = (elements + (group - 1)) & -group;
  const auto settle = [&] {
    While (first >= rounded)
      first = first - rounded;
      part = part + 1;
    End
  };
  settle();
  While (part < parts)
    body(part, first);
    first = first + (numQPUs() << Shift);
    settle();
  End
}

// Computes sums over the rows in each part. out[part][0] is the sum of the gradient times the
// normalised elements. out[part][1] is the sum of the gradient.
void column_sums(Int parts, Int part_rows, Int rows, Int columns, Ptr<Float> out,
                 Ptr<Float> gradient, Ptr<Float> a, Ptr<Float> mean, Ptr<Float> spread) {
  over_parts<4>(parts, columns, [&](const Int& part, const Int& first) {
    Int column = min(first + index(), columns - 1);
    Int row = part * part_rows;
    Int end = min(row + part_rows, rows);
    Sum sum, product;
    While (row < end)
      Int place = row * columns + column;
      Float g, x, middle, factor;
      gather(gradient + place);
      gather(a + place);
      gather(mean + row);
      gather(spread + row);
      receive(g);
      receive(x);
      receive(middle);
      receive(factor);
      sum.add(g);
      product.add(g * ((x - middle) * factor));
      row = row + 1;
    End
    Ptr<Float> to = out + ((part + part) * columns + first);
    Int left = min(columns - first, 16);
    store(product.total - product.lost, to, left);
    store(sum.total - sum.lost, to + columns, left);
  });
}

// Computes the sum of each column over the rows in each part. Every part must contain a row.
void total_columns(Int parts, Int part_rows, Int rows, Int columns, Ptr<Float> out, Ptr<Float> a,
                   Int row_stride, Int column_stride) {
  constexpr int unrolled = 4;  // number of rows per iteration
  over_parts<4>(parts, columns, [&](const Int& part, const Int& first) {
    Int row = part * part_rows;
    Int end = min(row + part_rows, rows);
    Ptr<Float> next = a + (row * row_stride + min(first + index(), columns - 1) * column_stride);
    Int requested = row;
    // Rows beyond the end are replaced by the last row.
    const auto request = [&] {
      gather(next);
      requested = requested + 1;
      next = next + (row_stride & ((requested - end) >> 31));
    };
    for (int i = 0; i < kInFlight; ++i) request();
    Sum sum;
    While (row < end)
      for (int i = 0; i < unrolled; ++i) {
        Float x;
        receive(x);
        request();
        sum.add(qpu::select(row + i < end, x, 0));
      }
      row = row + unrolled;
    End
    Float unused;
    for (int i = 0; i < kInFlight; ++i) receive(unused);
    store(sum.total - sum.lost, out + (part * columns + first), min(columns - first, 16));
  });
}

// Computes the sum of each row over the columns in each part. Every part must contain a column.
void total_rows(Int parts, Int part_columns, Int rows, Int columns, Ptr<Float> out, Ptr<Float> a,
                Int row_stride) {
  over_parts<0>(parts, rows, [&](const Int& part, const Int& row) {
    Int column = part * part_columns;
    Pointers<1> from;
    from[0] = a + (row * row_stride + column);
    Float sum = sum_of_row<1>(min(part_columns, columns - column), from,
                              [](const Vectors<1>& x) -> FloatExpr { return x[0]; });
    store(sum, out + (part * rows + row), 1);
  });
}

// Converts floats to integers. The conversion preserves the order. NaN comes last.
IntExpr order_of(const Float& x, bool least) {
  Int bits = asInt(x);
  Int magnitude = bits & 0x7fffffff;
  Int order = qpu::select(magnitude == 0, IntExpr(0), bits ^ ((bits >> 31) & 0x7fffffff));
  if (least) order = ~order;
  return qpu::select(magnitude > 0x7f800000, IntExpr(0x7fffffff), order);
}

template <bool least>
void extreme_rows(Int rows, Int columns, Ptr<Float> values, Ptr<Int> places, Ptr<Float> a) {
  For (Int row = me(), row < rows, row = row + numQPUs())
    Int best = std::numeric_limits<int>::min();
    Int where = std::numeric_limits<int>::max();
    Pointers<1> from;
    from[0] = a + row * columns;
    std::array<Int, kShort> order;
    const auto compare = [&](const Int& x, const IntExpr& number) {
      Where (x > best)
        best = x;
        where = number;
      End
    };
    walk<1, kShort>(
        columns, from, 0, 1,
        [&](int j, Vectors<1>& x) { order[static_cast<std::size_t>(j)] = order_of(x[0], least); },
        [&](const IntExpr& first) {
          Int number = first + index();
          for (int j = 0; j < kShort; ++j)
            compare(order[static_cast<std::size_t>(j)], number + 16 * j);
        },
        [&](Vectors<1>& x, const Int& first, const Int& count) {
          // Lanes past the end repeat the last element together with its column number.
          Int o = order_of(x[0], least);
          compare(o, first + min(index(), count - 1));
        });
    Int most = qpu::maxOf(best);
    Int place = qpu::minOf(qpu::select(best == most, where, std::numeric_limits<int>::max()));
    Int order_back = least ? ~most : IntExpr(most);
    Int bits = order_back ^ ((order_back >> 31) & 0x7fffffff);
    store(asFloat(bits), values + row, 1);
    store(place, places + row, 1);
  End
}

// Returns the number of parts into which sums over `length` terms are divided, so that all QPUs
// have work. There are `groups` groups of sums.
int parts_of(int length, int groups) {
  return std::min(length, (kMaxQpus + groups - 1) / groups);
}

// Calls sum(parts, size, out) with the number of parts and their size. `sum` computes `count` sums
// for each part. Then adds the sums of the parts.
template <typename Kernel>
void sum_in_parts(float* to, int count, int length, int groups, Kernel sum) {
  const int most = parts_of(length, groups);
  const int size = (length + most - 1) / most;
  const int parts = (length + size - 1) / size;
  if (parts == 1) return sum(parts, size, at(to));
  const Table<float> sums(static_cast<std::size_t>(parts) * static_cast<std::size_t>(count));
  sum(parts, size, sums.place());
  for (int i = 0; i < count; ++i) {
    double total = 0;
    for (int part = 0; part < parts; ++part)
      total += sums.data()[static_cast<std::size_t>(part) * static_cast<std::size_t>(count) +
                           static_cast<std::size_t>(i)];
    to[i] = static_cast<float>(total);
  }
}

}  // namespace

void layer_norm(const LayerNorm& norm, int qpus) {
  if (norm.rows == 0 || norm.columns == 0) return;
  static const auto kernel = compile(layer_norm_rows, "layer-norm");
  run(kernel, qpus, norm.rows, norm.columns, at(norm.out), at(norm.mean), at(norm.spread),
      at(norm.a), at(norm.weight == nullptr ? norm.a : norm.weight),
      norm.weight == nullptr ? 0.0F : 1.0F, at(norm.bias == nullptr ? norm.a : norm.bias),
      norm.bias == nullptr ? 0.0F : 1.0F, 1.0F / static_cast<float>(norm.columns), norm.epsilon);
}

int kernels_of(const LayerNormGradient& of) {
  return (of.of_a != nullptr ? 1 : 0) +
         (of.of_weight != nullptr || of.of_bias != nullptr ? 1 : 0);
}

void layer_norm_backward(const LayerNormGradient& of, int qpus) {
  if (of.rows == 0 || of.columns == 0) return;
  if (of.of_a != nullptr) {
    static const auto kernel = compile(layer_norm_gradient, "layer-norm-gradient");
    run(kernel, qpus, of.rows, of.columns, at(of.of_a), at(of.gradient), at(of.a), at(of.mean),
        at(of.spread), at(of.weight == nullptr ? of.a : of.weight),
        of.weight == nullptr ? 0.0F : 1.0F, 1.0F / static_cast<float>(of.columns));
  }
  if (of.of_weight == nullptr && of.of_bias == nullptr) return;
  static const auto kernel = compile(column_sums, "column-sums");
  const int parts = parts_of(of.rows, (of.columns + 15) / 16);
  const int part_rows = (of.rows + parts - 1) / parts;
  const auto columns = static_cast<std::size_t>(of.columns);
  const Table<float> sums(2 * static_cast<std::size_t>(parts) * columns);
  run(kernel, qpus, parts, part_rows, of.rows, of.columns, sums.place(), at(of.gradient), at(of.a),
      at(of.mean), at(of.spread));
  const auto join = [&](float* to, std::size_t which) {
    if (to == nullptr) return;
    for (std::size_t c = 0; c < columns; ++c) {
      double sum = 0;
      for (std::size_t p = 0; p < static_cast<std::size_t>(parts); ++p)
        sum += sums.data()[(2 * p + which) * columns + c];
      to[c] = static_cast<float>(sum);
    }
  };
  join(of.of_weight, 0);
  join(of.of_bias, 1);
}

void sum_columns(float* out, const float* a, int rows, int columns, int row_stride,
                 int column_stride, int qpus) {
  static const auto kernel = compile(total_columns, "sum-columns");
  sum_in_parts(out, columns, rows, (columns + 15) / 16, [&](int parts, int size, const auto& to) {
    run(kernel, qpus, parts, size, rows, columns, to, at(a), row_stride, column_stride);
  });
}

void sum_long_rows(float* out, const float* a, int rows, int columns, int row_stride, int qpus) {
  static const auto kernel = compile(total_rows, "sum-long-rows");
  sum_in_parts(out, rows, columns, rows, [&](int parts, int size, const auto& to) {
    run(kernel, qpus, parts, size, rows, columns, to, at(a), row_stride);
  });
}

void extremes(float* values, int* columns_of, const float* a, int rows, int columns, bool least,
              int qpus) {
  if (rows == 0 || columns == 0) return;
  const auto with = [&](const auto& kernel) {
    run(kernel, qpus, rows, columns, at(values), qpu::BusPointer<int>(columns_of), at(a));
  };
  if (least) {
    static const auto kernel = compile(extreme_rows<true>, "least-of-rows");
    with(kernel);
  } else {
    static const auto kernel = compile(extreme_rows<false>, "greatest-of-rows");
    with(kernel);
  }
}

}  // namespace torch_qpu::learning
