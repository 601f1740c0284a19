// Tests the machine operations that the compiler's front end selects and optimises.
#include <doctest/doctest.h>

#include <algorithm>

#include "compiler/compile.hpp"
#include "compiler/mir_text.hpp"

// The following header is included last, because it defines the language's keywords as macros.
#include "tests/trace.hpp"

namespace {

using qpu::compiler::Function;
using qpu::compiler::Op;
using qpu::compiler::Operation;
using qpu::compiler::Options;
using qpu::isa::AddOp;

template <typename F>
Function compiled(F f, int level = 2) {
  Options options;
  options.level = level;
  Function function = select(test::trace(f), options);
  CHECK(check(function) == "");
  return function;
}

// Returns the operations of all blocks whose loop depth is at least `depth`.
std::vector<Operation> inLoops(const Function& f, std::uint32_t depth = 1) {
  std::vector<Operation> all;
  for (const auto& block : f.blocks) {
    // Ignore the loop in which QPU 0 waits for the other QPUs.
    const bool ends = !block.operations.empty() &&
                      block.operations.front().op == Op::SemaphoreAcquire;
    if (block.loopDepth >= depth && !ends)
      all.insert(all.end(), block.operations.begin(), block.operations.end());
  }
  return all;
}

std::size_t count(const std::vector<Operation>& operations, Op op) {
  return static_cast<std::size_t>(std::count_if(operations.begin(), operations.end(),
                                                [op](const Operation& o) { return o.op == op; }));
}
std::size_t count(const std::vector<Operation>& operations, AddOp op) {
  return static_cast<std::size_t>(
      std::count_if(operations.begin(), operations.end(),
                    [op](const Operation& o) { return o.op == Op::Add && o.add == op; }));
}
std::vector<Operation> all(const Function& f) {
  std::vector<Operation> operations;
  for (const auto& b : f.blocks)
    operations.insert(operations.end(), b.operations.begin(), b.operations.end());
  return operations;
}

void sumUp(Int n, Ptr<Int> p, Ptr<Int> q, Ptr<Int> r) {
  Int sum = 0;
  For (Int i = 0, i < n, i = i + 16)
    sum = sum + p[i] + q[i];
  End
  *r = sum;
}

}  // namespace

TEST_CASE("addresses in a loop become induction variables") {
  const std::vector<Operation> before = inLoops(compiled(sumUp, 1));
  CHECK(count(before, AddOp::Shl) > 0);
  const std::vector<Operation> after = inLoops(compiled(sumUp));
  CHECK(count(after, AddOp::Shl) == 0);
  // The loop has two requests, two receives, two sums, two additions to addresses, an addition to
  // the counter, and the counter's test.
  CHECK(after.size() == 10);
  CHECK(count(after, Op::Move) == 0);
}

TEST_CASE("an unrolled loop increments a single address") {
  const Function f = compiled([](Int n, Ptr<Int> p, Ptr<Int> r) {
    Int sum = 0;
    For (Int i = 0, i < n, i = i + 64)
      for (int k = 0; k < 4; ++k) sum = sum ^ p[i + 16 * k];
    End
    *r = sum;
  });
  // The loop has three sums, an addition to the address and an addition to the counter. The
  // constants are in registers.
  CHECK(count(inLoops(f), AddOp::Add) == 5);
  CHECK(count(inLoops(f), Op::Load) == 0);
}

TEST_CASE("loop-invariant values are computed before the loop") {
  const auto f = [](Int n, Float a, Float b, Ptr<Float> r) {
    Float x = 0;
    For (Int i = 0, i < n, i = i + 1)
      x = x + a * b * 3.7F;
    End
    *r = x;
  };
  CHECK(count(inLoops(compiled(f, 1)), Op::Mul) == 2);
  CHECK(count(inLoops(compiled(f, 1)), Op::Load) == 1);
  const std::vector<Operation> after = inLoops(compiled(f));
  CHECK(count(after, Op::Mul) == 0);
  CHECK(after.size() == 3);  // the sum, the addition to the counter, and its test
}

TEST_CASE("a masked assignment is one conditional operation") {
  const Function f = compiled([](Ptr<Int> p, Ptr<Int> r) {
    Int a = p[0], b = p[16];
    While (any(a != b))
      Where (a > b)
        a = a - b;
      End
      Where (a < b)
        b = b - a;
      End
    End
    *r = a;
  });
  // The loop has two tests, each with a maximum, and the test of the loop condition.
  CHECK(inLoops(f).size() == 5);
}

TEST_CASE("masks that combine in the flags use no registers") {
  const Function f = compiled([](Ptr<Float> p, Ptr<Float> r) {
    Float a = p[0], b = p[16];
    Where (a < b && a > 2.0F)
      a = a + b;
    End
    *r = a;
  });
  CHECK(count(all(f), AddOp::FMax) == 2);
  CHECK(count(all(f), Op::Move) == 0);
}

// If the compile time doubled with each comparison, this test would not finish within ctest's time limit.
TEST_CASE("a chain of 60 comparisons compiles") {
  const Function f = compiled([](Ptr<Int> p, Ptr<Int> r) {
    Int a = *p;
    qpu::BoolExpr isListed = a == 0;
    for (int i = 1; i < 60; ++i) isListed = isListed || a == i;
    Where (isListed)
      a = -a;
    End
    *r = a;
  });
  CHECK(count(all(f), AddOp::Xor) >= 30);
}

TEST_CASE("loads bypass the caches only after possible stores") {
  const auto f = [](Int n, Ptr<Int> p, Ptr<Int> r) {
    Int a = *p;
    *r = a;
    For (Int i = 0, i < n, i = i + 1)
      a = a + *p;
    End
    *r = a;
  };
  CHECK(count(all(compiled(f)), Op::DmaLoadStart) == 1);
  CHECK(count(all(compiled(f)), Op::TmuRequest) == 1);
  CHECK(count(all(compiled(sumUp)), Op::DmaLoadStart) == 0);
  // Semaphores may order a store by another QPU before the load.
  const Function ordered = compiled([](Ptr<Int> p) {
    If (any(me() == 0))
      *p = 1;
      semaInc(3);
    Else
      semaDec(3);
      Int a = *p;
      *(p + 16) = a;
    End
  });
  CHECK(count(all(ordered), Op::DmaLoadStart) == 1);
}

TEST_CASE("stores are waited for at the next store or at the end") {
  const Function f = compiled([](Ptr<Int> r) {
    store(1, r);
    store(2, r + 32);
    store(3, r + 64);
  });
  CHECK(count(all(f), Op::DmaStoreWait) == 3);
  const std::vector<Operation> operations = f.blocks[0].operations;
  const auto start = std::find_if(operations.begin(), operations.end(), [](const Operation& o) {
    return o.op == Op::DmaStoreStart;
  });
  // The second vector is written while the first store is in progress.
  const auto wait = std::find_if(start, operations.end(),
                                 [](const Operation& o) { return o.op == Op::DmaStoreWait; });
  CHECK(std::count_if(start, wait, [](const Operation& o) { return o.op == Op::VpmWrite; }) == 1);
}

TEST_CASE("stores to adjacent addresses start together") {
  const Function f = compiled([](Ptr<Int> r) {
    for (int i = 0; i < 6; ++i) store(i, r + 16 * i);
  });
  CHECK(count(all(f), Op::VpmWrite) == 6);
  CHECK(count(all(f), Op::DmaStoreStart) == 2);
  CHECK(count(all(f), Op::DmaStoreWait) == 2);
  // Each transfer sets up a window and a shape. The row stride is set only once.
  CHECK(count(all(f), Op::VpmWriteSetup) == 5);
}

TEST_CASE("values are rematerialised under register pressure") {
  const auto f = [](Ptr<Int> p, Ptr<Int> r) {
    Int bag = *p;
    std::array<Int, 40> v;
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = p[16 * static_cast<int>(i)];
    const auto use = [&](int factor) {
      Int sum = 0;
      for (int i = 0; i < 16; ++i) sum = sum * factor + broadcast(bag, i);
      return sum;
    };
    Int first = use(3);
    For (Int i = 0, i < 9, i = i + 1)
      for (Int& x : v) x = x + first * x;
    End
    Int second = use(5);
    for (std::size_t i = 0; i < v.size(); ++i) store(v[i] + second, r + 16 * static_cast<int>(i));
  };
  // Without rematerialisation, the sixteen broadcast vectors stay live throughout the loop.
  CHECK(count(all(compiled(f, 1)), Op::Broadcast) == 16);
  CHECK(count(all(compiled(f)), Op::Broadcast) > 16);
}

TEST_CASE("one semaphore is reserved for the compiler") {
  const auto waits = [](int n) {
    return [n](Ptr<Int>) {
      for (int i = 0; i < n; ++i) {
        semaInc(i);
        semaDec(i);
      }
    };
  };
  CHECK_NOTHROW(compiled(waits(15)));
  try {
    compiled(waits(16));
    FAIL("16 semaphores were accepted");
  } catch (const qpu::CompileError& e) {
    CHECK(std::string(e.what()).find("uses all 16 semaphores") != std::string::npos);
  }
}

TEST_CASE("a load that overwrites announced vectors is an error") {
  try {
    compiled([](Ptr<Int> p) {
      vpmSetupRead(HORIZ, 2, 0);
      *p = vpmGetInt();
      Int x = *p;
      *p = vpmGetInt() + x;
    });
    FAIL("the kernel was accepted");
  } catch (const qpu::CompileError& e) {
    CHECK(std::string(e.what()).find("vpmSetupRead has announced") != std::string::npos);
  }
}

TEST_CASE("the check of machine operations detects errors") {
  const Function sound = compiled(sumUp);
  const auto broken = [&](auto change) {
    Function f = sound;
    change(f);
    return check(f);
  };
  using qpu::compiler::Operand;
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  CHECK(has(broken([](Function& f) { f.blocks[0].operations.pop_back(); }), "no flags"));
  CHECK(has(broken([](Function& f) { f.blocks[0].operations.erase(f.blocks[0].operations.begin()); }),
            "uniforms"));
  CHECK(has(broken([](Function& f) { f.blocks.back().operations.push_back({}); }), "missing"));
  CHECK(has(broken([](Function& f) {
              Operation o;
              o.op = Op::Move;
              o.target = 0;
              o.a = Operand::imm(17);
              f.blocks.back().operations.push_back(o);
            }),
            "no small-immediate code"));
  CHECK(has(broken([](Function& f) {
              Operation o;
              o.op = Op::Move;
              o.target = 0;
              o.a = Operand::reg(f.registers++);
              f.blocks.back().operations.push_back(o);
            }),
            "read before it is written"));
  CHECK(has(broken([](Function& f) { f.blocks[0].next = 100; }), "a block that does not exist"));
}
