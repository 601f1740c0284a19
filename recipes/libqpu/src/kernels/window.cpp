// Convolution and pooling. Images are copied with their padding around them where
// there is any; then element (k, pixel) under the window lies at rows[k] +
// columns[pixel], k being (channel, y, x) in the kernel, and a convolution is a
// product by tables.
#include <algorithm>
#include <array>
#include <limits>
#include <list>
#include <memory>
#include <mutex>

#include "kernels/host.hpp"
#include "kernels/matmul.hpp"
#include "kernels/stream.hpp"

namespace qpu::kernels {
namespace {

// out[plane][y][x] with `top` rows and `left` columns of `fill` around
// in[plane][height][width].
void padPlanes(Int planes, Int height, Int width, Int top, Int left, Float fill, Ptr<Float> out,
               Ptr<Float> in) {
  Int outWidth = width + (left << 1);
  Int outHeight = height + (top << 1);
  Int y = me(), plane = 0;
  const auto settle = [&] {
    While (y >= outHeight)
      y = y - outHeight;
      plane = plane + 1;
    End
  };
  settle();
  While (plane < planes)
    Int from = min(max(y - top, 0), height - 1);
    Ptr<Float> row = in + (plane * height + from) * width;
    Ptr<Float> to = out + (plane * outHeight + y) * outWidth;
    For (Int x = 0, x < outWidth, x = x + 32)
      std::array<Int, 2> column;
      for (int j = 0; j < 2; ++j) {
        Int& c = column[static_cast<std::size_t>(j)];
        c = x + (index() + 16 * j) - left;
        gather(row + min(max(c, 0), width - 1));
      }
      for (int j = 0; j < 2; ++j) {
        const Int& c = column[static_cast<std::size_t>(j)];
        Float v;
        receive(v);
        v = select(from == y - top && c >= 0 && c < width, v, fill);
        Int count = outWidth - x - 16 * j;
        If (count > 0)
          store(v, to + (x + 16 * j), min(count, 16));
        End
      }
    End
    y = y + numQPUs();
    settle();
  End
}

// Greatest element under the window for `pixels` places of each plane.
void poolPlanes(Int planes, Int planeSize, Int width, Int pixels, Ptr<Int> columns,
                Int kernelHeight, Int kernelWidth, Int stepY, Int stepX, Ptr<Float> out,
                Ptr<Float> in) {
  Int pixel = me() << 4, plane = 0;
  Int whole = (pixels + 15) & -16;
  const auto settle = [&] {
    While (pixel >= whole)
      pixel = pixel - whole;
      plane = plane + 1;
    End
  };
  settle();
  While (plane < planes)
    Int count = min(pixels - pixel, 16);
    Int lane = pixel + min(index(), count - 1);
    gather(columns + lane);
    gather(columns + lane);
    Int offset, unused;
    receive(offset);
    receive(unused);
    Ptr<Float> row = in + (plane * planeSize + offset);
    Float most = -std::numeric_limits<float>::infinity();
    For (Int y = 0, y < kernelHeight, y = y + 1)
      For (Int x = 0, x < kernelWidth, x = x + 2)
        // An odd one out is looked at twice.
        gather(row + x * stepX);
        gather(row + min(x + 1, kernelWidth - 1) * stepX);
        Float v, w;
        receive(v);
        receive(w);
        most = max(most, max(v, w));
      End
      row = row + stepY * width;
    End
    store(most, out + (plane * pixels + pixel), count);
    pixel = pixel + (numQPUs() << 4);
    settle();
  End
}

// Tables of one geometry, in shared memory.
struct Plan {
  std::array<int, 9> key;
  Scratch tables;
  std::size_t pixels;

  BusPointer<int> columns() const { return tables.ints(); }
  BusPointer<int> rows() const { return tables.ints(pixels); }
};

// Geometries used last.
class Plans {
 public:
  static Plans& instance() {
    static Plans* const plans = new Plans;  // never destroyed, as the heap
    return *plans;
  }

  std::shared_ptr<const Plan> get(const Window& w) {
    const int width = w.width + 2 * w.paddingX;
    const int planeSize = width * (w.height + 2 * w.paddingY);
    const std::array<int, 9> key = {width,          planeSize,     w.channels,
                                    w.kernelHeight, w.kernelWidth, w.strideY * 65536 + w.strideX,
                                    w.dilationY,    w.dilationX,   onHardware() ? 1 : 0};
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(plans_.begin(), plans_.end(),
                                    [&key](const auto& p) { return p->key == key; });
    if (found != plans_.end()) {
      plans_.splice(plans_.begin(), plans_, found);
      return plans_.front();
    }
    plans_.push_front(make(w, key, width, planeSize));
    if (plans_.size() > kMostKept) plans_.pop_back();
    return plans_.front();
  }

 private:
  static constexpr std::size_t kMostKept = 16;

  static std::shared_ptr<const Plan> make(const Window& w, const std::array<int, 9>& key,
                                          int width, int planeSize) {
    const int outHeight = w.outHeight();
    const int outWidth = w.outWidth();
    const auto pixels = static_cast<std::size_t>(outHeight) * static_cast<std::size_t>(outWidth);
    const std::size_t window = static_cast<std::size_t>(w.channels) *
                               static_cast<std::size_t>(w.kernelHeight) *
                               static_cast<std::size_t>(w.kernelWidth);
    auto plan = std::shared_ptr<Plan>(new Plan{key, Scratch(pixels + window), pixels});
    int* next = plan->tables.hostInts();
    for (int y = 0; y < outHeight; ++y)
      for (int x = 0; x < outWidth; ++x) *next++ = y * w.strideY * width + x * w.strideX;
    for (int c = 0; c < w.channels; ++c)
      for (int y = 0; y < w.kernelHeight; ++y)
        for (int x = 0; x < w.kernelWidth; ++x)
          *next++ = c * planeSize + y * w.dilationY * width + x * w.dilationX;
    return plan;
  }

  std::mutex mutex_;
  std::list<std::shared_ptr<const Plan>> plans_;
};

constexpr int kMostSize = 1 << 15;
constexpr std::int64_t kMostWords = std::int64_t{1} << 28;

// False when there is no output.
bool check(const char* name, const Window& w) {
  requireSize(name, "batch", w.batch);
  requireSize(name, "channels", w.channels, 1);
  struct Limit {
    const char* what;
    int value, least;
  };
  const Limit limits[] = {{"height", w.height, 1},
                          {"width", w.width, 1},
                          {"kernelHeight", w.kernelHeight, 1},
                          {"kernelWidth", w.kernelWidth, 1},
                          {"strideY", w.strideY, 1},
                          {"strideX", w.strideX, 1},
                          {"paddingY", w.paddingY, 0},
                          {"paddingX", w.paddingX, 0},
                          {"dilationY", w.dilationY, 1},
                          {"dilationX", w.dilationX, 1}};
  for (const Limit& l : limits) {
    requireSize(name, l.what, l.value, l.least);
    if (l.value >= kMostSize)
      refuse(name, std::string(l.what) + " is " + std::to_string(l.value) + ", must be below " +
                       std::to_string(kMostSize));
  }
  const auto fits = [](int size, int padding, int dilation, int kernel) {
    return std::int64_t{size} + 2 * padding > std::int64_t{dilation} * (kernel - 1);
  };
  if (!fits(w.height, w.paddingY, w.dilationY, w.kernelHeight) ||
      !fits(w.width, w.paddingX, w.dilationX, w.kernelWidth))
    refuse(name, "the kernel is larger than the padded image");
  const std::int64_t planeSize =
      std::int64_t{w.height + 2 * w.paddingY} * (w.width + 2 * w.paddingX);
  const std::int64_t planes = std::int64_t{w.batch} * w.channels;
  requireFactor(name, "the size of a padded plane", planeSize);
  requireFactor(name, "the number of all planes' rows", planes * (w.height + 2 * w.paddingY));
  if (planeSize * planes >= kMostWords)
    refuse(name, "the padded images have " + std::to_string(kMostWords) + " elements or more");
  return w.batch > 0;
}

std::int64_t inputSize(const Window& w) {
  return std::int64_t{w.batch} * w.channels * w.height * w.width;
}

// `images` images from `a` on with their padding, which is `fill`.
class Padded {
 public:
  Padded(const Window& w, Floats a, float fill, int qpus) : data_(a) {
    if (w.paddingY == 0 && w.paddingX == 0) return;
    const int planes = w.batch * w.channels;
    copy_ = std::make_unique<Scratch>(static_cast<std::size_t>(planes) *
                                      static_cast<std::size_t>(w.height + 2 * w.paddingY) *
                                      static_cast<std::size_t>(w.width + 2 * w.paddingX));
    data_ = copy_->floats();
    static const auto kernel = compile(padPlanes, "pad");
    run(kernel, qpus, planes, w.height, w.width, w.paddingY, w.paddingX, fill, data_, a);
  }
  Floats data() const { return data_; }

 private:
  Floats data_;
  std::unique_ptr<Scratch> copy_;
};

Floats advance(Floats p, int elements) {
  return Floats::fromAddress(p.address() + 4 * static_cast<std::uint32_t>(elements));
}

// Zeros for convolutions without a bias.
Floats zeros(std::size_t count, std::unique_ptr<Scratch>& keep) {
  keep = std::make_unique<Scratch>(count);
  std::fill_n(keep->hostInts(), count, 0);
  return keep->floats();
}

}  // namespace

void conv2d(Floats out, Floats a, Floats weights, Floats bias, const Window& window,
            int outChannels, int qpus) {
  const char* const name = "conv2d";
  requireSize(name, "outChannels", outChannels);
  const bool any = check(name, window) && outChannels > 0;
  const int pixels = window.outHeight() * window.outWidth();
  const int depth = window.channels * window.kernelHeight * window.kernelWidth;
  requireRange(name, "out", out, std::int64_t{window.batch} * outChannels * pixels);
  requireRange(name, "a", a, inputSize(window));
  requireRange(name, "weights", weights, std::int64_t{outChannels} * depth);
  requireFactor(name, "the number of weights of a channel",
                std::int64_t{window.channels} * window.kernelHeight * window.kernelWidth);
  if (bias.address() != 0) requireRange(name, "bias", bias, outChannels);
  if (!any) return;
  std::unique_ptr<Scratch> none;
  Product p;
  p.bias = bias.address() != 0 ? bias : zeros(static_cast<std::size_t>(outChannels), none);
  p.c = out;
  p.cStride = pixels;
  p.m = outChannels;
  p.n = pixels;
  const auto plan = Plans::instance().get(window);
  const Padded padded(window, a, 0, qpus);
  p.a = weights;
  p.aRow = depth;
  p.k = depth;
  p.rowTable = plan->rows();
  p.columnTable = plan->columns();
  const int image = window.channels * (window.height + 2 * window.paddingY) *
                    (window.width + 2 * window.paddingX);
  for (int i = 0; i < window.batch; ++i) {
    p.b = advance(padded.data(), i * image);
    p.c = advance(out, i * outChannels * pixels);
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
  const Padded padded(window, a, -std::numeric_limits<float>::infinity(), qpus);
  const int width = window.width + 2 * window.paddingX;
  run(kernel, qpus, planes, width * (window.height + 2 * window.paddingY), width, pixels,
      plan->columns(), window.kernelHeight, window.kernelWidth, window.dilationY,
      window.dilationX, out, padded.data());
}

}  // namespace qpu::kernels
