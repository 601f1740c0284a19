// Checks the results of programs on the emulator.
#include "error_facts.hpp"
#include "tests/emulator_run.hpp"

using namespace emulator_run;
using qpu::detail::hex;

namespace {

// The contents of r2 and the flags after one instruction. The operands a and b are in r0 and r1.
struct Outcome {
  std::uint32_t bits;
  std::string flags;
};

Outcome outcome(Instruction i, std::uint32_t a, std::uint32_t b) {
  Code code;
  code.set(toR(0), a).set(toR(1), b);
  code << flags(i);
  code.set(toR(3), 0);
  code << load(toR(3), 1);
  code.instructions.back().condAdd = Cond::NSet;
  code.store(r(2), 0).store(r(3), 1);
  code.set(toR(3), 0);
  code << load(toR(3), 1);
  code.instructions.back().condAdd = Cond::ZSet;
  code.store(r(3), 2).set(toR(3), 0);
  code << load(toR(3), 1);
  code.instructions.back().condAdd = Cond::CSet;
  code.store(r(3), 3).end();
  const Result result = run(code);
  Outcome o{result.vector(0)[5], {}};
  for (int n = 0; n < 3; ++n)
    if (result.vector(n + 1)[5] != 0) o.flags += "nzc"[n];
  return o;
}

bool is(const Outcome& o, std::uint32_t bits, const std::string& flags) {
  INFO(hex(o.bits) << " " << o.flags << ", expected " << hex(bits) << " " << flags);
  CHECK(o.bits == bits);
  CHECK(o.flags == flags);
  return o.bits == bits && o.flags == flags;
}

Outcome adds(AddOp op, std::uint32_t a, std::uint32_t b) {
  return outcome(add(op, toR(2), r(0), r(1)), a, b);
}
Outcome multiplies(MulOp op, std::uint32_t a, std::uint32_t b) {
  return outcome(mul(op, toR(2), r(0), r(1)), a, b);
}

}  // namespace

TEST_CASE("results and flags match recorded ones") {
  struct Row {
    AddOp op;
    std::uint32_t a, b, result;
    const char* flags;
  };
  const std::vector<Row> rows = {
      {AddOp::FAdd, 0x80000000, 0x80000000, 0x00000000, "z"},
      {AddOp::FAdd, 0x80000000, 0x7fffffff, 0x7f800000, "c"},
      {AddOp::FAdd, 0x7fffffff, 0xffffffff, 0xff800000, "n"},
      {AddOp::FAdd, 0x00007fff, 0x00008000, 0x00000000, "z"},
      {AddOp::FAdd, 0x3f800000, 0x90000000, 0x3f7fffff, "c"},
      {AddOp::FAdd, 0x70000000, 0xbf800000, 0x6fffffff, "c"},
      {AddOp::FAdd, 0xf0000000, 0xbf800000, 0xf0000000, "n"},
      {AddOp::FAdd, 0x3f800000, 0xbf800000, 0x00000000, "z"},
      {AddOp::FSub, 0x7fffffff, 0x7fffffff, 0xff800000, "n"},
      {AddOp::FSub, 0x00000000, 0x80000000, 0x00000000, "z"},
      {AddOp::FSub, 0x90000000, 0xbf800000, 0x3f7fffff, "c"},
      {AddOp::FMin, 0xffffffff, 0x70000000, 0xffffffff, "n"},
      {AddOp::FMin, 0x00000001, 0x80000000, 0x80000000, "nc"},
      {AddOp::FMin, 0x3f800000, 0x00000001, 0x00000001, "c"},
      {AddOp::FMax, 0x00000000, 0x80000000, 0x80000000, "n"},
      {AddOp::FMax, 0x80000000, 0x00000000, 0x00000000, "z"},
      {AddOp::FMax, 0x7fffffff, 0x3f800000, 0x7fffffff, "c"},
      {AddOp::FMax, 0xffffffff, 0xf0000000, 0xf0000000, "n"},
      {AddOp::FtoI, 0xbf800000, 0, 0xffffffff, "n"},
      {AddOp::FtoI, 0x7fffffff, 0, 0x00000000, "z"},
      {AddOp::ItoF, 0x7fffffff, 0, 0x4effffff, "c"},
      {AddOp::ItoF, 0x80000000, 0, 0xcf000000, "n"},
      {AddOp::ItoF, 0xbf800000, 0, 0xce810000, "n"},
      {AddOp::Clz, 0x00000000, 0, 0x00000020, ""},
      {AddOp::Clz, 0x90000000, 0, 0x00000000, "z"},
  };
  for (const Row& row : rows) {
    INFO(static_cast<int>(row.op) << " " << hex(row.a) << " " << hex(row.b));
    CHECK(is(adds(row.op, row.a, row.b), row.result, row.flags));
  }
}

TEST_CASE("integer operations set the carry flag") {
  CHECK(is(adds(AddOp::Add, 0xffffffff, 1), 0, "zc"));
  CHECK(is(adds(AddOp::Add, 0x7fffffff, 1), 0x80000000, "n"));
  CHECK(is(adds(AddOp::Sub, 1, 2), 0xffffffff, "nc"));
  CHECK(is(adds(AddOp::Sub, 2, 1), 1, ""));
  CHECK(is(adds(AddOp::Sub, 0x80000000, 1), 0x7fffffff, ""));
  CHECK(is(adds(AddOp::Shr, 0x80000003, 1), 0x40000001, "c"));
  CHECK(is(adds(AddOp::Shr, 0x80000003, 32), 0x80000003, "n"));
  CHECK(is(adds(AddOp::Asr, 0x80000003, 2), 0xe0000000, "nc"));
  CHECK(is(adds(AddOp::Shl, 0x80000001, 1), 2, "c"));
  CHECK(is(adds(AddOp::Shl, 0x40000001, 1), 0x80000002, "n"));
  CHECK(is(adds(AddOp::Ror, 0x00000003, 1), 0x80000001, "n"));
  CHECK(is(adds(AddOp::Min, 0xffffffff, 1), 0xffffffff, "n"));
  CHECK(is(adds(AddOp::Min, 1, 0xffffffff), 0xffffffff, "nc"));
  CHECK(is(adds(AddOp::Max, 1, 0xffffffff), 1, "c"));
  CHECK(is(adds(AddOp::And, 0xff00ff00, 0x0ff00ff0), 0x0f000f00, ""));
  CHECK(is(adds(AddOp::Or, 0xff00ff00, 0x0ff00ff0), 0xfff0fff0, "n"));
  CHECK(is(adds(AddOp::Xor, 5, 5), 0, "z"));
  CHECK(is(adds(AddOp::Not, 0, 7), 0xffffffff, "n"));
  CHECK(is(adds(AddOp::V8AddS, 0xff8001fe, 0x01800101), 0xffff02ff, "n"));
  CHECK(is(adds(AddOp::V8SubS, 0xff800100, 0x01ff0101), 0xfe000000, "n"));
  CHECK(is(adds(AddOp::FMinAbs, 0xc0000000, 0x3f800000), 0x3f800000, "c"));
  CHECK(is(adds(AddOp::FMaxAbs, 0xc0000000, 0x3f800000), 0x40000000, "c"));
  CHECK(is(adds(AddOp::FMaxAbs, 0x3f800000, 0xc0000000), 0x40000000, ""));
  CHECK(is(adds(AddOp::Clz, 0x00010000, 0), 15, ""));
  CHECK(is(adds(AddOp::Clz, 1, 0), 31, ""));
}

TEST_CASE("the MUL pipe executes its operations") {
  CHECK(is(multiplies(MulOp::FMul, 0x40400000, 0xbf000000), 0xbfc00000, "n"));
  CHECK(is(multiplies(MulOp::FMul, 0x7f800000, 0), 0, "z"));
  CHECK(is(multiplies(MulOp::FMul, 0x7f800001, 0xbf800000), 0xff800000, "n"));
  CHECK(is(multiplies(MulOp::FMul, 0x7f000000, 0x40800000), 0x7f800000, ""));
  CHECK(is(multiplies(MulOp::FMul, 0x00800000, 0x3f000000), 0, "z"));
  CHECK(is(multiplies(MulOp::FMul, 0x80000000, 0x3f800000), 0, "z"));
  CHECK(is(multiplies(MulOp::FMul, 0x3f800001, 0x3f800001), 0x3f800002, ""));
  CHECK(is(multiplies(MulOp::Mul24, 0xff000003, 0x01000005), 15, ""));
  CHECK(is(multiplies(MulOp::Mul24, 0xffffff, 0xffffff), 0xfe000001, "nc"));
  CHECK(is(multiplies(MulOp::V8MulD, 0xff80ff01, 0xff8000ff), 0xff400001, "n"));
  CHECK(is(multiplies(MulOp::V8Min, 0x01ff7f80, 0x02fe807f), 0x01fe7f7f, ""));
  CHECK(is(multiplies(MulOp::V8Max, 0x01ff7f80, 0x02fe807f), 0x02ff8080, ""));
  CHECK(is(multiplies(MulOp::V8AddS, 0x80808080, 0x7f80ff00), 0xffffff80, "n"));
  CHECK(is(multiplies(MulOp::V8SubS, 0x10203040, 0x20203030), 0x00000010, ""));
}

TEST_CASE("both pipes read old values and write together") {
  Code code;
  code.set(toR(0), 5).set(toR(1), 7);
  code << both(move(toR(0), r(1)), mul(MulOp::V8Min, toR(1), r(0), r(0)));
  code.store(r(0)).store(r(1), 1).end();
  const Result result = run(code);
  CHECK(result.vector(0)[3] == 7);
  CHECK(result.vector(1)[3] == 5);
}

TEST_CASE("conditions select elements for writes and flags") {
  Code code;
  code << move(toR(0), ra(address::kElementNumber));
  code << flags(add(AddOp::Sub, to(address::kNop), r(0), imm(8)));  // N is set in elements 0..7
  code.set(toR(1), 100);
  code << add(AddOp::Add, toR(1), r(0), r(1), Cond::NSet);
  // Where N is set, Z is set only in element 3. Element 8 keeps its Z flag.
  code << flags(add(AddOp::Sub, to(address::kNop), r(0), imm(3), Cond::NSet));
  code.set(toR(2), 0).set(toR(3), 0);
  code << move(toR(2), imm(1), Cond::ZSet) << move(toR(3), imm(1), Cond::NClear);
  code.store(r(1)).store(r(2), 1).store(r(3), 2).end();
  const Result result = run(code);
  for (std::uint32_t e = 0; e < 16; ++e) {
    CHECK(result.vector(0)[e] == (e < 8 ? 100 + e : 100));
    CHECK(result.vector(1)[e] == (e == 3 || e == 8 ? 1 : 0));
    CHECK(result.vector(2)[e] == (e >= 3 ? 1 : 0));
  }
}

TEST_CASE("flags come from the ADD pipe unless it is idle") {
  Code code;
  code.set(toR(0), 0).set(toR(1), 1);
  code << flags(move(to(address::kNop), r(0)));  // sets the Z flag
  code << flags(both(add(AddOp::Or, to(address::kNop), r(1), r(1), Cond::Never),
                     mul(MulOp::V8Min, to(address::kNop), r(1), r(1))));
  code.set(toR(2), 0);
  code << move(toR(2), imm(1), Cond::ZSet);
  code << flags(mul(MulOp::V8Min, to(address::kNop), r(1), r(1)));
  code.set(toR(3), 0);
  code << move(toR(3), imm(1), Cond::ZClear);
  code.store(r(2)).store(r(3), 1).end();
  const Result result = run(code);
  CHECK(result.vector(0)[0] == 1);
  CHECK(result.vector(1)[0] == 1);
}

TEST_CASE("immediates, element number and QPU number are read") {
  Code code;
  code << move(toR(0), imm(31)) << move(toR(1), imm(40)) << move(toR(2), imm(50));
  code.store(r(0)).store(r(1), 1).store(r(2), 2);
  code << load(toR(0), 0xccccaaaa, Form::LoadPerElementUnsigned);
  code << load(toR(1), 0xccccaaaa, Form::LoadPerElementSigned);
  code << move(toR(2), rb(address::kQpuNumber));
  code.store(r(0), 3).store(r(1), 4).store(r(2), 5);
  Instruction twice = load(toA(3), 77);
  twice.condMul = Cond::Always;
  twice.waddrMul = 9;
  code << twice << nop() << add(AddOp::Add, toR(0), ra(3), rb(9));
  code.store(r(0), 6).end();
  const Result result = run(code);
  CHECK(result.vector(0)[7] == 0xffffffff);
  CHECK(result.vector(1)[7] == 0x3b800000);
  CHECK(result.vector(2)[7] == static_cast<std::uint32_t>(-14));
  for (std::uint32_t e = 0; e < 16; ++e) {
    CHECK(result.vector(3)[e] == e % 4);
    CHECK(result.vector(4)[e] == (e % 4 < 2 ? e % 4 : e % 4 - 4));
    CHECK(result.vector(5)[e] == 0);
    CHECK(result.vector(6)[e] == 154);
  }
}

TEST_CASE("rotations move elements") {
  Code code;
  code << move(toR(0), ra(address::kElementNumber)) << move(toA(1), ra(address::kElementNumber));
  const auto rotated = [](In in, int n) {
    Instruction i = mul(MulOp::V8Min, toR(1), in, in);
    i.signal = Signal::SmallImmediate;
    i.raddrB = byte(48 + n);
    return i;
  };
  code << rotated(r(0), 3);
  code.store(r(1), 0);
  code << rotated(ra(1), 3);
  code.store(r(1), 1);
  code.set(toB(address::kR5), 9) << nop() << rotated(r(0), 0);
  code.store(r(1), 2);
  // The result is 0 4 8 12, one element per quad.
  code << move(toA(address::kR5), r(0)) << nop() << nop();
  code.store(r(5), 3).end();
  const Result result = run(code);
  for (std::uint32_t e = 0; e < 16; ++e) {
    CHECK(result.vector(0)[e] == (e + 13) % 16);
    CHECK(result.vector(1)[e] == (e & 12U) + (e + 1) % 4);
    CHECK(result.vector(2)[e] == (e + 7) % 16);
    CHECK(result.vector(3)[e] == (e & 12U));
  }
}

TEST_CASE("uniforms come from the launch or from memory") {
  Setting setting;
  setting.uniforms = {{11, kIn + 8, 22}};
  for (std::uint32_t i = 0; i < 1024; ++i) setting.in[i] = 1000 + i;
  Code code;
  code << move(toR(0), ra(kUniform)) << move(toR(1), rb(kUniform));
  code << move(toR(2), ra(kUniform));
  code.store(r(0)).store(r(2), 1);
  code << move(to(address::kUniformsAddress), r(1)) << nop() << nop();
  for (int n = 0; n < 40; ++n) code << move(toR(3), ra(kUniform));
  code.store(r(3), 2).end();
  const Result result = run(code, setting);
  CHECK(result.vector(0)[15] == 11);
  CHECK(result.vector(1)[0] == 22);
  CHECK(result.vector(2)[4] == 1041);
}

TEST_CASE("branches have three delay slots, conditions and links") {
  Code code;
  code.set(toR(0), 5).set(toR(1), 0);
  const int loop = code.size();
  code << add(AddOp::Add, toR(1), r(1), r(0));
  code << flags(add(AddOp::Sub, toR(0), r(0), imm(1)));
  code << branch(8 * (loop - code.size() - 4), BranchCond::AnyZClear);
  code << add(AddOp::Add, toR(1), r(1), imm(15));  // executed in every iteration
  code.nops(2);
  code.store(r(1));
  // This branch skips two instructions and writes a link address.
  Instruction over = branch(16);
  over.waddrAdd = 4;
  code << over;
  code.nops(3);
  const auto linked = static_cast<std::uint32_t>(code.size());
  code.set(toR(1), 1).set(toR(1), 2);
  code.store(r(1), 1).store(ra(4), 2);
  // This branch uses an address in a register.
  code.set(toA(5), 0);
  const std::size_t place = code.instructions.size() - 1;
  code << nop();
  Instruction back = branch(0);
  back.branchRelative = false;
  back.branchRegister = true;
  back.branchRegisterA = 5;
  code << back;
  code.nops(3).set(toR(1), 3);
  code.instructions[place].immediate = 0x50000000U + 8U * static_cast<std::uint32_t>(code.size());
  code.store(r(1), 3).end();
  const Result result = run(code);
  CHECK(result.vector(0)[0] == 15 + 5 * 15);
  CHECK(result.vector(1)[0] == 90);
  CHECK(result.vector(2)[0] == 0x50000000U + 8 * linked);
  CHECK(result.vector(3)[0] == 90);
}

TEST_CASE("every branch condition is evaluated") {
  // N is set in elements 0..7, Z is set in element 8, and C (unsigned less) is set in elements
  // 0..7.
  const std::vector<std::pair<BranchCond, bool>> all = {
      {BranchCond::AllZSet, false},  {BranchCond::AllZClear, false}, {BranchCond::AnyZSet, true},
      {BranchCond::AnyZClear, true}, {BranchCond::AllNSet, false},   {BranchCond::AllNClear, false},
      {BranchCond::AnyNSet, true},   {BranchCond::AnyNClear, true},  {BranchCond::AllCSet, false},
      {BranchCond::AllCClear, false}, {BranchCond::AnyCSet, true},   {BranchCond::AnyCClear, true},
      {BranchCond::Always, true}};
  for (const auto& [cond, taken] : all) {
    Code code;
    code << move(toR(0), ra(address::kElementNumber));
    code << flags(add(AddOp::Sub, to(address::kNop), r(0), imm(8)));
    code.set(toR(1), 0).branchTo(code.size() + 5, cond).set(toR(1), 1);
    code.store(r(1)).end();
    CHECK(run(code).vector()[0] == (taken ? 0 : 1));
  }
}

TEST_CASE("gathers from both TMUs return in request order") {
  Setting setting;
  for (std::uint32_t i = 0; i < 1024; ++i) setting.in[i] = i;
  Code code;
  code << add(AddOp::Shl, toR(0), ra(address::kElementNumber), imm(2));
  code.set(toR(1), kIn);
  code << add(AddOp::Add, toR(0), r(0), r(1));
  code.set(toR(1), 256).set(to(address::kTmuNoSwap), 1);
  code << nop() << nop();
  for (int n = 0; n < 4; ++n) {
    code << move(to(address::kTmu0S), r(0));
    code << add(AddOp::Add, toR(0), r(0), imm(4));  // the address is not aligned to a cache line
    code << move(to(address::kTmu1S), r(0));
    code << add(AddOp::Add, toR(0), r(0), r(1));
  }
  for (int n = 0; n < 4; ++n) {
    code << signal(Signal::LoadTmu0);
    code.store(r(4), 2 * n);
    code << signal(Signal::LoadTmu1);
    code.store(r(4), 2 * n + 1);
  }
  // The addresses are scattered. The low bits of the addresses are ignored.
  code << mul(MulOp::Mul24, toR(0), ra(address::kElementNumber), ra(address::kElementNumber));
  code << add(AddOp::Shl, toR(0), r(0), imm(2));
  code.set(toR(1), kIn + 3);
  code << add(AddOp::Add, toR(0), r(0), r(1));
  code.tmuLoad(r(0)).store(r(4), 8).end();
  const Result result = run(code, setting);
  for (int n = 0; n < 4; ++n)
    for (std::uint32_t e = 0; e < 16; ++e) {
      const auto k = static_cast<std::uint32_t>(n);
      CHECK(result.vector(2 * n)[e] == 65 * k + e);
      CHECK(result.vector(2 * n + 1)[e] == 65 * k + 1 + e);
    }
  for (std::uint32_t e = 0; e < 16; ++e) CHECK(result.vector(8)[e] == e * e);
}

TEST_CASE("SFU results are in r4 from the third instruction on") {
  Code code;
  for (int n = 0; n < 4; ++n) {
    code.set(toR(0), 0x40800000);
    code << move(to(address::kSfuRecip + n), r(0)) << nop() << nop();
    code.store(r(4), n);
  }
  code.end();
  const Result result = run(code);
  const std::array<double, 4> exact{0.25, 0.5, 16, 2};
  for (int n = 0; n < 4; ++n) {
    float found = 0;
    std::memcpy(&found, &result.vector(n)[2], 4);
    CHECK(static_cast<double>(found) ==
          doctest::Approx(exact[static_cast<std::size_t>(n)]).epsilon(1e-4));
  }
}

TEST_CASE("DMA moves blocks in both directions") {
  Setting setting;
  for (std::uint32_t i = 0; i < 1024; ++i) setting.in[i] = i;
  Code code;
  code.set(toA(address::kVpmSetup), loadPitch(128));
  code.dmaLoad(loadSetup(4, 16, 8), kIn);
  code.set(toA(address::kVpmSetup), rows32(8, 4));
  for (int n = 0; n < 4; ++n) {
    code << move(toR(n), ra(address::kVpm));
    code << nop();
  }
  for (int n = 0; n < 4; ++n) code.store(r(n), n);
  // The same rows are stored with gaps between them and without their last words.
  code.set(toB(address::kVpmSetup), storeStride(64 + 8));
  code.dmaStore(storeSetup(4, 14, 8, 1), kOut + 4 * 256);
  code.end();
  const Result result = run(code, setting);
  for (std::uint32_t row = 0; row < 4; ++row)
    for (std::uint32_t e = 0; e < 16; ++e) {
      CHECK(result.vector(static_cast<int>(row))[e] == 32 * row + e);
      CHECK(result.out[256 + 32 * row + e] == (e < 14 ? 32 * row + e + 1 : 0));
    }
  CHECK(result.report.memoryWriteBytes == 4 * 64 + 4 * 56);
}

TEST_CASE("QPUs pass data with a semaphore") {
  Code code;
  code << move(toR(0), ra(kUniform));
  code << flags(move(to(address::kNop), r(0)));
  code.branchTo(code.size() + 4 + 5, BranchCond::AllZClear);
  code.set(toB(address::kVpmSetup), rows32(5)).set(to(address::kVpm), 42);
  code << semaphore(2, false);
  code.set(toR(0), 0) << nop();
  const int rest = code.size();
  code << flags(move(to(address::kNop), r(0)));
  code.branchTo(rest + 4 + 5, BranchCond::AllZSet);
  code << semaphore(2, true);
  code.dmaStore(storeSetup(1, 16, 5), kOut);
  code << nop();
  code.end();
  Setting setting;
  setting.uniforms = {{1}, {0}};
  CHECK(run(code, setting).vector()[0] == 42);
  setting.uniforms = {{0}, {1}};
  CHECK(run(code, setting).vector()[0] == 42);
}

TEST_CASE("a program raises the host interrupt") {
  Code code;
  code.end();
  CHECK(!run(code).report.hostInterrupt);
  Code other;
  other.set(to(address::kHostInterrupt), 1).end();
  CHECK(run(other).report.hostInterrupt);
}

TEST_CASE("packs write parts of a register of file A") {
  // Before the write, the register contains 0x11223344.
  const auto pack = [](int mode, const Instruction& i, std::uint32_t a, std::uint32_t b) {
    Code code;
    code.set(toR(0), a).set(toR(1), b).set(toA(5), 0x11223344);
    Instruction into = i;
    into.pack = byte(mode);
    code << into << nop();
    code.store(ra(5)).end();
    return run(code).vector()[9];
  };
  const auto whole = [&](int mode, std::uint32_t a) { return pack(mode, move(toA(5), r(0)), a, 0); };
  CHECK(whole(0, 0xdeadbeef) == 0xdeadbeef);
  CHECK(whole(1, 0xdeadbeef) == 0x1122beef);
  CHECK(whole(2, 0xdeadbeef) == 0xbeef3344);
  CHECK(whole(3, 0xdeadbeef) == 0xefefefef);
  CHECK(whole(4, 0xdeadbeef) == 0x112233ef);
  CHECK(whole(5, 0xdeadbeef) == 0x1122ef44);
  CHECK(whole(6, 0xdeadbeef) == 0x11ef3344);
  CHECK(whole(7, 0xdeadbeef) == 0xef223344);
  CHECK(whole(8, 0xdeadbeef) == 0xdeadbeef);
  CHECK(whole(9, 0xdeadbeef) == 0x11228000);
  CHECK(whole(9, 70000) == 0x11227fff);
  CHECK(whole(10, 0xffffffff) == 0xffff3344);
  CHECK(whole(11, 300) == 0xffffffff);
  CHECK(whole(11, 0xfffffff0) == 0);
  CHECK(whole(12, 77) == 0x1122334d);
  CHECK(whole(13, 300) == 0x1122ff44);
  CHECK(whole(14, 0x80000000) == 0x11003344);
  CHECK(whole(15, 255) == 0xff223344);

  // If a signed overflow occurs, the sign of b selects the limit that is the result. In clamping
  // modes, the result is this limit ANDed with the clamped sum.
  const auto sum = [&](int mode, std::uint32_t a, std::uint32_t b) {
    return pack(mode, add(AddOp::Add, toA(5), r(0), r(1)), a, b);
  };
  CHECK(sum(0, 0x7fffffff, 1) == 0x80000000);
  CHECK(sum(8, 0x7fffffff, 1) == 0x7fffffff);
  CHECK(sum(8, 0x80000000, 0xffffffff) == 0x80000000);
  CHECK(sum(8, 5, 6) == 11);
  CHECK(sum(1, 0x7fffffff, 1) == 0x11227fff);
  CHECK(sum(1, 0x80000000, 0xffffffff) == 0x11228000);
  CHECK(sum(4, 0x7fffffff, 1) == 0x112233ff);
  CHECK(sum(4, 0x80000000, 0xffffffff) == 0x11223300);
  CHECK(sum(9, 0x7fffffff, 1) == 0x11220000);   // 0x7fff & 0x8000
  CHECK(sum(12, 0x7fffffff, 1) == 0x11223300);  // 0xff & 0
  CHECK(pack(8, add(AddOp::Sub, toA(5), r(0), r(1)), 0x80000000, 1) == 0x7fffffff);
  CHECK(pack(8, mul(MulOp::Mul24, toA(5), r(0), r(1)), 0xffffff, 0xffffff) == 0xfe000001);

  // Results of float operations are converted to half floats.
  const auto floats = [&](int mode, std::uint32_t a) {
    return pack(mode, add(AddOp::FMax, toA(5), r(0), r(0)), a, 0);
  };
  CHECK(floats(1, 0x3f800000) == 0x11223c00);
  CHECK(floats(2, 0xc0000000) == 0xc0003344);
  CHECK(floats(9, 0x46fffe00) == 0x11227800);  // the result is 32767
  CHECK(floats(1, 0x47800000) == 0x11227c00);
  CHECK(floats(1, 0xff800001) == 0x1122fc00);
  CHECK(floats(1, 0x387fffff) == 0x11220000);
  CHECK(floats(1, 0x38800000) == 0x11220400);
  CHECK(floats(4, 0x3f8000ab) == 0x112233ab);
  CHECK(floats(12, 0x3f8000ab) == 0x112233ff);
  CHECK(pack(1, mul(MulOp::FMul, toA(5), r(0), r(0)), 0x40000000, 0) == 0x11224400);

  // The flags are those of the result before it is packed.
  Code code;
  code.set(toR(0), 0x80000000).set(toR(1), 0);
  code << packed(1, flags(move(toA(5), r(0))));
  code << move(toR(1), imm(1), Cond::NSet) << move(toR(1), imm(2), Cond::ZSet);
  code.store(r(1)).end();
  CHECK(run(code).vector()[0] == 1);
}

TEST_CASE("packs apply under conditions and to immediates") {
  Code code;
  code.set(toA(5), 0x11223344);
  code << flags(add(AddOp::Sub, to(address::kNop), ra(address::kElementNumber), imm(4)));
  Instruction i = load(toA(5), 0xab);
  i.pack = 5;
  i.condAdd = Cond::NSet;
  code << i << nop();
  code.store(ra(5)).end();
  const Vector16 v = run(code).vector();
  for (std::size_t e = 0; e < 16; ++e) CHECK(v[e] == (e < 4 ? 0x1122ab44 : 0x11223344));
}

TEST_CASE("colour packs convert floats to bytes") {
  const auto colour = [](int mode, std::uint32_t a) {
    Code code;
    code.set(toR(0), a).set(toB(5), 0x11223344).set(toR(1), 0x3f800000);
    Instruction i = mul(MulOp::FMul, toB(5), r(0), r(1));
    i.pm = true;
    i.pack = byte(mode);
    code << i << nop();
    code.store(rb(5)).end();
    return run(code).vector()[0];
  };
  CHECK(colour(3, 0x3f800000) == 0xffffffff);
  CHECK(colour(4, 0x3f000000) == 0x11223380);
  CHECK(colour(5, 0x40000000) == 0x1122ff44);
  CHECK(colour(6, 0xbf800000) == 0x11003344);
  CHECK(colour(7, 0) == 0x00223344);
}

TEST_CASE("unpacks read parts of file A and r4") {
  const auto unpack = [](int mode, const Instruction& i, std::uint32_t a) {
    Code code;
    code.set(toA(5), a).set(toR(1), 0) << nop();
    code << unpacked(mode, i);
    code.store(r(0)).end();
    return run(code).vector()[4];
  };
  const auto integer = [&](int mode, std::uint32_t a) {
    return unpack(mode, move(toR(0), ra(5)), a);
  };
  const auto floats = [&](int mode, std::uint32_t a) {
    return unpack(mode, add(AddOp::FMax, toR(0), ra(5), ra(5)), a);
  };
  CHECK(integer(1, 0x12348765) == 0xffff8765);
  CHECK(integer(2, 0x12348765) == 0x1234);
  CHECK(integer(3, 0x12348765) == 0x12121212);
  CHECK(integer(4, 0x12348765) == 0x65);
  CHECK(integer(5, 0x12348765) == 0x87);
  CHECK(integer(6, 0x12348765) == 0x34);
  CHECK(integer(7, 0x12348765) == 0x12);
  CHECK(floats(1, 0x00003c00) == 0x3f800000);
  CHECK(floats(2, 0xc0003c00) == 0xc0000000);
  CHECK(floats(1, 0x00007c01) == 0x7f802000);
  CHECK(floats(1, 0x00008001) == 0x80002000);
  CHECK(floats(3, 0x3f000000) == 0x3f3f3f3f);
  CHECK(floats(4, 1) == 0x3b808080);
  CHECK(floats(4, 127) == 0x3efefefe);
  CHECK(floats(5, 0x8000) == 0x3f008080);
  CHECK(floats(7, 0xff000000) == 0x3f800000);
  // A float operation in either pipe selects the conversion to float.
  CHECK(unpack(1, mul(MulOp::FMul, toR(0), ra(5), imm(32)), 0x3c00) == 0x3f800000);
  CHECK(unpack(1, add(AddOp::FtoI, toR(0), ra(5), ra(5)), 0x4400) == 4);

  Setting setting;
  setting.in.assign(1024, 0x80ff3c00);
  const auto r4 = [&](int mode) {
    Code code;
    code.set(toR(0), kIn).tmuLoad(r(0));
    Instruction i = unpacked(mode, move(toR(0), r(4)));
    i.pm = true;
    code << i;
    code.store(r(0)).end();
    return run(code, setting).vector()[0];
  };
  CHECK(r4(0) == 0x80ff3c00);
  CHECK(r4(1) == 0x3f800000);
  CHECK(r4(3) == 0x80808080);
  CHECK(r4(6) == 0x3f800000);
  CHECK(r4(7) == 0x3f008080);
}

TEST_CASE("writes to r5 copy one element or one per four") {
  Code code;
  code << move(to(address::kR5), ra(address::kElementNumber)) << nop();
  code.store(r(5));
  code << move(toB(address::kR5), ra(address::kElementNumber)) << nop();
  code.store(r(5), 1);
  // The condition must hold for the element that is copied. The condition holds for elements 8..15.
  code << flags(add(AddOp::Sub, to(address::kNop), ra(address::kElementNumber), imm(8)));
  code << move(to(address::kR5), imm(9), Cond::NClear) << nop();
  code.store(r(5), 2);
  code << mul(MulOp::V8Min, toA(address::kR5), ra(address::kElementNumber),
              ra(address::kElementNumber));
  code.store(r(5), 3).end();
  const Result result = run(code);
  for (std::uint32_t e = 0; e < 16; ++e) {
    CHECK(result.vector(0)[e] == (e & 12U));
    CHECK(result.vector(1)[e] == 0);
    CHECK(result.vector(2)[e] == (e < 8 ? 0 : 9));
    CHECK(result.vector(3)[e] == (e & 12U));
  }
}

TEST_CASE("VPM vectors are read and written in all modes") {
  // Write in this mode, and then read the whole window by DMA.
  const auto window = [](std::uint32_t setup) {
    Code code;
    code.set(toR(0), 0x01010101);
    code << mul(MulOp::Mul24, toR(0), ra(address::kElementNumber), r(0));
    code.set(toR(1), 0x10101);
    code << add(AddOp::Add, toR(0), r(0), r(1));  // 0x010101 * (e + 1)
    code.set(toB(address::kVpmSetup), setup);
    code << move(to(address::kVpm), r(0));
    code.set(toB(address::kVpmSetup), storeStride(0));
    code.dmaStore(storeSetup(64, 16, 0), kOut).end();
    return run(code).out;
  };
  const auto value = [](std::uint32_t e) { return 0x010101 * (e + 1); };
  struct Mode {
    std::uint32_t base;
    bool horizontal, laned;
    std::uint32_t bits;
  };
  for (const Mode& m : std::vector<Mode>{{0xa00, true, false, 32},
                                         {0x200, false, false, 32},
                                         {0x900, true, false, 16},
                                         {0xd00, true, true, 16},
                                         {0x100, false, false, 16},
                                         {0x500, false, true, 16},
                                         {0x800, true, false, 8},
                                         {0xc00, true, true, 8},
                                         {0x000, false, false, 8},
                                         {0x400, false, true, 8}}) {
    INFO("base " << hex(m.base));
    const std::uint32_t parts = 32 / m.bits;
    const std::uint32_t part = parts - 1;
    const std::uint32_t y = m.horizontal ? 21 : 32;
    const std::uint32_t x = m.horizontal ? 0 : 11;
    const std::uint32_t at = m.horizontal ? y : y | x;
    const Words out = window(m.base | (at * parts + part));
    Words expected(4096);
    const std::uint32_t mask = m.bits == 32 ? UINT32_MAX : (1U << m.bits) - 1;
    for (std::uint32_t e = 0; e < 16; ++e) {
      const std::uint32_t along = m.laned || m.bits == 32 ? e : part * 16 / parts + e / parts;
      const std::uint32_t within = m.laned || m.bits == 32 ? part : e % parts;
      const std::uint32_t word = m.horizontal ? 16 * y + along : 16 * (y + along) + x;
      expected[word] |= (value(e) & mask) << (m.bits == 32 ? 0 : m.bits * within);
    }
    CHECK(out == expected);
    // Reading in the same mode must return the same parts.
    Code code;
    code.set(toA(address::kVpmSetup), m.base | (at * parts + part) | 1U << 20U);
    code.set(toR(0), 0x01010101);
    code << mul(MulOp::Mul24, toR(0), ra(address::kElementNumber), r(0));
    code.set(toR(1), 0x10101);
    code << add(AddOp::Add, toR(0), r(0), r(1));
    code.set(toB(address::kVpmSetup), m.base | (at * parts + part));
    code << move(to(address::kVpm), r(0)) << move(toR(0), ra(address::kVpm));
    code.store(r(0)).end();
    const Result result = run(code);
    for (std::uint32_t e = 0; e < 16; ++e) CHECK(result.vector()[e] == (value(e) & mask));
  }
}

TEST_CASE("VPM windows advance by their stride and wrap") {
  Code code;
  code.set(toB(address::kVpmSetup), 0xa00 | 62 | 1U << 12U);
  for (int n = 0; n < 4; ++n) code.set(to(address::kVpm), 100U + static_cast<std::uint32_t>(n));
  code.set(toA(address::kVpmSetup), 0xa00 | 1 | 62U << 12U | 2U << 20U);
  code << move(toR(0), ra(address::kVpm)) << nop() << move(toR(1), rb(address::kVpm)) << nop();
  code.set(toB(address::kVpmSetup), storeStride(0));
  code.dmaStore(storeSetup(64, 16, 0), kOut);
  code.store(r(0), 64).store(r(1), 65).end();
  const Result result = run(code);
  CHECK(result.vector(62)[1] == 100);
  CHECK(result.vector(63)[1] == 101);
  CHECK(result.vector(0)[1] == 102);
  CHECK(result.vector(1)[1] == 103);
  CHECK(result.vector(64)[0] == 103);
  CHECK(result.vector(65)[0] == 101);
}

TEST_CASE("DMA handles columns, blocks, halves and bytes") {
  Setting setting;
  for (std::uint32_t i = 0; i < 1024; ++i) setting.in[i] = 0x01000000 * i + 0x10000 * i + i;
  const auto window = [&](const std::vector<std::uint32_t>& setups, std::uint32_t from = kIn) {
    Code code;
    for (const std::uint32_t s : setups) code.set(toA(address::kVpmSetup), s);
    code.set(toA(address::kDmaAddress), from) << readA(address::kDmaWait);
    code.set(toB(address::kVpmSetup), storeStride(0));
    code.dmaStore(storeSetup(64, 16, 0), kOut).end();
    return run(code, setting).out;
  };
  const auto in = [&](std::uint32_t n) { return setting.in[n]; };
  // Load three memory rows of five words into one column. The rows are six VPM rows apart.
  Words out = window({loadPitch(64), loadSetup(3, 5, 7, 2, false, 6)});
  for (std::uint32_t row = 0; row < 3; ++row)
    for (std::uint32_t j = 0; j < 5; ++j)
      CHECK(out[16 * (7 + 6 * row + j) + 2] == in(16 * row + j));
  // Sixteen memory rows of one word form a vertical vector.
  out = window({loadPitch(4), loadSetup(16, 1, 32, 0, false, 1)});
  for (std::uint32_t row = 0; row < 16; ++row) CHECK(out[16 * (32 + row)] == in(row));
  // Read the vector and store it vertically again, so that each word is a memory row.
  {
    Code code;
    code.set(toA(address::kVpmSetup), loadPitch(4)).dmaLoad(loadSetup(16, 1, 16, 3, false, 1), kIn);
    code.set(toA(address::kVpmSetup), 0x200U | 1U << 20U | 1U << 12U | 16U | 3U).nops(3);
    code << add(AddOp::Add, toR(0), ra(address::kVpm), ra(address::kVpm));
    code.set(toB(address::kVpmSetup), 0x200U | 1U << 12U | 32U | 5U);
    code << move(to(address::kVpm), r(0));
    code.set(toB(address::kVpmSetup), storeStride(0, true));
    code.dmaStore(storeSetup(16, 1, 32, 5, false), kOut).end();
    const Words doubled = run(code, setting).out;
    for (std::uint32_t e = 0; e < 16; ++e) CHECK(doubled[e] == 2 * in(e));
  }
  // Halfwords: each row has three units, and the second memory row starts one and a half words
  // further down.
  out = window({loadPitch(64), loadSetup(2, 3, 20, 6, false, 3, 2)});
  for (std::uint32_t row = 0; row < 2; ++row)
    for (std::uint32_t j = 0; j < 3; ++j) {
      const std::uint32_t n = 3 * row + j;
      CHECK((out[16 * (20 + n / 2) + 6] >> 16 * (n % 2) & 0xffffU) ==
            (in(16 * row + j / 2) >> 16 * (j % 2) & 0xffffU));
    }
  // MPITCH is 3, so memory rows are 8 * 2^3 bytes apart. VPITCH 0 means 16.
  out = window({loadSetup(2, 16, 3, 0, true, 0) | 3U << 24U});
  for (std::uint32_t j = 0; j < 16; ++j) {
    CHECK(out[16 * 3 + j] == in(j));
    CHECK(out[16 * 19 + j] == in(16 + j));
  }
  // Halfwords that start with the upper half of word 4.
  out = window({loadSetup(1, 7, 9, 4, true, 1, 3)}, kIn + 2);
  for (std::uint32_t j = 0; j < 7; ++j) {
    const std::uint32_t half = (in((j + 1) / 2) >> 16 * ((j + 1) % 2)) & 0xffffU;
    CHECK((out[16 * 9 + 4 + (j + 1) / 2] >> 16 * ((j + 1) % 2) & 0xffffU) == half);
  }
  CHECK((out[16 * 9 + 4] & 0xffffU) == 0);
  // Bytes: there are two rows, and the second row starts one VPM row (4 units) after the first row.
  out = window({loadPitch(64), loadSetup(2, 6, 9, 0, true, 4, 4)}, kIn + 1);
  for (std::uint32_t row = 0; row < 2; ++row)
    for (std::uint32_t j = 0; j < 6; ++j) {
      const std::uint32_t b = in(16 * row + (j + 1) / 4) >> 8 * ((j + 1) % 4) & 0xffU;
      CHECK((out[16 * (9 + row) + j / 4] >> 8 * (j % 4) & 0xffU) == b);
    }
  // Test the other direction: store a column, a packed block and halfwords.
  Code code;
  code.set(toA(address::kVpmSetup), loadPitch(64)).dmaLoad(loadSetup(16, 16, 0), kIn);
  code.dmaStore(storeSetup(1, 16, 0, 3, false), kOut);
  code.set(toB(address::kVpmSetup), storeStride(8, true));
  code.dmaStore(storeSetup(3, 24, 1, 4), kOut + 256);
  code.set(toB(address::kVpmSetup), storeStride(2));
  code.dmaStore(storeSetup(2, 3, 5, 1, true, 3), kOut + 1024);
  code.end();
  out = run(code, setting).out;
  for (std::uint32_t j = 0; j < 16; ++j) CHECK(out[j] == in(16 * j + 3));
  for (std::uint32_t row = 0; row < 3; ++row)
    for (std::uint32_t j = 0; j < 24; ++j) CHECK(out[64 + 26 * row + j] == in(20 + 24 * row + j));
  const auto half = [&](std::uint32_t n) { return in(n / 2) >> 16 * (n % 2) & 0xffffU; };
  for (std::uint32_t row = 0; row < 2; ++row)
    for (std::uint32_t j = 0; j < 3; ++j) {
      const std::uint32_t n = 4 * row + j;
      CHECK((out[256 + n / 2] >> 16 * (n % 2) & 0xffffU) == half(2 * (16 * (5 + row) + 1) + 1 + j));
    }
}

TEST_CASE("a barrier synchronises 12 QPUs") {
  // Each QPU writes its own row and, after the barrier, stores the row of the next QPU.
  Code code;
  code << move(toR(0), ra(kUniform)) << move(toR(3), ra(kUniform));
  code.set(toR(1), 0xa00);
  code << add(AddOp::Add, toB(address::kVpmSetup), r(0), r(1));
  code << move(to(address::kVpm), r(0));
  code << flags(move(to(address::kNop), r(0)));
  const int others = code.size() + 4 + 11 + 11 + 4;
  code.branchTo(others, BranchCond::AllZClear);
  for (int n = 0; n < 11; ++n) code << semaphore(0, true);
  for (int n = 0; n < 11; ++n) code << semaphore(1, false);
  code.branchTo(others + 2);
  CHECK(code.size() == others);
  code << semaphore(0, false) << semaphore(1, true);
  code << add(AddOp::Shl, toR(2), r(3), imm(7));
  code.set(toR(1), storeSetup(1, 16, 0));
  code << add(AddOp::Add, toB(address::kVpmSetup), r(1), r(2));
  code.set(toR(1), kOut);
  code << add(AddOp::Shl, toR(0), r(0), imm(6));
  code << add(AddOp::Add, toB(address::kDmaAddress), r(0), r(1)) << readB(address::kDmaWait);
  code.end();
  Setting setting;
  setting.uniforms.clear();
  for (std::uint32_t q = 0; q < 12; ++q) setting.uniforms.push_back({q, (q + 1) % 12});
  const Result result = run(code, setting);
  for (int q = 0; q < 12; ++q)
    CHECK(result.vector(q)[7] == static_cast<std::uint32_t>((q + 1) % 12));
}

TEST_CASE("the mutex admits one QPU at a time") {
  // All QPUs add to a sum in one VPM row. A QPU holds the mutex while it reads, increases and
  // writes the sum.
  Code code;
  code << readA(address::kMutex);
  code.set(toA(address::kVpmSetup), rows32(0, 1)).nops(3);
  code << add(AddOp::Add, toR(0), ra(address::kVpm), imm(1));
  code.set(toB(address::kVpmSetup), rows32(0));
  code << move(to(address::kVpm), r(0));
  code.dmaStore(storeSetup(1, 16, 0), kOut);
  code << move(to(address::kMutex), r(0));
  code.end();
  Setting setting;
  setting.uniforms.resize(12);
  CHECK(run(code, setting).vector()[0] == 12);
}
