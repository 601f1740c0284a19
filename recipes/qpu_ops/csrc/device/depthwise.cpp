#include "depthwise.h"

#include "kernel_parts.h"

namespace torch_qpu::learning {
namespace {

// Returns the index in a plane of the element at this row and column, or a negative number if the
// position is in the padding.
Int place_of(const Int& row, const Int& column, const Int& height, const Int& width) {
  return qpu::select(row >= 0 && row < height && column >= 0 && column < width,
                     row * width + column, -1);
}

void convolve_planes(Int planes, Int size, Int height, Int width, Ptr<Int> firsts,
                     Ptr<Int> channels, Ptr<Int> rows, Ptr<Int> columns, Int kernel_height,
                     Int kernel_width, Int step_y, Int step_x, Ptr<Float> weights, Ptr<Float> bias,
                     Float has_bias, Ptr<Float> out, Ptr<Float> in) {
  Int under = kernel_height * kernel_width;
  overPlanes<kShort>(planes, size, out, [&](const Int& plane, const IntExpr& first) {
    Int pixel = min(first + index(), size - 1);
    Int start, channel, row, left;
    gather(firsts + plane);
    gather(channels + plane);
    gather(rows + pixel);
    gather(columns + pixel);
    receive(start);
    receive(channel);
    receive(row);
    receive(left);
    Float sum;
    read(sum, bias + qpu::select(has_bias > 0, channel, 0));
    sum = sum * has_bias;
    Ptr<Float> image = in + start;
    Ptr<Float> weight = weights + channel * under;
    For (Int y = 0, y < kernel_height, y = y + 1)
      Int column = left;
      For (Int x = 0, x < kernel_width, x = x + 1)
        Int here = place_of(row, column, height, width);
        Float v, w;
        gather(image + max(here, 0));
        gather(weight);
        receive(v);
        receive(w);
        sum = sum + qpu::select(here >= 0, v * w, 0);
        weight = weight + 1;
        column = column + step_x;
      End
      row = row + step_y;
    End
    return FloatExpr(sum);
  });
}

// `rows` and `columns` contain the position of each weight in the first window.
void weights_of_planes(Int channels, Int under, Int batch, Int height, Int width, Int out_height,
                       Int out_width, Ptr<Int> rows, Ptr<Int> columns, Int step_y, Int step_x,
                       Ptr<Float> out, Ptr<Float> in, Ptr<Float> gradient) {
  Int size = height * width, pixels = out_height * out_width;
  overPlanes<kShort>(channels, under, out, [&](const Int& channel, const IntExpr& first) {
    Int own = min(first + index(), under - 1);
    Int top, left;
    gather(rows + own);
    gather(columns + own);
    receive(top);
    receive(left);
    Int plane = channel;
    Sum sum;
    For (Int image = 0, image < batch, image = image + 1)
      Ptr<Float> from = in + plane * size;
      Ptr<Float> g = gradient + plane * pixels;
      Int row = top;
      For (Int y = 0, y < out_height, y = y + 1)
        Int column = left;
        For (Int x = 0, x < out_width, x = x + 1)
          Int here = place_of(row, column, height, width);
          Float v, w;
          gather(from + max(here, 0));
          gather(g);
          receive(v);
          receive(w);
          sum.add(qpu::select(here >= 0, v * w, 0));
          g = g + 1;
          column = column + step_x;
        End
        row = row + step_y;
      End
      plane = plane + channels;
    End
    return sum.total - sum.lost;
  });
}

// The rows and columns of the first window. Consecutive rows and columns are `step` apart. The
// first row and the first column are at -padding.
struct Grid {
  std::vector<int> rows;
  std::vector<int> columns;

  Grid(int height, int width, int step_y, int step_x, int padding_y, int padding_x) {
    for (int y = 0; y < height; ++y)
      for (int x = 0; x < width; ++x) {
        rows.push_back(y * step_y - padding_y);
        columns.push_back(x * step_x - padding_x);
      }
  }
};

}  // namespace

void depthwise(float* out, const float* in, const float* weights, const float* bias,
               const Depthwise& shape, int qpus) {
  const Pooling& w = shape.window;
  const Grid grid(w.out_height, w.out_width, w.stride_y, w.stride_x, w.padding_y, w.padding_x);
  std::vector<int> firsts, channels;
  for (int image = 0; image < shape.batch; ++image)
    for (int c = 0; c < shape.channels * shape.outputs; ++c) {
      firsts.push_back((image * shape.channels + c / shape.outputs) * w.height * w.width);
      channels.push_back(c);
    }
  if (firsts.empty() || grid.rows.empty()) return;
  static const auto kernel = compile(convolve_planes, "depthwise");
  const Table<int> starts(firsts), of(channels), rows(grid.rows), columns(grid.columns);
  run(kernel, qpus, static_cast<int>(firsts.size()), w.out_height * w.out_width, w.height, w.width,
      starts.place(), of.place(), rows.place(), columns.place(), w.kernel_height, w.kernel_width,
      w.dilation_y, w.dilation_x, at(weights), at(bias == nullptr ? weights : bias),
      bias == nullptr ? 0.0F : 1.0F, at(out), at(in));
}

void depthwise_weights(float* out, const float* in, const float* gradient, const Depthwise& shape,
                       int qpus) {
  const Pooling& w = shape.window;
  const Grid grid(w.kernel_height, w.kernel_width, w.dilation_y, w.dilation_x, w.padding_y,
                  w.padding_x);
  if (shape.channels == 0 || grid.rows.empty()) return;
  static const auto kernel = compile(weights_of_planes, "depthwise-weights");
  const Table<int> rows(grid.rows), columns(grid.columns);
  run(kernel, qpus, shape.channels, static_cast<int>(grid.rows.size()), shape.batch, w.height,
      w.width, w.out_height, w.out_width, rows.place(), columns.place(), w.stride_y, w.stride_x,
      at(out), at(in), at(gradient));
}

}  // namespace torch_qpu::learning
