#include "regions.h"

#include "kernel_parts.h"

namespace torch_qpu::learning {
namespace {

// The regions of the 16 lanes, one for each lane.
struct Region {
  Int start;
  Int rows;
  Int columns;

  // The constructor issues four requests, and receives the three values of the region and the value
  // at `entry`.
  template <typename T, typename U>
  Region(const Int& own, const Ptr<Int>& starts, const Ptr<Int>& row_counts,
         const Ptr<Int>& column_counts, const Ptr<T>& entry, U& value) {
    gather(starts + own);
    gather(row_counts + own);
    gather(column_counts + own);
    gather(entry + own);
    receive(start);
    receive(rows);
    receive(columns);
    receive(value);
  }
};

// Calls body(place, inside) for each index in the regions of the lanes. `inside` is 1 if the lane's
// region contains the index. Otherwise, `inside` is 0, and `place` is the region's first element.
template <typename Body>
void over_region(const Region& region, const Int& most_rows, const Int& most_columns,
                 const Int& width, Body body) {
  Int line = region.start;
  For (Int y = 0, y < most_rows, y = y + 1)
    For (Int x = 0, x < most_columns, x = x + 1)
      Int inside = qpu::select(y < region.rows && x < region.columns, IntExpr(1), 0);
      Int place = qpu::select(inside == 1, line + x, region.start);
      body(place, inside);
    End
    line = line + width;
  End
}

void sums(Int planes, Int size, Int in_size, Int width, Int most_rows, Int most_columns,
          Ptr<Int> starts, Ptr<Int> row_counts, Ptr<Int> column_counts, Ptr<Float> factors,
          Ptr<Float> weights, Ptr<Float> out, Ptr<Float> in) {
  overPlanes<kShort>(planes, size, out, [&](const Int& plane, const IntExpr& first) {
    Int own = min(first + index(), size - 1);
    Float factor;
    const Region region(own, starts, row_counts, column_counts, factors, factor);
    Ptr<Float> from = in + plane * in_size;
    Sum sum;
    over_region(region, most_rows, most_columns, width, [&](const Int& place, const Int& inside) {
      Float x, weight;
      gather(from + place);
      gather(weights + place);
      receive(x);
      receive(weight);
      sum.add(qpu::select(inside == 1, x * weight, 0));
    });
    return (sum.total - sum.lost) * factor;
  });
}

// Each index consists of two words, of which the low word comes first.
void places_of_greatest(Int planes, Int words, Int in_size, Int width, Int most_rows,
                        Int most_columns, Ptr<Int> starts, Ptr<Int> row_counts,
                        Ptr<Int> column_counts, Ptr<Float> out, Ptr<Float> in) {
  overPlanes<kShort>(planes, words, out, [&](const Int& plane, const IntExpr& first) {
    Int word = min(first + index(), words - 1);
    Int own = word >> 1, unused;
    const Region region(own, starts, row_counts, column_counts, starts, unused);
    Ptr<Float> from = in + plane * in_size;
    Int most = std::numeric_limits<int>::min();
    Int place_of_most = region.start;
    over_region(region, most_rows, most_columns, width, [&](const Int& place, const Int& inside) {
      Float v;
      read(v, from + place);
      Int bits = asInt(v);
      Int magnitude = bits & 0x7fffffff;
      Int order = qpu::select(magnitude == 0, IntExpr(0), bits ^ ((bits >> 31) & 0x7fffffff));
      order = qpu::select(magnitude > 0x7f800000, IntExpr(0x7fffffff), order);
      Where (inside == 1 && order > most)
        most = order;
        place_of_most = place;
      End
    });
    return asFloat(qpu::select((word & 1) == 0, place_of_most, IntExpr(0)));
  });
}

void values_at(Int planes, Int size, Int in_size, Ptr<Int> places, Ptr<Float> out, Ptr<Float> in) {
  overPlanes<kShort>(planes, size, out, [&](const Int& plane, const IntExpr& first) {
    Int own = plane * size + min(first + index(), size - 1);
    Int place;
    read(place, places + (own + own));
    Float v;
    read(v, in + (plane * in_size + place));
    return FloatExpr(v);
  });
}

void gradient_at(Int planes, Int size, Int in_size, Int width, Int most_rows, Int most_columns,
                 Ptr<Int> starts, Ptr<Int> row_counts, Ptr<Int> column_counts, Ptr<Int> places,
                 Ptr<Float> gradient, Ptr<Float> out) {
  overPlanes<kShort>(planes, size, out, [&](const Int& plane, const IntExpr& first) {
    Int own = min(first + index(), size - 1), unused;
    const Region region(own, starts, row_counts, column_counts, starts, unused);
    Int before = plane * in_size;
    Sum sum;
    over_region(region, most_rows, most_columns, width, [&](const Int& pixel, const Int& inside) {
      Int from = before + pixel;
      Int place;
      Float g;
      gather(places + (from + from));
      gather(gradient + from);
      receive(place);
      receive(g);
      sum.add(qpu::select(inside == 1 && place == own, g, 0));
    });
    return sum.total - sum.lost;
  });
}

int most(const std::vector<int>& counts) {
  return counts.empty() ? 0 : *std::max_element(counts.begin(), counts.end());
}

}  // namespace

void region_sums(float* out, const float* in, int planes, const Regions& of,
                 const std::vector<float>& weights, const std::vector<float>& factors, int qpus) {
  if (planes == 0 || of.start.empty()) return;
  static const auto kernel = compile(sums, "region-sums");
  const Table<int> starts(of.start), rows(of.rows), columns(of.columns);
  const Table<float> weight(weights), factor(factors);
  run(kernel, qpus, planes, static_cast<int>(of.start.size()), of.size, of.width, most(of.rows),
      most(of.columns), starts.place(), rows.place(), columns.place(), factor.place(),
      weight.place(), at(out), at(in));
}

void region_places(std::int64_t* places, const float* in, int planes, const Regions& of,
                   int qpus) {
  if (planes == 0 || of.start.empty()) return;
  static const auto kernel = compile(places_of_greatest, "region-places");
  const Table<int> starts(of.start), rows(of.rows), columns(of.columns);
  run(kernel, qpus, planes, 2 * static_cast<int>(of.start.size()), of.size, of.width,
      most(of.rows), most(of.columns), starts.place(), rows.place(), columns.place(),
      float_words(places), at(in));
}

void at_places(float* out, const float* in, const std::int64_t* places, int planes, int size,
               int in_size, int qpus) {
  if (planes == 0 || size == 0) return;
  static const auto kernel = compile(values_at, "at-places");
  run(kernel, qpus, planes, size, in_size, words(places), at(out), at(in));
}

void region_gradient(float* out, const float* gradient, const std::int64_t* places, int planes,
                     const Regions& of, int qpus) {
  if (planes == 0 || of.start.empty()) return;
  static const auto kernel = compile(gradient_at, "region-gradient");
  const Table<int> starts(of.start), rows(of.rows), columns(of.columns);
  run(kernel, qpus, planes, static_cast<int>(of.start.size()), of.size, of.width, most(of.rows),
      most(of.columns), starts.place(), rows.place(), columns.place(), words(places), at(gradient),
      at(out));
}

}  // namespace torch_qpu::learning
