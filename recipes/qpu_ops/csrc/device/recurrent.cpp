#include "recurrent.h"

#include <array>
#include <cstddef>
#include <functional>
#include <initializer_list>

#include <QPULib.h>
#include <qpu/ieee.h>
#include <qpu/stream.h>

#include "memory.h"

namespace torch_qpu::recurrent {
namespace {

namespace ieee = qpu::ieee;
using qpu::kernels::Pointers;
using qpu::kernels::Vectors;

// Converts a pointer to the type that kernels take both for reading and for writing.
qpu::BusPointer<float> at(const float* p) { return const_cast<float*>(p); }

template <typename K, typename... A>
void run(K kernel, int qpus, A... arguments) {
  constexpr int most = 12;
  kernel.setNumQPUs(qpus == 0 ? most : qpus);  // changes only the count of this copy
  kernel(arguments...);
}

// A zero word, which replaces absent arrays. The pointer is null if all arrays are present.
class Absent {
 public:
  explicit Absent(bool any) : zero_(any ? static_cast<float*>(allocate(sizeof(float))) : nullptr) {
    if (any) *zero_ = 0;
  }
  Absent(const Absent&) = delete;
  Absent& operator=(const Absent&) = delete;
  ~Absent() { release(zero_); }

  qpu::BusPointer<float> or_zero(const float* p) const { return at(p == nullptr ? zero_ : p); }

 private:
  float* zero_;
};

// Returns a mask for offsets into an array: all bits are set if the array is present, and no bits
// are set if it is absent.
int mask(const float* p) { return p == nullptr ? 0 : -1; }

// Reads a vector from each pointer. Requests are issued in pairs.
template <std::size_t N>
Vectors<N> read(const Pointers<N>& from) {
  Vectors<N> x;
  for (const Ptr<Float>& p : from) gather(p);
  qpu::kernels::evenGather<N>(from[0]);
  for (Float& v : x) receive(v);
  qpu::kernels::evenReceive<N>();
  return x;
}

// Calls body(row, first, count) for up to 16 elements of a row at a time. The calls are
// distributed round-robin among the QPUs.
template <typename Body>
void over_vectors(const Int& rows, const Int& columns, Body body) {
  Int first = me() << 4, row = 0;
  Int rounded = (columns + 15) & -16;
  const auto settle = [&] {
    While (first >= rounded)
      first = first - rounded;
      row = row + 1;
    End
  };
  settle();
  While (row < rows)
    Int count = min(columns - first, 16);
    body(row, first, count);
    first = first + (numQPUs() << 4);
    settle();
  End
}

// Returns the sum of numbers that may be NaN. An ordinary addition on a QPU would return Inf for
// NaN, and the activation of a gate would then return 1.
Float summed(std::initializer_list<std::reference_wrapper<const Float>> parts) {
  Float sum = 0;
  Int most = 0;
  for (const Float& part : parts) {
    sum = sum + part;
    most = max(most, ieee::magnitude(part));
  }
  return qpu::select(most > ieee::kInf, ieee::nan(), sum);
}

// Returns a if a is NaN. Otherwise, returns b if b is NaN, and `result` if b is not NaN.
Float keep_nan(const Float& a, const Float& b, const FloatExpr& result) {
  return ieee::keepNan(a, ieee::keepNan(b, result));
}

// Returns the four terms of a gate's sum.
Vectors<4> parts(const Ptr<Float>& input, const Ptr<Float>& hidden, const Ptr<Float>& input_bias,
                 const Ptr<Float>& hidden_bias, const Int& of_row, const Int& of_bias) {
  Pointers<4> from;
  from[0] = input + of_row;
  from[1] = hidden + of_row;
  from[2] = input_bias + of_bias;
  from[3] = hidden_bias + of_bias;
  return read<4>(from);
}

void lstm_rows(Int rows, Int columns, Ptr<Float> input, Ptr<Float> hidden, Ptr<Float> input_bias,
               Ptr<Float> hidden_bias, Int bias, Ptr<Float> cx, Ptr<Float> hy, Ptr<Float> cy,
               Ptr<Float> kept) {
  over_vectors(rows, columns, [&](const Int& row, const Int& first, const Int& count) {
    Int lane = first + min(index(), count - 1);
    Int before = row * (columns << 2);
    Vectors<4> gate;
    Int place = 0;
    for (int i = 0; i < kLstmGates; ++i) {
      const Vectors<4> part =
          parts(input, hidden, input_bias, hidden_bias, before + (place + lane),
                (place + lane) & bias);
      Float sum = summed({part[0], part[2], part[1], part[3]});
      gate[static_cast<std::size_t>(i)] = i == 2 ? ieee::tanh(sum) : ieee::sigmoid(sum);
      place = place + columns;
    }
    Ptr<Float> to = kept + (before + first);
    for (const Float& v : gate) {
      store(v, to, count);
      to = to + columns;
    }
    Int start = row * columns;
    Pointers<1> old;
    old[0] = cx + (start + lane);
    Vectors<1> c = read<1>(old);
    Float kept_state = keep_nan(c[0], gate[1], gate[1] * c[0]);
    Float new_state = keep_nan(gate[0], gate[2], gate[0] * gate[2]);
    Float state = summed({kept_state, new_state});
    Float shown = ieee::tanh(state);
    store(state, cy + (start + first), count);
    store(keep_nan(gate[3], shown, gate[3] * shown), hy + (start + first), count);
  });
}

void lstm_gradient(Int rows, Int columns, Ptr<Float> of_hy, Int has_hy, Ptr<Float> of_cy,
                   Int has_cy, Ptr<Float> cx, Ptr<Float> cy, Ptr<Float> kept,
                   Ptr<Float> of_gates, Ptr<Float> of_cx) {
  over_vectors(rows, columns, [&](const Int& row, const Int& first, const Int& count) {
    Int lane = first + min(index(), count - 1);
    Int before = row * (columns << 2), start = row * columns;
    Int place = start + lane;
    Pointers<4> from;
    for (Ptr<Float>& p : from) p = kept + (before + lane);
    for (std::size_t i = 1; i < from.size(); ++i) from[i] = from[i - 1] + columns;
    const Vectors<4> gate = read<4>(from);
    from[0] = of_hy + (place & has_hy);
    from[1] = of_cy + (place & has_cy);
    from[2] = cx + place;
    from[3] = cy + place;
    const Vectors<4> x = read<4>(from);
    Float shown = ieee::tanh(x[3]);
    Float of_state = x[1] + x[0] * gate[3] * (FloatExpr(1) - shown * shown);
    std::array<Float, kLstmGates> made;
    made[0] = of_state * gate[2] * gate[0] * (FloatExpr(1) - gate[0]);
    made[1] = of_state * x[2] * gate[1] * (FloatExpr(1) - gate[1]);
    made[2] = of_state * gate[0] * (FloatExpr(1) - gate[2] * gate[2]);
    made[3] = x[0] * shown * gate[3] * (FloatExpr(1) - gate[3]);
    Ptr<Float> to = of_gates + (before + first);
    for (const Float& v : made) {
      store(v, to, count);
      to = to + columns;
    }
    store(of_state * gate[1], of_cx + (start + first), count);
  });
}

void gru_rows(Int rows, Int columns, Ptr<Float> input, Ptr<Float> hidden, Ptr<Float> input_bias,
              Ptr<Float> hidden_bias, Int bias, Ptr<Float> hx, Ptr<Float> hy, Ptr<Float> kept) {
  over_vectors(rows, columns, [&](const Int& row, const Int& first, const Int& count) {
    Int lane = first + min(index(), count - 1);
    Int start = row * columns, before = start + start + start;
    std::array<Float, kGruKept> keep;
    Int place = 0;
    for (std::size_t i = 0; i < kGruGates; ++i) {
      const Vectors<4> part =
          parts(input, hidden, input_bias, hidden_bias, before + (place + lane),
                (place + lane) & bias);
      Float of_input = summed({part[0], part[2]}), of_hidden = summed({part[1], part[3]});
      if (i < 2) {
        keep[i] = ieee::sigmoid(summed({of_input, of_hidden}));
      } else {
        Float shown = keep_nan(keep[0], of_hidden, keep[0] * of_hidden);
        keep[2] = ieee::tanh(summed({of_input, shown}));
        keep[4] = of_hidden;
      }
      place = place + columns;
    }
    Pointers<1> old;
    old[0] = hx + (start + lane);
    keep[3] = read<1>(old)[0];
    Ptr<Float> to = kept + (before + start + start + first);
    for (const Float& v : keep) {
      store(v, to, count);
      to = to + columns;
    }
    Float mixed = keep[2] + keep[1] * (keep[3] - keep[2]);
    mixed = keep_nan(keep[1], keep[3], mixed);
    store(ieee::keepNan(keep[2], mixed), hy + (start + first), count);
  });
}

void gru_gradient(Int rows, Int columns, Ptr<Float> of_hy, Ptr<Float> kept, Ptr<Float> of_input,
                  Ptr<Float> of_hidden, Ptr<Float> of_hx) {
  over_vectors(rows, columns, [&](const Int& row, const Int& first, const Int& count) {
    Int lane = first + min(index(), count - 1);
    Int start = row * columns, before = start + start + start;
    Pointers<6> from;
    from[0] = of_hy + (start + lane);
    from[1] = kept + (before + start + start + lane);
    for (std::size_t i = 2; i < from.size(); ++i) from[i] = from[i - 1] + columns;
    const Vectors<6> x = read<6>(from);
    const Float &gradient = x[0], &reset = x[1], &update = x[2], &made = x[3];
    Float of_new = gradient * (FloatExpr(1) - update) * (FloatExpr(1) - made * made);
    Float of_update = gradient * (x[4] - made) * update * (FloatExpr(1) - update);
    Float of_reset = of_new * x[5] * reset * (FloatExpr(1) - reset);
    Int to = before + first;
    store(of_reset, of_input + to, count);
    store(of_reset, of_hidden + to, count);
    to = to + columns;
    store(of_update, of_input + to, count);
    store(of_update, of_hidden + to, count);
    to = to + columns;
    store(of_new, of_input + to, count);
    store(of_new * reset, of_hidden + to, count);
    store(gradient * update, of_hx + (start + first), count);
  });
}

bool is_empty(const Shape& s) { return s.rows == 0 || s.columns == 0; }

}  // namespace

void lstm(float* hy, float* cy, float* kept, const Gates& gates, const float* cx, const Shape& s,
          int qpus) {
  if (is_empty(s)) return;
  static const auto kernel = compile(lstm_rows, "lstm-cell");
  const Absent absent(gates.input_bias == nullptr);
  run(kernel, qpus, s.rows, s.columns, at(gates.input), at(gates.hidden),
      absent.or_zero(gates.input_bias), absent.or_zero(gates.hidden_bias), mask(gates.input_bias),
      at(cx), at(hy), at(cy), at(kept));
}

void lstm_backward(float* of_gates, float* of_cx, const float* of_hy, const float* of_cy,
                   const float* cx, const float* cy, const float* kept, const Shape& s,
                   int qpus) {
  if (is_empty(s)) return;
  static const auto kernel = compile(lstm_gradient, "lstm-cell-gradient");
  const Absent absent(of_hy == nullptr || of_cy == nullptr);
  run(kernel, qpus, s.rows, s.columns, absent.or_zero(of_hy), mask(of_hy), absent.or_zero(of_cy),
      mask(of_cy), at(cx), at(cy), at(kept), at(of_gates), at(of_cx));
}

void gru(float* hy, float* kept, const Gates& gates, const float* hx, const Shape& s, int qpus) {
  if (is_empty(s)) return;
  static const auto kernel = compile(gru_rows, "gru-cell");
  const Absent absent(gates.input_bias == nullptr);
  run(kernel, qpus, s.rows, s.columns, at(gates.input), at(gates.hidden),
      absent.or_zero(gates.input_bias), absent.or_zero(gates.hidden_bias), mask(gates.input_bias),
      at(hx), at(hy), at(kept));
}

void gru_backward(float* of_input, float* of_hidden, float* of_hx, const float* of_hy,
                  const float* kept, const Shape& s, int qpus) {
  if (is_empty(s)) return;
  static const auto kernel = compile(gru_gradient, "gru-cell-gradient");
  run(kernel, qpus, s.rows, s.columns, at(of_hy), at(kept), at(of_input), at(of_hidden),
      at(of_hx));
}

}  // namespace torch_qpu::recurrent
