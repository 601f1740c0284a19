// Checks that the emulator detects errors in programs, and checks its error messages.
#include "tests/emulator_run.hpp"

using namespace emulator_run;

namespace {

Instruction rotated(In in, int n) {
  Instruction i = mul(MulOp::V8Min, toR(1), in, in);
  i.signal = Signal::SmallImmediate;
  i.raddrB = byte(48 + n);
  return i;
}

// Returns the error message for a few instructions between a valid start and a valid end.
template <typename E = qpu::ExecutionError>
std::string errorOf(const std::vector<Instruction>& instructions, Setting setting = {}) {
  Code code;
  code.set(toR(0), 0).nops(3);
  for (const Instruction& i : instructions) code << i;
  code.nops(3).end();
  return failure<E>(code, std::move(setting));
}

void says(const std::string& text, const std::string& part) {
  INFO(text);
  CHECK(contains(text, part));
}

void passes(const std::vector<Instruction>& instructions, Setting setting = {}) {
  Code code;
  code.set(toR(0), 0).nops(3);
  for (const Instruction& i : instructions) code << i;
  code.nops(3).end();
  CHECK(run(code, std::move(setting)).report.instructions > 0);
}

Instruction sfu() { return move(to(address::kSfuRecip), r(0)); }
Instruction tmu() { return move(to(address::kTmu0S), r(0)); }
Instruction write(int io) { return move(to(io), r(0)); }

}  // namespace

TEST_CASE("errors name kernel, QPU, instruction and construct") {
  qpu::code::Object object;
  object.name = "broken";
  object.sites = {{"store", "store at broken.cpp:7"}};
  object.siteOf = {qpu::code::Object::kNoSite, 0};
  Setting setting;
  setting.object = &object;
  Code code;
  code.set(toA(1), 3);
  code << move(toR(0), ra(1));
  code.end();
  try {
    (void)run(code, setting);
    FAIL("no exception");
  } catch (const qpu::ExecutionError& e) {
    CHECK(std::string(e.what()) ==
          "kernel 'broken', QPU 0, instruction 1 (mov r0, ra1) of store at broken.cpp:7: a "
          "register of file A or B is read in the instruction after the one that writes it; "
          "preceding instruction: instruction 0 (ldi ra1, 0x3)");
    CHECK(std::string(e.construct()) == "store");
    CHECK(std::string(e.kernel()) == "broken");
    CHECK(e.qpu() == 0);
  }
}

TEST_CASE("file registers are readable after two instructions") {
  const char* rule = "a register of file A or B is read in the instruction after";
  says(errorOf({move(toB(3), r(0)), move(toR(1), rb(3))}), rule);
  says(errorOf({move(toA(3), r(0), Cond::ZSet), move(toR(1), ra(3))}), rule);
  passes({move(toA(3), r(0)), nop(), move(toR(1), ra(3))});
  passes({move(toA(3), r(0)), move(toR(1), rb(3))});
  passes({move(toR(2), r(0)), move(toR(1), r(2))});
  // The rule also applies across a jump, but only on the path that the jump takes.
  Code code;
  code << move(toA(3), r(0)) << branch(0) << nop() << nop() << move(toA(4), r(0));
  code << move(toR(1), ra(4));
  code.end();
  says(failure(code), "reached by the jump from instruction 1 (brr");
  Code other;
  other << branch(8) << nop() << nop() << nop() << move(toA(4), r(0)) << move(toR(1), ra(4));
  other.end();
  CHECK(run(other).report.instructions == 8);
}

TEST_CASE("r4 is reserved for the SFU for two instructions") {
  says(errorOf({sfu(), move(toR(1), r(4))}), "r4 is read within two instructions after an SFU write");
  says(errorOf({sfu(), nop(), move(toR(1), r(4))}), "r4 is read within two instructions after an SFU write");
  says(errorOf({sfu(), nop(), sfu()}), "r4 is loaded within two instructions after an SFU write");
  says(errorOf({tmu(), sfu(), signal(Signal::LoadTmu0)}), "r4 is loaded within two instructions after an SFU write");
  passes({sfu(), nop(), nop(), sfu(), nop(), nop(), move(toR(1), r(4))});
}

TEST_CASE("rotations must not directly follow their inputs") {
  says(errorOf({move(toR(0), r(1)), rotated(r(0), 1)}), "an accumulator is rotated");
  says(errorOf({move(to(address::kR5), r(0)), rotated(r(0), 0)}), "a rotation by r5");
  passes({move(toR(0), r(1)), nop(), rotated(r(0), 1)});
  passes({move(to(address::kR5), r(1)), rotated(r(0), 1)});
}

TEST_CASE("rotating an unchanged accumulator is not a fault") {
  const Instruction two = load(toR(2), 2);
  passes({move(toR(0), r(0)), rotated(r(0), 1)});
  passes({two, flags(move(to(address::kNop), r(2))), move(toR(0), r(2), Cond::ZSet),
          rotated(r(0), 1)});
  says(errorOf({two, flags(move(to(address::kNop), r(2))), move(toR(0), r(2), Cond::ZClear),
                rotated(r(0), 1)}),
       "an accumulator is rotated in the instruction after the one that changes it; preceding "
       "instruction: instruction 6");
  // A rotation by r5 uses only the low four bits of r5.
  const Instruction to5 = load(toB(address::kR5), 0x12);
  passes({to5, nop(), load(toB(address::kR5), 0x22), rotated(r(0), 0)});
  says(errorOf({to5, nop(), load(toB(address::kR5), 0x13), rotated(r(0), 0)}),
       "a rotation by r5 is in the instruction after the one that changes r5");
  // The rule also applies across a jump.
  const auto jump = [](std::uint32_t value) {
    Code code;
    code.set(toR(0), 5) << branch(8) << nop() << nop() << load(toR(0), value);
    code << nop() << rotated(r(0), 1);
    return code.end();
  };
  CHECK(run(jump(5)).report.instructions == 9);
  says(failure(jump(6)), "reached by the jump from instruction 1");
}

TEST_CASE("TMU_NOSWAP and UNIFORMS_ADDRESS have latencies") {
  says(errorOf({write(address::kTmuNoSwap), nop(), tmu()}), "after TMU_NOSWAP");
  const Instruction uniform = move(toR(1), ra(kUniform));
  Instruction set = write(address::kUniformsAddress);
  says(errorOf({set, nop(), uniform}), "after UNIFORMS_ADDRESS");
  says(errorOf<qpu::BoundsError>({set, nop(), nop(), uniform}),
       "a uniform is read from bus address 0x00000000, outside of every SharedArray; the nearest is "
       "the SharedArray of 1024 elements at 0x40000000..0x40000fff; the address is 1073741824 bytes before its "
       "start");
  says(errorOf({uniform}), "a uniform is read beyond the 0 uniforms of this QPU");
  says(errorOf<qpu::BoundsError>({load(to(address::kUniformsAddress), 6)}), "not a multiple of 4");
}

TEST_CASE("the last instructions of a program are restricted") {
  const auto ends = [](Instruction last, Instruction first, Instruction second) {
    Code code;
    code.set(toR(0), 0) << nop() << nop();
    code << signal(Signal::End, last) << first << second;
    return failure(code);
  };
  says(ends(move(toA(2), r(0)), nop(), nop()), "with the program end writes a register");
  says(ends(nop(), readA(kUniform), nop()), "a uniform is read in the last three");
  says(ends(nop(), nop(), write(address::kVpm)), "accessed in the last three");
  says(ends(nop(), readB(address::kDmaWait), nop()), "accessed in the last three");
  says(ends(nop(), nop(), move(toB(14), r(0))), "ra14 or rb14");
  says(ends(nop(), branch(0), nop()), "a branch or a program end is in the two");
  Code code;
  code << nop();
  says(failure(code), "continues past the last instruction");
  Code other;
  other << branch(0) << signal(Signal::End) << nop() << nop() << nop();
  says(failure(other), "a program end is in the delay slots of a branch");
}

TEST_CASE("invalid branches are errors") {
  says(errorOf({branch(0), nop(), branch(0)}), "a branch is in the delay slots of a branch");
  says(errorOf({branch(0), nop(), nop(), branch(0)}), "in the delay slots");
  says(errorOf({branch(-4096)}), "is not an instruction of the program");
  says(errorOf({branch(4)}), "is not an instruction of the program");
  Instruction far = branch(0);
  far.branchRelative = false;
  far.branchRegister = true;
  far.branchRegisterA = 3;
  says(errorOf({move(toA(3), ra(address::kElementNumber)), nop(), far}),
       "the elements of the branch target register differ");
  Code code;
  code.branchTo(0).end();
  Setting setting;
  setting.limit = 1000;
  says(failure(code, setting), "the program does not end: this QPU has executed 100");
}

TEST_CASE("invalid combinations in one instruction are errors") {
  says(errorOf({signal(Signal::LoadTmu0, tmu())}), "more than one of these: TMU write, TMU load");
  says(errorOf({both(sfu(), mul(MulOp::V8Min, to(address::kSfuExp), r(0), r(0)))}),
       "more than one of");
  says(errorOf({signal(Signal::LoadTmu0, readA(address::kMutex))}), "more than one of");
  says(errorOf({signal(Signal::LoadTmu0, write(address::kVpm))}), "a TMU load and an access");
  says(errorOf({both(write(address::kVpm), readA(address::kDmaWait))}),
       "only VPM_READ and VPM_WRITE can be combined");
  says(errorOf({move(to(address::kTmu0S), r(0), Cond::ZSet)}), "written under a condition");
  says(errorOf({move(to(address::kVpm), r(0), Cond::NClear)}), "written under a condition");
  passes({move(to(address::kHostInterrupt), r(0), Cond::ZSet)});
  says(errorOf({both(move(toR(1), ra(address::kElementNumber)),
                     mul(MulOp::V8Min, toR(1), r(0), r(0)))}),
       "both ALUs write the same accumulator or peripheral, and element 1 differs: 0x00000001 and "
       "0x00000000");
  const Out r5 = to(address::kR5);
  says(errorOf({both(move(r5, r(0)), mul(MulOp::V8Min, r5, r(0), r(0)))}),
       "both ALUs write the same");
  says(errorOf({packed(4, write(address::kVpm))}), "a value that is written to");
  says(errorOf({packed(4, move(toR(1), r(0)))}), "a value that is written to");
  says(errorOf({unpacked(4, move(toR(1), ra(kUniform)))}), "the value of a peripheral is unpacked");
  says(errorOf({add(AddOp::Add, toR(1), ra(kUniform), rb(kUniform))}), "both ports read the same");
  says(errorOf({signal(Signal::LoadColour)}), "the signal is not available to user programs");
  says(errorOf({move(toR(1), ra(35))}), "the read address is not available to user programs");
  says(errorOf({write(44)}), "the write address is not available to user programs");
  says(errorOf({write(address::kTmu0S + 1)}), "a texture request");
}

TEST_CASE("uses that work on hardware are accepted") {
  // Both ALUs may write equal values to the same accumulator or peripheral.
  passes({both(move(toR(1), r(0)), mul(MulOp::V8Min, toR(1), r(0), r(0)))});
  Instruction interrupt = load(to(address::kHostInterrupt), 1);
  interrupt.waddrMul = address::kHostInterrupt;
  interrupt.condMul = Cond::Always;
  Code code;
  code << interrupt;
  CHECK(run(code.end()).report.hostInterrupt);
  const Instruction release =
      both(write(address::kMutex), mul(MulOp::V8Min, to(address::kMutex), r(0), r(0)));
  passes({readA(address::kMutex), release});
  // It is not known whether different values are allowed in elements that only one ALU writes.
  const In number = ra(address::kElementNumber);
  says(errorOf({flags(move(to(address::kNop), number)),
                both(move(toR(1), r(0), Cond::ZSet),
                     mul(MulOp::V8Min, toR(1), number, number, Cond::ZClear))}),
       "both ALUs write the same");
  // These instructions read from the address NOP.
  passes({move(to(address::kNop), ra(address::kNop)), move(toR(1), rb(address::kNop))});
  // These rows are contiguous in memory. No stride is set, so the stride is 0.
  Code rows;
  rows.set(toB(address::kVpmSetup), rows32(0));
  for (std::uint32_t n = 0; n < 3; ++n) rows.set(to(address::kVpm), 100 + n);
  rows.dmaStore(storeSetup(3, 16, 0), kOut).end();
  const Result result = run(rows);
  for (int n = 0; n < 3; ++n) CHECK(result.vector(n)[15] == static_cast<std::uint32_t>(100 + n));
}

TEST_CASE("lenient mode reports uncertain uses as warnings") {
  Setting lenient;
  lenient.lenient = true;
  for (std::uint32_t n = 0; n < 1024; ++n) lenient.in[n] = n;
  // The program has two stores and two loads. At the end, there is a single wait for the stores and
  // a single wait for the loads.
  Code code;
  const auto twice = [&](Out setup, Out address, std::uint32_t word, std::uint32_t to,
                         std::uint32_t next) {
    code.set(setup, word).set(address, to).set(address, to + next);
  };
  twice(toA(address::kVpmSetup), toA(address::kDmaAddress), loadSetup(1, 16, 0), kIn, 64);
  code << readA(address::kDmaWait);
  twice(toB(address::kVpmSetup), toB(address::kDmaAddress), storeSetup(1, 16, 0), kOut, 64);
  code << readB(address::kDmaWait);
  code.end();
  says(failure(code), "a DMA load is started without a wait for the previous one, which was started by "
                      "instruction 1 (ldi vpm_ld_addr, 0x40000000). With QPU_EMULATOR=lenient "
                      "this is a warning");
  const Result result = run(code, lenient);
  CHECK(result.vector(0)[3] == 19);
  CHECK(result.vector(1)[3] == 19);
  REQUIRE(result.report.warnings.size() == 2);
  says(result.report.warnings[0],
       "kernel '', QPU 0, instruction 2 (ldi vpm_ld_addr, 0x40000040): a DMA load is started "
       "without a wait for the previous one, which was started by instruction 1 (ldi vpm_ld_addr, "
       "0x40000000); assumed: the QPU waits until the previous one is done");
  says(result.report.warnings[1], "a DMA store is started without a wait");

  // The second transfer waits for the first transfer, so it takes longer than after an explicit
  // wait.
  Code waits = code;
  waits.instructions.insert(waits.instructions.begin() + 2, readA(address::kDmaWait));
  const Result waited = run(waits, lenient);
  CHECK(waited.report.warnings.size() == 1);
  CHECK(result.report.clocks + 4 >= waited.report.clocks);

  // The pitch and the stride have more than 13 bits. The emulator reports each instruction only
  // once.
  Setting far = lenient;
  far.in.resize(16384);
  far.outWords = 16384;
  for (std::uint32_t n = 0; n < 16384; ++n) far.in[n] = n;
  far.uniforms = {{}, {}};
  Code pitches;
  pitches.set(toA(address::kVpmSetup), loadPitch(16384));
  pitches << flags(move(to(address::kNop), rb(address::kQpuNumber)));
  pitches.branchTo(pitches.size() + 11, BranchCond::AllZClear);
  pitches.dmaLoad(loadSetup(2, 16, 0), kIn);
  pitches.set(toB(address::kVpmSetup), storeStride(16384));
  pitches.dmaStore(storeSetup(2, 16, 0), kOut).end();
  const Result moved = run(pitches, far);
  CHECK(moved.out[(64 + 16384) / 4 + 5] == 4096 + 5);
  REQUIRE(moved.report.warnings.size() == 2);
  says(moved.report.warnings[0],
       "a DMA load pitch is 16384 bytes, but must be 0..8191; assumed: all 16");
  says(moved.report.warnings[1], "a DMA store stride is 16384 bytes");
  says(failure(pitches, [&] { far.lenient = false; return far; }()), "a DMA load pitch is 16384");
  Code beyond;
  beyond.set(toA(address::kVpmSetup), loadPitch(65536)).end();
  says(failure(beyond, lenient), "a DMA load pitch is 65536 bytes, but must be 0..8191");
}

TEST_CASE("an endless loop ends at the clock limit") {
  Code code;
  code.branchTo(0).end();
  Setting setting;
  setting.limit = 0;
  setting.clockLimit = 400000;
  const std::string text = failure(code, setting);
  says(text, "kernel '', QPU 0, instruction 3 (nop): the kernel has not finished within 1 ms (400000 "
             "clocks of the modelled ");
  says(text, ". It loops forever, or QPU_TIMEOUT_MS is too low");
  setting.clockLimit = 250000;
  setting.board = &qpu::emu::kPi1;
  says(failure(code, setting), "has not finished within 1 ms (250000 clocks of the modelled ");
}

TEST_CASE("invalid words are errors") {
  Launch launch;
  const qpu::isa::Word word = 0x1000000009000000U;
  launch.words = &word;
  launch.count = 1;
  launch.uniforms = {{}};
  CHECK_THROWS_WITH_AS((void)qpu::emu::run(launch),
                       "kernel '', QPU 0, instruction 0 (.word 0x1000000009000000): the word is "
                       "not a valid instruction",
                       qpu::ExecutionError);
}

TEST_CASE("a launch requires 1 to 12 QPUs") {
  Code code;
  code.end();
  Setting setting;
  setting.uniforms.clear();
  says(failure<qpu::ArgumentError>(code, setting), "a launch on 0 QPUs: their number must be 1..12");
  setting.uniforms.resize(13);
  says(failure<qpu::ArgumentError>(code, setting), "a launch on 13 QPUs");
  setting.uniforms.resize(12);
  CHECK(run(code, setting).report.instructions == 36);
}

TEST_CASE("invalid uses of the TMU queue are errors") {
  const Instruction in = load(toR(0), kIn);
  says(errorOf({in, tmu(), tmu(), tmu(), tmu(), tmu()}), "a fifth request to TMU0 is outstanding");
  says(errorOf({in, tmu()}), "ends with 1 results in a TMU that were not loaded");
  says(errorOf({signal(Signal::LoadTmu1)}), "loaded from a TMU without an outstanding request");
  says(errorOf({in, tmu(), write(address::kTmuNoSwap)}), "while TMU requests are outstanding");
}

TEST_CASE("an invalid gather is an error when its vector is used") {
  const Instruction out = load(toR(0), kIn + 4096);
  const Instruction get = signal(Signal::LoadTmu0);
  passes({out, tmu(), get});
  passes({out, tmu(), get, move(toA(1), r(4)), nop(), move(toB(2), ra(1))});
  // One pipe moves the vector. The other pipe sets flags, or packs or rotates another value.
  const auto moved = mul(MulOp::V8Min, toB(2), r(4), r(4));
  passes({out, tmu(), get, both(flags(add(AddOp::Sub, toR(1), r(0), r(0))), moved)});
  passes({out, tmu(), get, both(packed(1, move(toA(3), r(0))), moved)});
  passes({out, tmu(), get, nop(), both(move(toR(2), r(4)), rotated(r(0), 1))});
  // The flags, the pack mode or the rotation of the same pipe use the vector.
  for (const Instruction& use :
       {both(flags(move(toR(1), r(4))), mul(MulOp::V8Min, toB(2), r(0), r(0))), flags(moved),
        packed(1, move(toA(3), r(4))), rotated(r(4), 1)})
    says(errorOf<qpu::BoundsError>({out, tmu(), get, nop(), use}), "is used by");
  // The vector is overwritten before it is used.
  passes({out, tmu(), get, load(toR(0), kIn), tmu(), get, add(AddOp::Add, toR(1), r(4), r(4))});
  const std::string text = errorOf<qpu::BoundsError>(
      {out, tmu(), get, move(toA(1), r(4)), nop(), nop(), add(AddOp::Add, toR(1), r(0), ra(1))});
  says(text, "instruction 5 (mov tmu0_s, r0): element 0 of a vector that was received and is used "
             "by instruction 10 (add r1, r0, ra1) came from bus address 0x40001000, outside of "
             "every SharedArray; the nearest is the SharedArray of 1024 elements at "
             "0x40000000..0x40000fff; the address is 0 bytes past its end");
  says(errorOf<qpu::BoundsError>({out, tmu(), get, load(toB(address::kVpmSetup), rows32(0)),
                                  move(to(address::kVpm), r(4))}),
       "is used by");
}

TEST_CASE("invalid uses of VPM windows are errors") {
  const auto setup = [](std::uint32_t word) { return load(toA(address::kVpmSetup), word); };
  const Instruction get = readA(address::kVpm);
  says(errorOf({get}), "the VPM is read without a read setup");
  says(errorOf({setup(rows32(0, 1)), get, get}), "more VPM vectors are read than the read setup specifies");
  says(errorOf({setup(rows32(0, 2)), get, setup(rows32(0, 1))}), "while 1 vector of the previous one");
  says(errorOf({setup(rows32(0, 3)), get}), "ends before reading 2 vectors");
  says(errorOf({write(address::kVpm)}), "the VPM is written without a write setup");
  says(errorOf({setup(0x300)}), "the VPM setup 0x00000300 is invalid");
  says(errorOf({setup(0xa40)}), "the VPM setup 0x00000a40: the row is not in 0..63");
  says(errorOf({setup(1U << 30U)}), "the VPM read setup 0x40000000 is invalid");
  says(errorOf({load(toB(address::kVpmSetup), 1U << 30U)}), "the VPM write setup 0x40000000");
}

TEST_CASE("DMA beyond its limits is an error") {
  const auto store = [](std::uint32_t setup, std::uint32_t to) {
    return std::vector<Instruction>{load(toB(address::kVpmSetup), setup),
                                    load(toB(address::kDmaAddress), to),
                                    readB(address::kDmaWait)};
  };
  const auto fetch = [](std::uint32_t setup, std::uint32_t from) {
    return std::vector<Instruction>{load(toA(address::kVpmSetup), setup),
                                    load(toA(address::kDmaAddress), from),
                                    readA(address::kDmaWait)};
  };
  passes(store(storeSetup(1, 16, 0), kOut));
  says(errorOf({load(toB(address::kDmaAddress), kOut)}), "a DMA store is started without a setup");
  says(errorOf<qpu::BoundsError>(store(storeSetup(1, 16, 0), kOut + 2)),
       "writing 0x40100002 by DMA: the address is not a multiple of 4");
  says(errorOf<qpu::BoundsError>(store(storeSetup(1, 16, 0), kOut + 4 * 4096 - 60)),
       "writing 16 words from 0x40103fc4 by DMA reaches bus address 0x40104000, outside of "
       "every SharedArray; the nearest is");
  says(errorOf<qpu::BoundsError>(fetch(loadSetup(1, 16, 0), kIn - 64)), "reading 16 words from");
  says(errorOf(fetch(loadSetup(2, 16, 0), kIn)), "a DMA load of 2 rows is started without a pitch");
  says(errorOf(store(storeSetup(1, 16, 0, 1), kOut)), "exceeds the VPM's 64 rows by 16 columns");
  says(errorOf(fetch(loadSetup(1, 16, 60, 0, false), kIn)), "exceeds the VPM's 64 rows");
  says(errorOf({load(toB(address::kVpmSetup), storeStride(8192))}),
       "a DMA store stride is 8192 bytes, but must be 0..8191");
  says(errorOf({load(toA(address::kVpmSetup), loadPitch(8192))}),
       "a DMA load pitch is 8192 bytes, but must be 0..8191");
  says(errorOf({load(toB(address::kVpmSetup), storeSetup(1, 16, 0, 0, true, 1))}), "reserved bits");
}

TEST_CASE("DMA without a wait is an error") {
  const std::vector<Instruction> store = {load(toB(address::kVpmSetup), storeSetup(1, 16, 0)),
                                          load(toB(address::kDmaAddress), kOut)};
  const std::vector<Instruction> fetch = {load(toA(address::kVpmSetup), loadSetup(1, 16, 1)),
                                          load(toA(address::kDmaAddress), kIn)};
  const auto then = [](std::vector<Instruction> first, const std::vector<Instruction>& more) {
    first.insert(first.end(), more.begin(), more.end());
    return first;
  };
  says(errorOf(store), "ends without waiting for a DMA store, which was started by "
                       "instruction 5");
  says(errorOf(fetch), "ends without waiting for a DMA load");
  says(errorOf(then(store, store)), "a DMA store is started without a wait");
  says(errorOf(then(fetch, fetch)), "a DMA load is started without a wait");
  says(errorOf(then(store, {load(toB(address::kVpmSetup), rows32(0)), write(address::kVpm)})),
       "a VPM word of a DMA store is written without a wait for that store");
  passes(then(store, {load(toB(address::kVpmSetup), rows32(1)), write(address::kVpm),
                      readB(address::kDmaWait)}));
  says(errorOf(then(fetch, {load(toA(address::kVpmSetup), rows32(1, 1))})),
       "a VPM word of a DMA load is read");
  says(errorOf(then(fetch, {load(toB(address::kVpmSetup), storeSetup(1, 16, 1)),
                            load(toB(address::kDmaAddress), kOut)})),
       "a DMA store uses VPM words of a DMA load");
  // The words that a DMA store writes are read before the wait.
  says(errorOf(then(store, {load(toR(0), kOut), tmu(), signal(Signal::LoadTmu0),
                            move(toR(1), r(4)), add(AddOp::Add, toR(1), r(4), r(0))})),
       "which might not have been written yet by QPU 0, instruction 5");
}

TEST_CASE("deadlocks and unbalanced semaphores are errors") {
  Setting two;
  two.uniforms = {{}, {}};
  Code code;
  code << nop() << semaphore(3, true);
  code.end();
  CHECK(failure<qpu::DeadlockError>(code, two) ==
        "kernel '': deadlock; every QPU that has not finished is waiting: QPU 0 in instruction 1 "
        "(sacq 3) for semaphore 3, which is 0; QPU 1 in instruction 1 (sacq 3) for semaphore 3, which is "
        "0");
  says(errorOf({semaphore(2, false)}), "semaphore 2 is 1 at the end, but must be 0");
  says(errorOf<qpu::DeadlockError>(std::vector<Instruction>(16, semaphore(2, false))),
       "for semaphore 2, which is 15");
  Code mutex;
  mutex << readA(address::kMutex);
  mutex.end();
  says(failure(mutex), "the program ends while it holds the mutex");
  says(errorOf({write(address::kMutex)}), "released, but this QPU does not hold it");
}

TEST_CASE("unordered writes of one word by two QPUs are errors") {
  const auto program = [](bool ordered, bool memory) {
    // QPU 0 writes first. If `ordered` is true, the other QPU waits for this write.
    Code code;
    code << move(toR(0), ra(kUniform));
    code << flags(move(to(address::kNop), r(0)));
    code.branchTo(code.size() + 5, BranchCond::AllZSet);
    code << (ordered ? semaphore(1, true) : nop());
    code.set(toB(address::kVpmSetup), rows32(0));
    if (!memory) code.set(to(address::kVpm), 1);
    if (memory) {
      code << add(AddOp::Shl, toR(1), r(0), imm(7));  // uses separate rows
      code.set(toR(2), storeSetup(1, 16, 0));
      code << add(AddOp::Add, toB(address::kVpmSetup), r(1), r(2));
      code.set(toB(address::kDmaAddress), kOut) << readB(address::kDmaWait);
    }
    code << flags(move(to(address::kNop), r(0)));
    code.branchTo(code.size() + 5, BranchCond::AllZClear);
    code << (ordered ? semaphore(1, false) : nop());
    return code.end();
  };
  Setting two;
  two.uniforms = {{0}, {1}};
  CHECK(run(program(true, true), two).report.instructions > 0);
  CHECK(run(program(true, false), two).report.instructions > 0);
  says(failure(program(false, true), two),
       "bus address 0x40100000 is written without being ordered after the write by QPU ");
  says(failure(program(false, true), two), "without being ordered after the write by");
  says(failure(program(false, false), two), "row 0, column 0 of the VPM is written without being "
                                            "ordered after the write by QPU 0");
}

TEST_CASE("unordered reads of another QPU's VPM words are errors") {
  const auto program = [](bool ordered, bool stores) {
    // QPU 0 writes the row. If `ordered` is true, QPU 1 waits for this write.
    Code code;
    code << move(toR(0), ra(kUniform));
    code << flags(move(to(address::kNop), r(0)));
    code.branchTo(code.size() + 11, BranchCond::AnyZClear);
    code.set(toB(address::kVpmSetup), rows32(0)).set(to(address::kVpm), 1);
    code << (ordered ? semaphore(1, false) : nop());
    code.branchTo(code.size() + (stores ? 8 : 10));
    code << (ordered ? semaphore(1, true) : nop());
    if (stores)
      code.dmaStore(storeSetup(1, 16, 0), kOut);
    else
      code.set(toA(address::kVpmSetup), rows32(0, 1)).nops(3) << move(toR(1), ra(address::kVpm));
    return code.nops(2).end();
  };
  Setting two;
  two.uniforms = {{0}, {1}};
  for (const bool stores : {false, true}) {
    CHECK(run(program(true, stores), two).report.instructions > 0);
    says(failure(program(false, stores), two), std::string("row 0, column 0 of the VPM is ") +
                                                   (stores ? "stored" : "read") +
                                                   " without being ordered after the write by QPU 0");
  }
}

TEST_CASE("the mutex orders memory accesses") {
  Code code;
  code << move(toR(0), ra(address::kMutex));
  code.set(toB(address::kVpmSetup), rows32(0)).set(to(address::kVpm), 1);
  code.dmaStore(storeSetup(1, 16, 0), kOut);
  code << write(address::kMutex);
  code.end();
  Setting setting;
  setting.uniforms.resize(12);
  CHECK(run(code, setting).vector()[0] == 1);
}

TEST_CASE("reading stale cache contents after a store is an error") {
  const Instruction out = load(toR(0), kOut);
  const Instruction get = signal(Signal::LoadTmu0);
  std::vector<Instruction> p = {out, tmu(), get, load(toB(address::kVpmSetup), storeSetup(1, 16, 0)),
                                load(toB(address::kDmaAddress), kOut + 64),
                                readB(address::kDmaWait), load(toR(0), kOut + 64), tmu(), get,
                                add(AddOp::Add, toR(1), r(4), r(4))};
  passes(p);  // in a different cache line
  p[4].immediate = kOut;
  p[6].immediate = kOut + 32;
  says(errorOf(p), "came from bus address 0x40100020, written by QPU 0, instruction 8 (ldi vpm");
  says(errorOf(p), "after a cache had fetched its cache line, so hardware can still return the "
                   "old data; read the data by DMA, or in another launch");
  p.pop_back();
  passes(p);  // because the loaded word is not used
}
