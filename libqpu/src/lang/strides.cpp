#include "lang/strides.hpp"

#include <algorithm>

#include "lang/recorder.hpp"

namespace qpu::detail {
namespace {

constexpr int kElements = 16;
constexpr int kWordBytes = 4;
constexpr int kMostLeftOut = 2047;  // the maximum stride of a DMA transfer, in words

Node placed(Node address, int word) {
  return word == 0 ? address
                   : binary(Op::Add, Type::Address, address, constantInt(kWordBytes * word));
}

Node rotated(Node value, Type type, int by) {
  return by % kElements == 0 ? value : binary(Op::Rotate, type, value, constantInt(by % kElements));
}

// Returns a mask that has all bits set in element i and no bits set in the other elements.
Node onlyElement(int i) {
  const Node difference =
      binary(Op::Xor, Type::Int, leaf(Op::ElementNumber, Type::Int), constantInt(i));
  return binary(Op::Asr, Type::Int, binary(Op::Sub, Type::Int, difference, constantInt(1)),
                constantInt(31));
}

int requireStride(const char* construct, int elements, Location where) {
  Recorder& r = Recorder::current();
  const Site site = r.site(construct, where);
  r.requireOutermost(site, "it takes effect in source order, not in order of execution");
  r.requireRange(site, "the stride", elements, 0, kMostLeftOut);
  return elements;
}

}  // namespace

void readStride(int elements, Location where) {
  Recorder::current().readStride = requireStride("setReadStride", elements, where);
}

void writeStride(int elements, Location where) {
  Recorder::current().writeStride = requireStride("setWriteStride", elements, where);
}

// Loads vectors of consecutive words. No vector extends beyond the last element that is needed. The
// words that are needed are then rotated to their positions.
Node loadWithStride(Node address, Type type, int stride) {
  const int step = stride + 1;
  const int lastStart = (kElements - 1) * stride;
  int start = 0;
  Node words = unary(Op::Load, type, address);
  Node all = constantInt(0);
  for (int i = 0; i < kElements; ++i) {
    const int word = i * step;
    if (word >= start + kElements) {
      start = std::min(word, lastStart);
      words = unary(Op::Load, type, placed(address, start));
    }
    const Node moved = rotated(words, type, i - (word - start) + kElements);
    all = binary(Op::Or, type, all, binary(Op::And, Type::Int, moved, onlyElement(i)));
  }
  return all;
}

void storeWithStride(Node value, Node address, bool wait, int stride, Location where) {
  Recorder& r = Recorder::current();
  const Type type = r.expression(r.use(value)).type;
  const Node words = r.variable(type);
  const Node place = r.variable(Type::Address);
  r.refuseInWhere(r.site("store", where), "a store writes all 16 words");
  assign(words, value, where);
  assign(place, address, where);
  for (int i = 0; i < kElements; ++i) {
    const Node element = rotated(words, type, kElements - i);
    const Node to = placed(place, i * (stride + 1));
    const Node one = constantInt(1);
    Statement& s = r.add(StatementKind::Store, "store", where);
    s.value = r.use(element);
    s.address = r.use(to);
    s.limit = r.use(one);
    s.wait = wait;
  }
}

}  // namespace qpu::detail
