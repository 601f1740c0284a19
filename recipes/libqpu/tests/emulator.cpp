// The emulator: what programs compute.
#include <ios>

#include "tests/emulator_run.hpp"

using namespace emulator_run;

namespace {

// What one instruction leaves in r2, with a in r0 and b in r1, and the flags.
struct Outcome {
  std::uint32_t bits;
  std::string flags;
};

Outcome outcome(Instruction i, std::uint32_t a, std::uint32_t b) {
  Code code;
  code.set(toR(0), a).set(toR(1), b);
  code << flags(std::move(i));
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
  INFO(std::hex << o.bits << " " << o.flags << ", expected " << bits << " " << flags);
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

TEST_CASE("recorded results and flags") {
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
    INFO(static_cast<int>(row.op) << " " << std::hex << row.a << " " << row.b);
    CHECK(is(adds(row.op, row.a, row.b), row.result, row.flags));
  }
}

TEST_CASE("integer operations and their carry") {
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

TEST_CASE("operations of the MUL pipe") {
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

TEST_CASE("both pipes at once read old values and write together") {
  Code code;
  code.set(toR(0), 5).set(toR(1), 7);
  code << both(move(toR(0), r(1)), mul(MulOp::V8Min, toR(1), r(0), r(0)));
  code.store(r(0)).store(r(1), 1).end();
  const Result result = run(code);
  CHECK(result.vector(0)[3] == 7);
  CHECK(result.vector(1)[3] == 5);
}

TEST_CASE("conditions choose elements, and flags keep where they do not hold") {
  Code code;
  code << move(toR(0), ra(address::kElementNumber));
  code << flags(add(AddOp::Sub, to(address::kNop), r(0), imm(8)));  // N: 0..7
  code.set(toR(1), 100);
  code << add(AddOp::Add, toR(1), r(0), r(1), Cond::NSet);
  // Where N: Z of element 3; element 8 keeps its Z.
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

TEST_CASE("flags come from the ADD pipe unless it does nothing, even under never") {
  Code code;
  code.set(toR(0), 0).set(toR(1), 1);
  code << flags(move(to(address::kNop), r(0)));  // Z
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

TEST_CASE("small immediates, loads of immediates, element and QPU number") {
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

TEST_CASE("rotations") {
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
  code << move(toA(address::kR5), r(0)) << nop() << nop();  // 0 4 8 12
  code.store(r(5), 3).end();
  const Result result = run(code);
  for (std::uint32_t e = 0; e < 16; ++e) {
    CHECK(result.vector(0)[e] == (e + 13) % 16);
    CHECK(result.vector(1)[e] == (e & 12U) + (e + 1) % 4);
    CHECK(result.vector(2)[e] == (e + 7) % 16);
    CHECK(result.vector(3)[e] == (e & 12U));
  }
}

TEST_CASE("uniforms, and a stream in memory") {
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

TEST_CASE("branches have three delay slots, conditions, and links") {
  Code code;
  code.set(toR(0), 5).set(toR(1), 0);
  const int loop = code.size();
  code << add(AddOp::Add, toR(1), r(1), r(0));
  code << flags(add(AddOp::Sub, toR(0), r(0), imm(1)));
  code << branch(8 * (loop - code.size() - 4), BranchCond::AnyZClear);
  code << add(AddOp::Add, toR(1), r(1), imm(15));  // in every round
  code.nops(2);
  code.store(r(1));
  // Over two instructions, with a link.
  Instruction over = branch(16);
  over.waddrAdd = 4;
  code << over;
  code.nops(3);
  const auto linked = static_cast<std::uint32_t>(code.size());
  code.set(toR(1), 1).set(toR(1), 2);
  code.store(r(1), 1).store(ra(4), 2);
  // To an address in a register.
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

TEST_CASE("every branch condition") {
  // Flags of elements: N in 0..7, Z in 8, C (unsigned below) in 0..7.
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

TEST_CASE("gathers from both TMUs come in the order of their requests") {
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
    code << add(AddOp::Add, toR(0), r(0), imm(4));  // not aligned to lines
    code << move(to(address::kTmu1S), r(0));
    code << add(AddOp::Add, toR(0), r(0), r(1));
  }
  for (int n = 0; n < 4; ++n) {
    code << signal(Signal::LoadTmu0);
    code.store(r(4), 2 * n);
    code << signal(Signal::LoadTmu1);
    code.store(r(4), 2 * n + 1);
  }
  // Scattered, low bits ignored.
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

TEST_CASE("special functions arrive in r4 for the third instruction") {
  Code code;
  for (int n = 0; n < 4; ++n) {
    code.set(toR(0), 0x40800000);
    code << move(to(address::kSfuRecip + n), r(0)) << nop() << nop();
    code.store(r(4), n);
  }
  code.end();
  const Result result = run(code);
  CHECK(result.vector(0)[2] == 0x3e800000);  // 1/4
  CHECK(result.vector(1)[2] == 0x3f000000);  // 1/2
  CHECK(result.vector(2)[2] == 0x41800000);  // 16
  CHECK(result.vector(3)[2] == 0x40000000);  // 2
}

TEST_CASE("DMA moves blocks both ways") {
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
  // The same rows with gaps, and without their ends.
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

TEST_CASE("QPUs pass data by a semaphore") {
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

TEST_CASE("the host interrupt") {
  Code code;
  code.end();
  CHECK(!run(code).report.hostInterrupt);
  Code other;
  other.set(to(address::kHostInterrupt), 1).end();
  CHECK(run(other).report.hostInterrupt);
}
