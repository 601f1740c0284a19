#include "moves.h"

#include "kernel_parts.h"

namespace torch_qpu::learning {
namespace {

// Converts an address in memory to a pointer in the kernel language.
template <typename T>
PtrExpr<T> pointer(const IntExpr& address) {
  return PtrExpr<T>(qpu::detail::FromNode(address.node()));
}

int address_of(const float* p) { return static_cast<int>(at(p).address()); }

// The table contains four words per run: destination, source, length and an unused word.
void copy_each(Int runs, Ptr<Int> table) {
  Int vpm_row = firstVpmRow<kShort>();
  For (Int run = me(), run < runs, run = run + numQPUs())
    Ptr<Int> entry = table + (run << 2);
    Int to, from, length, unused;
    for (int i = 0; i < 4; ++i) gather(entry + i);
    receive(to);
    receive(from);
    receive(length);
    receive(unused);
    Pointers<1> source;
    source[0] = pointer<Float>(from);
    store_row<1>(length, source, pointer<Float>(to), vpm_row,
                 [](const Vectors<1>& x) -> FloatExpr { return x[0]; });
  End
}

// The indices for row number `row` are at positions firsts[row] up to, but not including,
// firsts[row + 1].
void sum_each(Int rows, Int columns, Ptr<Int> firsts, Ptr<Int> places, Ptr<Float> out,
              Ptr<Float> in) {
  For (Int row = me(), row < rows, row = row + numQPUs())
    Int first, end;
    gather(firsts + row);
    gather(firsts + (row + 1));
    receive(first);
    receive(end);
    For (Int column = 0, column < columns, column = column + 16)
      Int lane = min(column + index(), columns - 1);
      Sum sum;
      For (Int i = first, i < end, i = i + 1)
        Int place;
        read(place, places + i);
        Float x;
        read(x, in + (place * columns + lane));
        sum.add(x);
      End
      store(sum.total - sum.lost, out + (row * columns + column), min(columns - column, 16));
    End
  End
}

// Converts floats to integers. The conversion preserves the order.
IntExpr order_of(const Float& x) {
  Int bits = asInt(x);
  return qpu::select((bits & 0x7fffffff) == 0, IntExpr(0), bits ^ ((bits >> 31) & 0x7fffffff));
}

BoolExpr is_nan(const Float& x) { return (asInt(x) & 0x7fffffff) > 0x7f800000; }

template <Comparison what>
void compare_each(Int count, Int n, Ptr<Float> out, Ptr<Float> a, Int mask_a, Ptr<Float> b,
                  Int mask_b) {
  overPlanes<kShort>(1, count, out, [&](const Int& /*plane*/, const IntExpr& first) {
    Int element = min(first + index(), count - 1) << 2;
    Int result = 0;
    for (int j = 0; j < 4; ++j) {
      Int place = min(element + j, n - 1);
      Float x, y;
      gather(a + (place & mask_a));
      gather(b + (place & mask_b));
      receive(x);
      receive(y);
      Int left = order_of(x), right = order_of(y);
      Int bit = 0;
      const auto set = [&](const BoolExpr& holds) {
        Where (holds)
          bit = 1 << (8 * j);
        End
      };
      switch (what) {
        case Comparison::greater: set(left > right); break;
        case Comparison::greater_or_equal: set(left >= right); break;
        case Comparison::equal: set(left == right); break;
        case Comparison::not_equal: set(left != right); break;
      }
      Where (is_nan(x) || is_nan(y))
        bit = what == Comparison::not_equal ? 1 << (8 * j) : 0;
      End
      result = result | bit;
    }
    return asFloat(result);
  });
}

// Multiplication does not preserve NaN, so it is omitted if there is no factor.
template <bool scaled>
void choose_each(Int n, Ptr<Float> out, Ptr<Int> condition, Ptr<Float> a, Int mask_a, Float factor,
                 Ptr<Float> b, Int mask_b) {
  overPlanes<kShort>(1, n, out, [&](const Int& /*plane*/, const IntExpr& first) {
    Int place = min(first + index(), n - 1);
    Int flags, unused;
    Float x, y;
    gather(condition + (place >> 2));
    gather(condition + (place >> 2));
    gather(a + (place & mask_a));
    gather(b + (place & mask_b));
    receive(flags);
    receive(unused);
    receive(x);
    receive(y);
    return qpu::select(((flags >> ((place & 3) << 3)) & 255) != 0,
                       scaled ? x * factor : FloatExpr(x), y);
  });
}

int mask(const Compared& x) { return x.one ? 0 : -1; }

// Longer runs are split, so that all QPUs have work.
constexpr int kLongestRun = 4096;

}  // namespace

void copy_runs(const std::vector<Run>& runs, int qpus) {
  std::vector<int> entries;
  for (const Run& r : runs)
    for (int done = 0; done < r.length; done += kLongestRun)
      entries.insert(entries.end(), {address_of(r.to + done), address_of(r.from + done),
                                     std::min(r.length - done, kLongestRun), 0});
  if (entries.empty()) return;
  static const auto kernel = compile(copy_each, "copy");
  const Table<int> table(entries);
  run(kernel, qpus, static_cast<int>(entries.size() / 4), table.place());
}

void sum_rows(float* out, const float* in, const std::vector<std::vector<int>>& places,
              int columns, int qpus) {
  if (places.empty() || columns == 0) return;
  static const auto kernel = compile(sum_each, "sum-rows");
  std::vector<int> firsts, all;
  for (const auto& of_row : places) {
    firsts.push_back(static_cast<int>(all.size()));
    all.insert(all.end(), of_row.begin(), of_row.end());
  }
  firsts.push_back(static_cast<int>(all.size()));
  const Table<int> starts(firsts), table(all);
  run(kernel, qpus, static_cast<int>(places.size()), columns, starts.place(), table.place(),
      at(out), at(in));
}

void compare(Comparison what, void* out, const Compared& a, const Compared& b, int n, int qpus) {
  if (n == 0) return;
  const auto with = [&](const auto& kernel) {
    run(kernel, qpus, (n + 3) / 4, n, at(static_cast<const float*>(out)), at(a.data), mask(a),
        at(b.data), mask(b));
  };
  switch (what) {
    case Comparison::greater: {
      static const auto kernel = compile(compare_each<Comparison::greater>, "gt");
      return with(kernel);
    }
    case Comparison::greater_or_equal: {
      static const auto kernel = compile(compare_each<Comparison::greater_or_equal>, "ge");
      return with(kernel);
    }
    case Comparison::equal: {
      static const auto kernel = compile(compare_each<Comparison::equal>, "eq");
      return with(kernel);
    }
    case Comparison::not_equal: {
      static const auto kernel = compile(compare_each<Comparison::not_equal>, "ne");
      return with(kernel);
    }
  }
}

void choose(float* out, const void* condition, const Compared& a, float factor, const Compared& b,
            int n, int qpus) {
  if (n == 0) return;
  const auto with = [&](const auto& kernel) {
    run(kernel, qpus, n, at(out),
        qpu::BusPointer<int>(static_cast<int*>(const_cast<void*>(condition))), at(a.data), mask(a),
        factor, at(b.data), mask(b));
  };
  if (factor == 1) {
    static const auto kernel = compile(choose_each<false>, "where");
    with(kernel);
  } else {
    static const auto kernel = compile(choose_each<true>, "dropout");
    with(kernel);
  }
}

}  // namespace torch_qpu::learning
