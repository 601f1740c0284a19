#include "kernels/host.hpp"
#include "qpu/stream.h"

namespace qpu::kernels {
namespace {

// Normalises planes. The planes are distributed round-robin among the QPUs. If `split` is -1, all
// QPUs share each plane instead.
template <int Length>
void normalise(Int planes, Int channels, Int size, Int split, Ptr<Float> out, Ptr<Float> a,
               Ptr<Float> mean, Ptr<Float> variance, Ptr<Float> weight, Float hasWeight,
               Ptr<Float> bias, Float hasBias, Float epsilon) {
  Int worker = me() & split;
  Int workers = max(numQPUs() & split, 1);
  Int step = max(numQPUs() & ~split, 1);
  Int plane = me() & ~split;
  Int channel = plane;
  Int vpmRow = firstVpmRow<Length>();
  Pointers<1> from;
  For (, plane < planes, plane = plane + step)
    While (channel >= channels)
      channel = channel - channels;
    End
    gather(mean + channel);
    gather(variance + channel);
    gather(weight + channel);
    gather(bias + channel);
    Float middle, factor, w, b;
    receive(middle);
    receive(factor);
    receive(w);
    receive(b);
    // If there are no weights or biases, w and b contain arbitrary numbers, which are multiplied
    // by 0.
    w = w * hasWeight + (FloatExpr(1) - hasWeight);
    b = b * hasBias;
    factor = reciprocalSqrt(factor + epsilon) * w;

    Int start = plane * size;
    from[0] = a + start;
    Ptr<Float> to = out + start;
    std::array<Float, Length> result;
    walk<1, Length>(
        size, from, worker, workers,
        [&](int j, Vectors<1>& x) {
          result[static_cast<std::size_t>(j)] = (x[0] - middle) * factor + b;
        },
        [&](const IntExpr& block) { burst(result, to + block, vpmRow); },
        [&](Vectors<1>& x, const Int& first, const Int& count) {
          finishBursts();
          store((x[0] - middle) * factor + b, to + first, count);
        });
    finishBursts();
    channel = channel + step;
  End
}

constexpr int kSmall = 256;  // planes smaller than this are not shared by several QPUs

}  // namespace

void batchNorm(Floats out, Floats a, Floats mean, Floats variance, Floats weight, Floats bias,
               float epsilon, int batch, int channels, int size, int qpus) {
  const char* const name = "batchNorm";
  requireSize(name, "batch", batch);
  requireSize(name, "channels", channels);
  requireSize(name, "size", size);
  const std::int64_t planes = std::int64_t{batch} * channels;
  requireFactor(name, "the number of planes", planes);
  requireFactor(name, "size", size);
  requireRange(name, "out", out, planes * size);
  requireRange(name, "a", a, planes * size);
  if (planes * size == 0) return;
  requireRange(name, "mean", mean, channels);
  requireRange(name, "variance", variance, channels);
  const bool hasWeight = weight.address() != 0;
  const bool hasBias = bias.address() != 0;
  if (hasWeight) requireRange(name, "weight", weight, channels);
  if (hasBias) requireRange(name, "bias", bias, channels);
  const int split = planes < kMostQpus && size > kSmall ? -1 : 0;
  const auto runKernel = [&](const auto& kernel, int count) {
    run(kernel, count, static_cast<int>(planes), channels, size, split, out, a, mean, variance,
        hasWeight ? weight : mean, hasWeight ? 1.0F : 0.0F, hasBias ? bias : mean,
        hasBias ? 1.0F : 0.0F, epsilon);
  };
  if (mayBeLong(qpus) && (split != 0 || longPays(size))) {
    static const auto kernel = compile(normalise<kLong>, "batchNorm");
    runKernel(kernel, orLong(qpus));
  } else {
    static const auto kernel = compile(normalise<kShort>, "batchNorm");
    runKernel(kernel, qpus);
  }
}

}  // namespace qpu::kernels
