// Published measurements of programs on the QPUs of a Raspberry Pi, and the same programs in this
// library's language. The programs are compiled without optimisation, as in QPULib. All evidence
// indicates that QPULib stores a vector as 16 rows of one word, so these programs also store
// vectors in this way.
#ifndef TESTS_PUBLISHED_HPP
#define TESTS_PUBLISHED_HPP

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "emu/model.hpp"
#include "qpu/kernels.h"
#include "runtime/executable.hpp"
#include "tests/naive.hpp"
#include "tutorial/heatmap.hpp"

namespace published {

// Stores a vector as 16 rows of one word, through a VPM column that no other QPU uses.
struct StoreWords {
  template <typename X>
  void operator()(const X& x, const PtrExpr<Float>& to) const {
    dmaWaitWrite();
    vpmSetupWrite(VERT, me());
    vpmPut(x);
    dmaSetWriteStride(0);
    dmaSetupWrite(HORIZ, 16, me(), 1);
    dmaStartWrite(to);
  }
};
constexpr StoreWords storeWords{};

// The matrix-vector multiplication of the course project, which computes 16 partial sums for each
// row.
inline void matrixVector(Int rows, Int columns, Ptr<Float> a, Ptr<Float> x, Ptr<Float> sums) {
  naive::rowSums(rows, columns, a, x, sums, storeWords);
  dmaWaitWrite();
}

// The addition of the course project. a and b must have one additional block per QPU.
inline void add(Int n, Ptr<Float> out, Ptr<Float> a, Ptr<Float> b) {
  naive::elementwise(n, out, a, b, [](Float& x, Float& y) { return x + y; }, storeWords);
  dmaWaitWrite();
}

// Version 1 of Rot3D, which waits for every load and store.
inline void rot3DWaiting(Int n, Float cosine, Float sine, Ptr<Float> x, Ptr<Float> y) {
  For (Int i = 0, i < n, i = i + 16)
    Float xOld = x[i];
    Float yOld = y[i];
    storeWords(xOld * cosine - yOld * sine, x + i);
    dmaWaitWrite();
    storeWords(yOld * cosine + xOld * sine, y + i);
    dmaWaitWrite();
  End
}

// Versions 2 and 3, which request the next vector in advance and distribute the vectors among the
// QPUs.
inline void rot3DAhead(Int n, Float cosine, Float sine, Ptr<Float> x, Ptr<Float> y) {
  Int step = numQPUs() << 4;
  Ptr<Float> p = x + index() + (me() << 4);
  Ptr<Float> q = y + index() + (me() << 4);
  gather(p);
  gather(q);
  Float xOld, yOld;
  For (Int i = me() << 4, i < n, i = i + step)
    gather(p + step);
    gather(q + step);
    receive(xOld);
    receive(yOld);
    storeWords(xOld * cosine - yOld * sine, p);
    storeWords(yOld * cosine + xOld * sine, q);
    p = p + step;
    q = q + step;
  End
  receive(xOld);
  receive(yOld);
  dmaWaitWrite();
}

inline void heatStep(Ptr<Float> map, Ptr<Float> out, Int pitch, Int width, Int height) {
  std::array<tutorial::Cursor, 3> row;
  For (Int y = me(), y < height, y = y + numQPUs())
    Ptr<Float> above = map + y * pitch + index();
    Ptr<Float> target = out + (y + 1) * pitch + 16;
    for (tutorial::Cursor& r : row) {
      r.start(above);
      above = above + pitch;
    }
    for (tutorial::Cursor& r : row) r.prime();
    for (tutorial::Cursor& r : row) r.advance();
    For (Int x = 0, x < width, x = x + 16)
      for (tutorial::Cursor& r : row) r.advance();
      Float sum = row[0].current + row[2].current;
      for (tutorial::Cursor& r : row) sum = sum + r.left() + r.right();
      Float cell = row[1].current - tutorial::kDiffusion * (row[1].current - sum * 0.125F);
      storeWords(cell, target);
      target = target + 16;
    End
    for (tutorial::Cursor& r : row) r.finish();
  End
  dmaWaitWrite();
}

// The meaning of a line in the comparison with published measurements.
enum class Kind {
  Check,   // the same program; no parameter was fitted to its result
  Fitted,  // the same program; a parameter was fitted to its result
  Other,   // another program with the same result
};

struct Row {
  std::string name;
  const char* board;
  const char* source;
  Kind kind;
  double measured;  // in seconds
  std::function<double()> model;  // returns the time in seconds according to the current model
};

// Returns the time in seconds that a call takes in the model. The time includes a launch through
// the mailbox, which the measured programs used.
template <typename K, typename... A>
double seconds(K& kernel, int qpus, A&&... arguments) {
  kernel.setNumQPUs(qpus);
  kernel(arguments...);
  const qpu::Cycles c = kernel.cycles();
  return c.seconds() + c.mailboxLaunchSeconds;
}

inline std::size_t size(int n) { return static_cast<std::size_t>(n); }

inline double matrixVectorSeconds(int columns) {
  constexpr int kRows = 100;
  const int padded = (columns + 15) / 16 * 16;
  SharedArray<float> a(size(kRows * padded + 16)), x(size(padded + 16)), sums(16 * kRows);
  auto k = compile(matrixVector, "matrixVector");
  return seconds(k, 4, kRows, padded, &a, &x, &sums);
}

template <typename F>
double rot3DSeconds(F f, int qpus) {
  constexpr int kVertices = 192000;
  SharedArray<float> x(kVertices + 16 * 12), y(kVertices + 16 * 12);
  auto k = compile(f, "rot3D");
  return seconds(k, qpus, kVertices, std::cos(0.3F), std::sin(0.3F), &x, &y);
}

inline double heatSeconds(int qpus) {
  constexpr int kSize = 512;
  constexpr int kPitch = kSize + 64;
  SharedArray<float> map(size(kPitch * (kSize + 3))), out(size(kPitch * (kSize + 3)));
  auto k = compile(heatStep, "heatStep");
  return seconds(k, qpus, &map, &out, kPitch, kSize, kSize);
}

inline double additionSeconds() {
  constexpr int kElements = 960000;
  SharedArray<float> a(kElements + 192), b(kElements + 192), sum(kElements);
  auto k = compile(naive::add, "add");
  return seconds(k, 12, kElements, &sum, &a, &b);
}

inline double productSeconds(int m, int n, int k, int qpus) {
  SharedArray<float> a(size(m * k)), b(size(k * n)), c(size(m * n));
  namespace kernels = qpu::kernels;
  const auto total = [] {
    const qpu::Cycles all = qpu::runtime::cyclesOfThread();
    return static_cast<double>(all.clocks) / all.clockHz + all.mailboxLaunchSeconds;
  };
  kernels::matmul(kernels::Matrix(c, n), kernels::Matrix(a, k), kernels::Matrix(b, n), m, n, k, 1,
                  0, qpus);
  const double before = total();
  kernels::matmul(kernels::Matrix(c, n), kernels::Matrix(a, k), kernels::Matrix(b, n), m, n, k, 1,
                  0, qpus);
  return total() - before;
}

inline std::vector<Row> rows() {
  std::vector<Row> all;
  constexpr const char* kCourse = "course project, 2021: time of the call";
  struct Width {
    int columns;
    double measured;
    Kind kind;
  };
  for (const Width w : {Width{1, 164e-6, Kind::Check}, Width{10, 169e-6, Kind::Check},
                        Width{100, 171e-6, Kind::Check}, Width{1000, 388e-6, Kind::Check},
                        Width{10000, 3.079e-3, Kind::Check},
                        Width{100000, 29.622e-3, Kind::Fitted}})
    all.push_back({"matrix-vector 100 x " + std::to_string(w.columns) + ", 4 QPUs", "pi3", kCourse,
                   w.kind, w.measured, [w] { return matrixVectorSeconds(w.columns); }});
  constexpr const char* kReadme = "QPULib, README: 192,000 vertices";
  all.push_back({"Rot3D version 1, 1 QPU", "pi1", kReadme, Kind::Check, 0.040,
                 [] { return rot3DSeconds(rot3DWaiting, 1); }});
  all.push_back({"Rot3D version 3, 1 QPU", "pi1", kReadme, Kind::Check, 0.018,
                 [] { return rot3DSeconds(rot3DAhead, 1); }});
  all.push_back({"Rot3D version 3, 2 QPUs", "pi1", kReadme, Kind::Check, 0.016,
                 [] { return rot3DSeconds(rot3DAhead, 2); }});
  constexpr const char* kHeat = "QPULib, README: a step of 512 x 512, of 2000";
  all.push_back({"HeatMap, 1 QPU", "pi1", kHeat, Kind::Check, 49.34 / 2000,
                 [] { return heatSeconds(1); }});
  all.push_back({"HeatMap, 2 QPUs", "pi1", kHeat, Kind::Check, 24.91 / 2000,
                 [] { return heatSeconds(2); }});
  all.push_back({"HeatMap, 4 QPUs", "pi1", kHeat, Kind::Fitted, 20.36 / 2000,
                 [] { return heatSeconds(4); }});
  all.push_back({"addition of 960,000, 12 QPUs", "pi3",
                 "VC4C issue 14: 80 to 100 M/s; board not stated", Kind::Check, 960000 / 90e6,
                 additionSeconds});
  all.push_back({"matmul 96 x 363 x 3072, 12 QPUs", "pi3", "py-videocore issue 5: its sgemm",
                 Kind::Other, 2.0 * 96 * 363 * 3072 / 6.71e9,
                 [] { return productSeconds(96, 3072, 363, 12); }});
  all.push_back({"matmul 96 x 363 x 3072, 1 QPU", "pi3", "py-videocore issue 5: its sgemm",
                 Kind::Other, 2.0 * 96 * 363 * 3072 / 0.80e9,
                 [] { return productSeconds(96, 3072, 363, 1); }});
  all.push_back({"matmul 512^3, 12 QPUs", "pi3", "qmkl: its best sgemm, 13.3 GFLOPS", Kind::Other,
                 2.0 * 512 * 512 * 512 / 13.3e9, [] { return productSeconds(512, 512, 512, 12); }});
  return all;
}

struct Compared {
  // Times in seconds according to the model: with the default parameters, and with both bounds of
  // the ranges.
  double value = 0, low = 0, high = 0;
};

// Sets QPU_BACKEND, QPU_BOARD, QPU_MODEL and QPU_OPTIMISE for the comparison, and unsets them
// afterwards.
inline Compared compare(const Row& row) {
  (void)setenv("QPU_BACKEND", "emulator", 1);
  (void)setenv("QPU_BOARD", row.board, 1);
  if (row.kind != Kind::Other) (void)setenv("QPU_OPTIMISE", "0", 1);
  Compared c;
  c.value = row.model();
  (void)setenv("QPU_MODEL", "fast", 1);
  const double fast = row.model();
  (void)setenv("QPU_MODEL", "slow", 1);
  const double slow = row.model();
  for (const char* const name : {"QPU_BACKEND", "QPU_BOARD", "QPU_MODEL", "QPU_OPTIMISE"})
    (void)unsetenv(name);
  c.low = std::min({c.value, fast, slow});
  c.high = std::max({c.value, fast, slow});
  return c;
}

}  // namespace published

#endif
