// The back half of the compiler: words for machine operations.
#include <doctest/doctest.h>

#include "compiler/compile.hpp"
#include "isa/text.hpp"
#include "mir_build.hpp"

namespace {

using mir::Builder;
using mir::Function;
using qpu::code::Object;
using qpu::compiler::emit;
using qpu::compiler::Options;
namespace isa = qpu::isa;

struct Counts {
  int instructions = 0, dual = 0, floats = 0;
};

Counts countLoop(const Object& object) {
  // From the target of the only backward branch to its last delay slot.
  std::size_t from = 0;
  std::size_t to = 0;
  for (std::size_t k = 0; k < object.words.size(); ++k) {
    const auto i = isa::decode(object.words[k]);
    REQUIRE(i);
    if (i->form != isa::Form::Branch) continue;
    const auto offset = static_cast<std::int32_t>(i->immediate) / 8;
    if (offset >= 0) continue;
    from = static_cast<std::size_t>(static_cast<std::int64_t>(k) + 4 + offset);
    to = k + 4;
  }
  Counts counts;
  for (std::size_t k = from; k < to; ++k) {
    const auto i = isa::decode(object.words[k]);
    ++counts.instructions;
    const bool add = i->opAdd != isa::AddOp::Nop;
    const bool mul = i->opMul != isa::MulOp::Nop;
    counts.dual += add && mul ? 1 : 0;
    counts.floats += (i->opAdd == isa::AddOp::FAdd ? 1 : 0) + (i->opMul == isa::MulOp::FMul ? 1 : 0);
  }
  return counts;
}

}  // namespace

TEST_CASE("an empty kernel ends") {
  Builder b;
  b.block().exit = mir::Block::Exit::End;
  const Object object = emit(b.f, {});
  REQUIRE(object.words.size() >= 3);
  CHECK(isa::decode(object.words[object.words.size() - 3])->signal == isa::Signal::End);
  CHECK(object.uniforms.size() == 3);
  CHECK(object.siteOf.size() == object.words.size());
}

TEST_CASE("a matrix product's inner block fills both pipes") {
  for (const int steps : {1, 2}) {
    const Object object = emit(mir::matrixBlock(8, 4, steps), {});
    const Counts counts = countLoop(object);
    CHECK(counts.floats == 64 * steps);
    // MUL pipe: products and broadcasts; ADD pipe: sums and addresses; either:
    // five requests and the four results that are used more than once.
    const int ideal = (64 + 8 + 5 + 5 + 5) * steps / 2 + 1;
    MESSAGE(steps << " steps: " << counts.instructions << " instructions, ideal " << ideal << ", "
                  << counts.dual << " dual");
    CHECK(ideal * 100 >= counts.instructions * 75);
  }
}
