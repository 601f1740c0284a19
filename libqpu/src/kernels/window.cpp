// Convolution and pooling. If there is padding, the images are first copied to padded images. The
// element for kernel position k and output `pixel` is then at rows[k] + columns[pixel], where k is
// the index of (channel, y, x) in the kernel. A convolution is therefore a product that uses
// tables.
#include <algorithm>
#include <array>
#include <limits>
#include <list>
#include <memory>
#include <mutex>

#include "kernels/host.hpp"
#include "kernels/matmul.hpp"
#include "qpu/stream.h"
#include "runtime/words.hpp"

namespace qpu::kernels {
namespace {

// Reads entries `first` to `first` + 15 from a table with `size` entries. Entries beyond the end
// are replaced by the last entry.
void lookUp(Int& entry, const Ptr<Int>& table, const IntExpr& first, const Int& size) {
  Ptr<Int> at = table + min(first + index(), size - 1);
  gather(at);
  gather(at);
  Int unused;
  receive(entry);
  receive(unused);
}

// Converts planes of inSize elements to planes of outSize elements. Element i of the output is
// element table[i] of the input, or `fill` if table[i] is negative.
void padPlanes(Int planes, Int inSize, Int outSize, Ptr<Int> table, Float fill, Ptr<Float> out,
               Ptr<Float> in) {
  overPlanes<kShort>(planes, outSize, out, [&](const Int& plane, const IntExpr& first) {
    Int from;
    lookUp(from, table, first, outSize);
    Ptr<Float> at = in + (plane * inSize + max(from, 0));
    gather(at);
    gather(at);
    Float v, unused;
    receive(v);
    receive(unused);
    return select(from >= 0, v, fill);
  });
}

// Computes the maximum under the window for `pixels` outputs in each plane.
void poolPlanes(Int planes, Int planeSize, Int width, Int pixels, Ptr<Int> columns,
                Int kernelHeight, Int kernelWidth, Int stepY, Int stepX, Ptr<Float> out,
                Ptr<Float> in) {
  overPlanes<kShort>(planes, pixels, out, [&](const Int& plane, const IntExpr& first) {
    Int offset;
    lookUp(offset, columns, first, pixels);
    Ptr<Float> row = in + (plane * planeSize + offset);
    Float most = -std::numeric_limits<float>::infinity();
    For (Int y = 0, y < kernelHeight, y = y + 1)
      For (Int x = 0, x < kernelWidth, x = x + 2)
        // If the width of the window is odd, the last element of each row is read twice.
        gather(row + x * stepX);
        gather(row + min(x + 1, kernelWidth - 1) * stepX);
        Float v, w;
        receive(v);
        receive(w);
        most = max(most, max(v, w));
      End
      row = row + stepY * width;
    End
    return most;
  });
}

// The tables for one geometry, which are in shared memory.
struct Plan {
  std::array<int, 11> key;
  Scratch tables;
  std::size_t pixels;
  std::size_t window;

  Plan(const std::array<int, 11>& k, std::size_t words, std::size_t outputs, std::size_t under)
      : key(k), tables(words), pixels(outputs), window(under) {}

  // Return the offsets of outputs, of elements under the window, and of elements in a padded
  // plane.
  BusPointer<int> columns() const { return tables.ints(); }
  BusPointer<int> rows() const { return tables.ints(pixels); }
  BusPointer<int> padding() const { return tables.ints(pixels + window); }
};

// A cache that contains the tables for recently used geometries.
class Plans {
 public:
  static Plans& instance() {
    // The object is never destroyed, because the heap is never destroyed either.
    static auto* const plans = new Plans;
    return *plans;
  }

  std::shared_ptr<const Plan> get(const Window& w) {
    const int width = w.width + 2 * w.paddingX;
    const int planeSize = width * (w.height + 2 * w.paddingY);
    const std::array<int, 11> key = {width,          planeSize,     w.channels,
                                    w.kernelHeight, w.kernelWidth, w.strideY * 65536 + w.strideX,
                                    w.dilationY,    w.dilationX,   w.paddingY,
                                    w.paddingX,     onHardware() ? 1 : 0};
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(plans_.begin(), plans_.end(),
                                    [&key](const auto& p) { return p->key == key; });
    if (found != plans_.end()) {
      plans_.splice(plans_.begin(), plans_, found);
      return plans_.front();
    }
    plans_.push_front(make(w, key, width, planeSize));
    if (plans_.size() > kMaxCached) plans_.pop_back();
    return plans_.front();
  }

 private:
  static constexpr std::size_t kMaxCached = 16;

  static std::shared_ptr<const Plan> make(const Window& w, const std::array<int, 11>& key,
                                          int width, int planeSize) {
    const int outHeight = w.outHeight();
    const int outWidth = w.outWidth();
    const auto pixels = static_cast<std::size_t>(outHeight) * static_cast<std::size_t>(outWidth);
    const std::size_t window = static_cast<std::size_t>(w.channels) *
                               static_cast<std::size_t>(w.kernelHeight) *
                               static_cast<std::size_t>(w.kernelWidth);
    const bool padded = w.paddingY != 0 || w.paddingX != 0;
    const std::size_t all = pixels + window + (padded ? static_cast<std::size_t>(planeSize) : 0);
    auto plan = std::make_shared<Plan>(key, all, pixels, window);
    int* next = plan->tables.hostInts();
    for (int y = 0; y < outHeight; ++y)
      for (int x = 0; x < outWidth; ++x) *next++ = y * w.strideY * width + x * w.strideX;
    for (int c = 0; c < w.channels; ++c)
      for (int y = 0; y < w.kernelHeight; ++y)
        for (int x = 0; x < w.kernelWidth; ++x)
          *next++ = c * planeSize + y * w.dilationY * width + x * w.dilationX;
    if (!padded) return plan;
    for (int y = -w.paddingY; y < w.height + w.paddingY; ++y)
      for (int x = -w.paddingX; x < w.width + w.paddingX; ++x) {
        const bool inside = y >= 0 && y < w.height && x >= 0 && x < w.width;
        *next++ = inside ? y * w.width + x : -1;
      }
    return plan;
  }

  std::mutex mutex_;
  std::list<std::shared_ptr<const Plan>> plans_;
};

constexpr int kMostSize = 1 << 15;
constexpr std::int64_t kMostWords = std::int64_t{1} << 28;

// Checks the arguments. Returns false if there is no output.
bool check(const char* name, const Window& w) {
  requireSize(name, "batch", w.batch);
  requireSize(name, "channels", w.channels, 1);
  struct Limit {
    const char* what;
    int value, least;
  };
  const std::array<Limit, 10> limits = {{{"height", w.height, 1},
                                         {"width", w.width, 1},
                                         {"kernelHeight", w.kernelHeight, 1},
                                         {"kernelWidth", w.kernelWidth, 1},
                                         {"strideY", w.strideY, 1},
                                         {"strideX", w.strideX, 1},
                                         {"paddingY", w.paddingY, 0},
                                         {"paddingX", w.paddingX, 0},
                                         {"dilationY", w.dilationY, 1},
                                         {"dilationX", w.dilationX, 1}}};
  for (const Limit& l : limits) {
    requireSize(name, l.what, l.value, l.least);
    if (l.value >= kMostSize)
      fail(name, std::string(l.what) + " is " + std::to_string(l.value) + ", but must be below " +
                     std::to_string(kMostSize));
  }
  const auto fits = [](int size, int padding, int dilation, int kernel) {
    return std::int64_t{size} + std::int64_t{2} * padding > std::int64_t{dilation} * (kernel - 1);
  };
  if (!fits(w.height, w.paddingY, w.dilationY, w.kernelHeight) ||
      !fits(w.width, w.paddingX, w.dilationX, w.kernelWidth))
    fail(name, "the kernel is larger than the padded image");
  const std::int64_t planeSize =
      std::int64_t{w.height + 2 * w.paddingY} * (w.width + 2 * w.paddingX);
  const std::int64_t planes = std::int64_t{w.batch} * w.channels;
  requireFactor(name, "the size of a padded plane", planeSize);
  requireFactor(name, "the number of rows of all planes", planes * (w.height + 2 * w.paddingY));
  if (planeSize * planes >= kMostWords)
    fail(name, "the padded images have " + std::to_string(kMostWords) + " or more elements");
  return w.batch > 0;
}

void requireGroups(const char* name, const char* what, int all, int groups) {
  if (all % groups != 0)
    fail(name, std::to_string(all) + " " + what + " cannot be divided into " +
                   std::to_string(groups) + " groups");
}

std::int64_t inputSize(const Window& w) {
  return std::int64_t{w.batch} * w.channels * w.height * w.width;
}

// The images at `a`, padded with the value `fill`.
class Padded {
 public:
  Padded(const Window& w, const Plan& plan, Floats a, float fill, int qpus) : data_(a) {
    if (w.paddingY == 0 && w.paddingX == 0) return;
    const int planes = w.batch * w.channels;
    const int size = (w.height + 2 * w.paddingY) * (w.width + 2 * w.paddingX);
    copy_ = std::make_unique<Scratch>(static_cast<std::size_t>(planes) *
                                      static_cast<std::size_t>(size));
    data_ = copy_->floats();
    static const auto kernel = compile(padPlanes, "pad");
    run(kernel, qpus, planes, w.height * w.width, size, plan.padding(), fill, data_, a);
  }
  Floats data() const { return data_; }

 private:
  Floats data_;
  std::unique_ptr<Scratch> copy_;
};

Floats advance(Floats p, int elements) {
  return Floats::fromAddress(p.address() + 4 * static_cast<std::uint32_t>(elements));
}

// Returns zeros for convolutions that have no bias.
Floats zeros(std::size_t count, std::unique_ptr<Scratch>& keep) {
  keep = std::make_unique<Scratch>(count);
  runtime::clearDeviceWords(keep->hostInts(), count);
  return keep->floats();
}

}  // namespace

void conv2d(Floats out, Floats a, Floats weights, Floats bias, const Window& window,
            int outChannels, int qpus) {
  const char* const name = "conv2d";
  requireSize(name, "outChannels", outChannels);
  const bool any = check(name, window) && outChannels > 0;
  requireSize(name, "groups", window.groups, 1);
  requireGroups(name, "channels", window.channels, window.groups);
  requireGroups(name, "output channels", outChannels, window.groups);
  const int pixels = window.outHeight() * window.outWidth();
  Window group = window;
  group.channels /= window.groups;
  const int depth = group.channels * window.kernelHeight * window.kernelWidth;
  requireRange(name, "out", out, std::int64_t{window.batch} * outChannels * pixels);
  requireRange(name, "a", a, inputSize(window));
  requireRange(name, "weights", weights, std::int64_t{outChannels} * depth);
  requireFactor(name, "the number of weights of a channel",
                std::int64_t{group.channels} * window.kernelHeight * window.kernelWidth);
  if (bias.address() != 0) requireRange(name, "bias", bias, outChannels);
  if (!any) return;
  std::unique_ptr<Scratch> none;
  const Floats biases =
      bias.address() != 0 ? bias : zeros(static_cast<std::size_t>(outChannels), none);
  const auto plan = Plans::instance().get(group);
  const Padded padded(window, *plan, a, 0, qpus);
  Product p;
  p.cStride = pixels;
  p.m = outChannels / window.groups;
  p.n = pixels;
  p.aRow = depth;
  p.k = depth;
  p.rowTable = plan->rows();
  p.columnTable = plan->columns();
  const int planes = group.channels * (window.height + 2 * window.paddingY) *
                     (window.width + 2 * window.paddingX);
  for (int i = 0; i < window.batch * window.groups; ++i) {
    const int g = i % window.groups;
    p.a = advance(weights, g * p.m * depth);
    p.b = advance(padded.data(), i * planes);
    p.bias = advance(biases, g * p.m);
    p.c = advance(out, i * p.m * pixels);
    productByTables(p, qpus);
  }
}

void maxPool2d(Floats out, Floats a, const Window& window, int qpus) {
  const char* const name = "maxPool2d";
  const bool any = check(name, window);
  const int planes = window.batch * window.channels;
  const int pixels = window.outHeight() * window.outWidth();
  requireRange(name, "out", out, std::int64_t{planes} * pixels);
  requireRange(name, "a", a, inputSize(window));
  if (!any) return;
  static const auto kernel = compile(poolPlanes, "maxPool2d");
  Window plane = window;
  plane.channels = 1;
  const auto plan = Plans::instance().get(plane);
  const Padded padded(window, *plan, a, -std::numeric_limits<float>::infinity(), qpus);
  const int width = window.width + 2 * window.paddingX;
  run(kernel, qpus, planes, width * (window.height + 2 * window.paddingY), width, pixels,
      plan->columns(), window.kernelHeight, window.kernelWidth, window.dilationY,
      window.dilationX, out, padded.data());
}

}  // namespace qpu::kernels
