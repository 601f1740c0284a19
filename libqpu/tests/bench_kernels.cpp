// Prints the clocks that the library's kernels take in the emulator's model (not measured on
// hardware), and the share of the board's limit that they reach. The limit is the time for the
// bytes that must be transferred over the bus, or for the operations of the pipes. For comparison,
// the program runs kernels like those of a course project. As in that project, these kernels are
// compiled without optimisation and run on 4 QPUs.
//
//   bench-kernels [--quick | --tutorial] [--json] [--ranges]
//
// QPU_BOARD selects the board, and QPU_MODEL selects the parameters of its model. With --ranges,
// each kernel also runs with parameters at the ends of their ranges: first with all parameters, and
// then, for each assumption, with only the parameters that depend on the assumption. The range of a
// share covers all these runs. "moved most by" names the assumption that changes the share most if
// only this assumption is changed. The exit code is 1 if a result is wrong.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "qpu/kernels.h"
#include "tests/bench_report.hpp"
#include "tests/naive.hpp"
#include "tests/published.hpp"
#include "tutorial/add.hpp"
#include "tutorial/product.hpp"

namespace {

namespace k = qpu::kernels;
using namespace bench;
using Array = SharedArray<float>;

bool quick = false;
bool wrong = false;
std::mt19937 generator;

Array filled(std::size_t n) {
  Array a(n);
  std::uniform_real_distribution<float> d(-1, 1);
  for (float& x : a) x = d(generator);
  return a;
}

void require(bool right, const char* what) {
  if (right) return;
  (void)std::fprintf(stderr, "%s: wrong result\n", what);
  wrong = true;
}
bool near(float a, double b, double bound) { return std::fabs(static_cast<double>(a) - b) <= bound; }

void elementwise() {
  const int n = quick ? 96000 : 960000;
  const auto words = static_cast<std::size_t>(n);
  // Each QPU of a naive kernel reads one block beyond the end of the arrays.
  Array a = filled(words + 192), b = filled(words + 192), c = filled(words), out(words);
  const double stream = 4.0 * n;
  (void)setenv("QPU_OPTIMISE", "0", 1);
  auto naiveAdd = compile(naive::add, "naive-add");
  for (const int qpus : {4, 12}) {
    naiveAdd.setNumQPUs(qpus);
    const EmulatedWork w = measured([&] { naiveAdd(n, &out, &a, &b); });
    require(near(out[n - 1], static_cast<double>(a[n - 1] + b[n - 1]), 1e-6), "naive add");
    line("naive add, " + std::to_string(qpus) + " QPUs", w, busClocks(3 * stream), "bus");
  }
  auto qpulibAdd = compile(published::add, "naive-add");
  qpulibAdd.setNumQPUs(4);
  const EmulatedWork asQpulib = measured([&] { qpulibAdd(n, &out, &a, &b); });
  require(near(out[n - 1], static_cast<double>(a[n - 1] + b[n - 1]), 1e-6), "QPULib's add");
  line("naive add, QPULib's stores", asQpulib, busClocks(3 * stream), "bus");
  naiveAdd.setNumQPUs(4);
  const auto naive = static_cast<double>(measured([&] { naiveAdd(n, &out, &a, &b); }).clocks);
  (void)unsetenv("QPU_OPTIMISE");
  for (const int qpus : {1, 4, 6, 12}) {
    const EmulatedWork w = measured([&] { k::add(out, a, b, n, qpus); });
    require(near(out[n - 1], static_cast<double>(a[n - 1] + b[n - 1]), 1e-6), "add");
    line("add, " + std::to_string(qpus) + " QPUs", w, busClocks(3 * stream), "bus", naive);
  }
  const auto one = [&](const char* name, double streams, const std::function<void()>& f) {
    line(name, measured(f), busClocks(streams * stream), "bus");
  };
  one("mul", 3, [&] { k::mul(out, a, b, n); });
  one("fma", 4, [&] { k::fma(out, a, b, c, n); });
  one("axpy", 3, [&] { k::axpy(out, 2, a, b, n); });
  one("scale", 2, [&] { k::scale(out, 2, a, n); });
  one("relu", 2, [&] { k::relu(out, a, n); });
  one("exp", 2, [&] { k::exp(out, a, n); });
  one("sigmoid", 2, [&] { k::sigmoid(out, a, n); });
  one("tanh", 2, [&] { k::tanh(out, a, n); });
  one("sqrt", 2, [&] { k::sqrt(out, a, n); });
  one("sum", 1, [&] { (void)k::sum(a, n); });
  one("dot", 2, [&] { (void)k::dot(a, b, n); });
  one("argmax", 1, [&] { (void)k::argmax(a, n); });
  one("softmax, 960 rows", 2, [&] { k::softmax(out, a, 960, n / 960, n / 960); });
  one("batchNorm, 64 channels", 2, [&] {
    k::batchNorm(out, a, b, c.pointer(0), b, b, 2, 1, 64, n / 64);
  });
}

void matrixVector() {
  const int m = 100;
  const int columns = quick ? 10000 : 100000;
  const auto words = static_cast<std::size_t>(m) * static_cast<std::size_t>(columns);
  Array a = filled(words + 16), x = filled(static_cast<std::size_t>(columns) + 16);
  Array y(m), sums(16 * static_cast<std::size_t>(m));
  const double bytes = 4.0 * (static_cast<double>(words) + columns + m);
  double expected = 0;
  for (int j = 0; j < columns; ++j)
    expected += static_cast<double>(a[(m - 1) * columns + j]) * static_cast<double>(x[j]);
  (void)setenv("QPU_OPTIMISE", "0", 1);
  auto naive = compile(naive::matrixVector, "naive-matvec");
  (void)unsetenv("QPU_OPTIMISE");
  naive.setNumQPUs(4);
  const EmulatedWork slow = measured([&] { naive(m, columns, &a, &x, &sums); });
  const std::string shape = "matvec 100 x " + std::to_string(columns);
  const double clocks = line("naive " + shape, slow, busClocks(bytes), "bus");
  for (const int qpus : {1, 4, 12}) {
    const EmulatedWork w =
        measured([&] { k::matvec(y, k::Matrix(a, columns), x, m, columns, qpus); });
    require(near(y[m - 1], expected, 0.05), "matvec");
    line(shape + ", " + std::to_string(qpus) + " QPUs", w, busClocks(bytes), "bus", clocks);
  }
}

void matrixMatrix() {
  const int n = quick ? 192 : 512;
  const auto words = static_cast<std::size_t>(n) * static_cast<std::size_t>(n);
  Array a = filled(words), b = filled(words), c(words);
  const double flops = 2.0 * n * n * n;
  double expected = 0;
  for (int l = 0; l < n; ++l)
    expected += static_cast<double>(a[(n - 1) * n + l]) * static_cast<double>(b[l * n + n - 1]);
  const std::string shape = std::to_string(n) + "^3";
  double clocks = 0;
  {
    // Compute only some of the matrix's rows, because this kernel is slow.
    const int rows = 48;
    (void)setenv("QPU_OPTIMISE", "0", 1);
    auto naive = compile(tutorial::productPlain, "naive-matmul");
    (void)unsetenv("QPU_OPTIMISE");
    naive.setNumQPUs(4);
    EmulatedWork w = measured([&] { naive(rows, n, n, &c, &a, &b); });
    clocks = line("naive matmul, 48 rows", w, pipeClocks(flops * rows / n), "pipes") * n / rows;
  }
  for (const int qpus : {1, 12}) {
    const EmulatedWork w = measured([&] {
      k::matmul(k::Matrix(c, n), k::Matrix(a, n), k::Matrix(b, n), n, n, n, 1, 0, qpus);
    });
    require(near(c[n * n - 1], expected, 0.01), "matmul");
    line("matmul " + shape + ", " + std::to_string(qpus) + " QPUs", w,
         pipeClocks(flops) * 12 / qpus, "pipes", clocks);
  }
  k::Window w;
  w.channels = 64;
  w.height = w.width = quick ? 16 : 32;
  w.kernelHeight = w.kernelWidth = 3;
  w.paddingY = w.paddingX = 1;
  Array image = filled(static_cast<std::size_t>(w.channels * w.height * w.width));
  Array weights = filled(static_cast<std::size_t>(64 * w.channels * 9));
  Array out(static_cast<std::size_t>(64 * w.height * w.width));
  line("conv2d 64 to 64, 3 x 3",
       measured([&] { k::conv2d(out, image, weights, nullptr, w, 64); }),
       pipeClocks(2.0 * 64 * 64 * 9 * w.height * w.width), "pipes");
  w.kernelHeight = w.kernelWidth = w.strideY = w.strideX = 2;
  w.paddingY = w.paddingX = 0;
  line("maxPool2d 2 x 2", measured([&] { k::maxPool2d(out, image, w); }),
       busClocks(5.0 * w.channels * w.height * w.width), "bus");
}

// Scales kVectors vectors per iteration. The stores of these vectors are merged into a single
// transfer.
template <int kVectors>
void scaleTogether(Int n, Float factor, Ptr<Float> out, Ptr<Float> in) {
  For (Int i = me() * (16 * kVectors), i < n, i = i + numQPUs() * (16 * kVectors))
    for (int v = 0; v < kVectors; ++v) gather(in + i + 16 * v + index());
    std::array<Float, kVectors> x;
    for (Float& each : x) receive(each);
    for (int v = 0; v < kVectors; ++v)
      store(x[static_cast<std::size_t>(v)] * factor, out + i + 16 * v);
  End
}

// Prints the figures in docs/kernels.md for the tutorial's kernels.
void tutorialSteps() {
  const auto qpusOf = [](const char* name, int qpus) {
    return std::string(name) + ", " + std::to_string(qpus) + (qpus == 1 ? " QPU" : " QPUs");
  };
  const int n = 65536;
  Array a = filled(n), b = filled(n), out(n);
  const auto sums = [&](auto kernel, const char* name) {
    for (const int qpus : {1, 4, 12}) {
      kernel.setNumQPUs(qpus);
      const EmulatedWork w = measured([&] { kernel(n, &out, &a, &b); });
      require(near(out[n - 1], static_cast<double>(a[n - 1] + b[n - 1]), 1e-6), name);
      line(qpusOf(name, qpus), w, busClocks(12.0 * n), "bus");
    }
  };
  sums(compile(tutorial::addWaiting, "addWaiting"), "addWaiting");
  sums(compile(tutorial::addAhead, "addAhead"), "addAhead");
  sums(compile(tutorial::addBursts, "addBursts"), "addBursts");
  const int many = 262144;
  Array from = filled(many), to(many);
  const auto scales = [&](auto kernel, const char* name) {
    kernel.setNumQPUs(12);
    const EmulatedWork w = measured([&] { kernel(many, 2.0F, &to, &from); });
    require(to[many - 1] == 2 * from[many - 1], name);
    line(qpusOf(name, 12), w, busClocks(8.0 * many), "bus");
  };
  scales(compile(scaleTogether<1>, "scaleTogether"), "scale, 1 vector at once");
  scales(compile(scaleTogether<2>, "scaleTogether"), "scale, 2 vectors at once");
  scales(compile(scaleTogether<4>, "scaleTogether"), "scale, 4 vectors at once");
  const int size = 96;
  const double flops = 2.0 * size * size * size;
  Array x = filled(size * size), y = filled(size * size), c(size * size);
  const auto products = [&](auto kernel, const char* name) {
    for (const int qpus : {1, 4, 12}) {
      kernel.setNumQPUs(qpus);
      const EmulatedWork w = measured([&] { kernel(size, size, size, &c, &x, &y); });
      line(qpusOf(name, qpus), w, pipeClocks(flops) * 12 / qpus, "pipes");
    }
  };
  products(compile(tutorial::productPlain, "productPlain"), "productPlain 96^3");
  products(compile(tutorial::productTiled, "productTiled"), "productTiled 96^3");
}

// Prints the profiled listing that docs/kernels.md contains.
void tutorialListing() {
  const int n = 65536;
  Array a = filled(n), b = filled(n), out(n);
  auto kernel = compile(tutorial::addAhead, "addAhead");
  kernel.setProfiling(true);
  kernel(n, &out, &a, &b);
  (void)std::printf("\n%s", kernel.listing().c_str());
}

// Runs `f` in several new processes, in which no kernel has been compiled, and returns the shortest
// time in milliseconds. `f` calls a kernel once, with almost no work.
double coldCallMs(const std::function<void()>& f) {
  double best = 1e9;
  for (int i = 0; i < 5; ++i) {
    std::array<int, 2> ends{};
    if (pipe(ends.data()) != 0) return best;
    (void)std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
      const auto start = std::chrono::steady_clock::now();
      f();
      const std::chrono::duration<double, std::milli> cold =
          std::chrono::steady_clock::now() - start;
      const double ms = cold.count();
      _exit(write(ends[1], &ms, sizeof ms) == static_cast<ssize_t>(sizeof ms) ? 0 : 1);
    }
    double ms = 1e9;
    (void)close(ends[1]);
    if (read(ends[0], &ms, sizeof ms) == static_cast<ssize_t>(sizeof ms) && ms < best) best = ms;
    (void)close(ends[0]);
    int status = 0;
    (void)waitpid(child, &status, 0);
  }
  return best;
}

void host() {
  Array a = filled(64), b = filled(64), c(64);
  // This is the smallest product for which all QPUs share b.
  Array large = filled(std::size_t{66} * 64), shared(std::size_t{66} * 64);
  const k::Matrix one(a, 1);
  const k::Matrix out(c, 1);
  k::Window window;
  struct Case {
    const char* name;
    std::function<void()> f;
  };
  const std::vector<Case> cases = {
      {"add", [&] { k::add(c, a, b, 1); }},
      {"tanh", [&] { k::tanh(c, a, 1); }},
      {"matvec", [&] { k::matvec(c, one, b, 1, 1); }},
      {"matmul", [&] { k::matmul(out, one, one, 1, 1, 1); }},
      {"matmul, beta", [&] { k::matmul(out, one, one, 1, 1, 1, 1, 1); }},
      {"matmul, shared",
       [&] { k::matmul(k::Matrix(shared, 64), k::Matrix(large, 16), k::Matrix(large, 64), 66, 64, 16); }},
      {"conv2d", [&] { k::conv2d(c, a, b, nullptr, window, 1); }},
      {"softmax", [&] { k::softmax(c, a, 1, 1, 1); }}};
  if (!json) (void)std::printf("\ncompile time on this machine, ms (first call, almost no work)\n");
  for (const Case& x : cases) {
    const double ms = coldCallMs(x.f);
    if (json)
      (void)std::printf("%s{\"kernel\": \"%s\", \"compileMs\": %.3f}", separator(), x.name, ms);
    else
      (void)std::printf("%-28s %10.2f\n", x.name, ms);
  }
  // Measure a call to a compiled kernel. The time includes the emulator's work on one vector.
  std::vector<double> times;
  for (int i = 0; i < 2001; ++i) {
    const auto start = std::chrono::steady_clock::now();
    k::relu(c, a, 16, 1);
    times.push_back(std::chrono::duration<double, std::micro>(
                        std::chrono::steady_clock::now() - start)
                        .count());
  }
  std::nth_element(times.begin(), times.begin() + 1000, times.end());
  if (json)
    (void)std::printf("%s{\"kernel\": \"relu\", \"callUs\": %.3f}", separator(), times[1000]);
  else
    (void)std::printf("%-28s %10.2f microseconds\n", "warm call, relu of 16", times[1000]);
}

int run(int argc, char** argv) {
  bool steps = false;
  for (int i = 1; i < argc; ++i) {
    steps |= std::strcmp(argv[i], "--tutorial") == 0;
    quick |= std::strcmp(argv[i], "--quick") == 0;
    json |= std::strcmp(argv[i], "--json") == 0;
    ranges |= std::strcmp(argv[i], "--ranges") == 0;
  }
  const char* const model = std::getenv("QPU_MODEL");
  if (ranges && model != nullptr && *model != '\0') {
    (void)std::fprintf(stderr, "bench-kernels: --ranges requires the default parameters: unset "
                               "QPU_MODEL\n");
    return 2;
  }
  (void)setenv("QPU_BACKEND", "emulator", 1);
  (void)setenv("QPU_CACHE", "off", 1);
  const auto kernels = [steps] {
    generator.seed(1);
    if (steps) return tutorialSteps();
    elementwise();
    matrixVector();
    matrixMatrix();
  };
  header();
  if (!steps) {
    host();
    if (!json) (void)std::printf("\n");
  }
  if (ranges)
    printRanges(kernels);
  else
    kernels();
  if (json) (void)std::printf("\n]}\n");
  if (steps && !json && !ranges) tutorialListing();
  return wrong ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    (void)std::fprintf(stderr, "bench-kernels: %s\n", e.what());
    return 1;
  }
}
