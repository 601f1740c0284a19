// Instruction words on which two independent assemblers agree, and the fields of these words.
#ifndef QPU_TESTS_ISA_REFERENCE_HPP
#define QPU_TESTS_ISA_REFERENCE_HPP

#include <vector>

#include "tests/isa_build.hpp"

namespace isa_build {

struct Reference {
  const char* name;
  qpu::isa::Word word;
  Instruction instruction;
};

inline Instruction linked(int waddrAdd, Instruction i) {
  i.waddrAdd = byte(waddrAdd);
  return i;
}

inline Instruction absolute(int registerA) {
  Instruction i = branch(0);
  i.branchRelative = false;
  i.branchRegister = true;
  i.branchRegisterA = byte(registerA);
  return i;
}

inline std::vector<Reference> references() {
  using A = AddOp;
  using M = MulOp;
  return {
      {"nop", 0x100009e7009e7000, nop()},
      {"r0 = r1 add r2", 0x100208270c9e7280, add(A::Add, toR(0), r(1), r(2))},
      {"r3 = ra5 sub rb7, set flags", 0x100228e70d147dc0,
       flags(add(A::Sub, toR(3), ra(5), rb(7)))},
      {"ra1 = r4 fadd r5", 0x10020067019e7940, add(A::FAdd, toA(1), r(4), r(5))},
      {"rb2 = ra3 fmul rb4", 0x100049c2200c4037, mul(M::FMul, toB(2), ra(3), rb(4))},
      {"r0 = r1 fadd r2 ; r1 = r2 fmul r3", 0x10024821219e7293,
       both(add(A::FAdd, toR(0), r(1), r(2)), mul(M::FMul, toR(1), r(2), r(3)))},
      {"r0 = elem_num and 15", 0xd00208271498fdc0,
       add(A::And, toR(0), ra(address::kElementNumber), imm(15))},
      {"r2 <- uniform", 0x100208a715827d80, move(toR(2), ra(address::kUniform))},
      {"ra10 <- uniform", 0x100202a715827d80, move(toA(10), ra(address::kUniform))},
      {"rb10 <- uniform", 0x100212a715827d80, move(toB(10), ra(address::kUniform))},
      {"r0 = itof r1", 0x10020827089e7240, add(A::ItoF, toR(0), r(1), r(1))},
      {"r1 = ftoi ra2", 0x10020867070a7d80, add(A::FtoI, toR(1), ra(2), ra(2))},
      {"r2 = not rb3", 0x100208a7179c3fc0, add(A::Not, toR(2), rb(3), rb(3))},
      {"r3 = clz r0", 0x100208e7189e7000, add(A::Clz, toR(3), r(0), r(0))},
      {"r0 = r0 shl 4", 0xd0020827119c41c0, add(A::Shl, toR(0), r(0), imm(4))},
      {"r0 = r1 asr r2", 0x100208270f9e7280, add(A::Asr, toR(0), r(1), r(2))},
      {"ra7 = r1 ror 8", 0xd00201e7109c83c0, add(A::Ror, toA(7), r(1), imm(8))},
      {"r1 = r2 min r3", 0x10020867129e74c0, add(A::Min, toR(1), r(2), r(3))},
      {"r1 = r2 max r3", 0x10020867139e74c0, add(A::Max, toR(1), r(2), r(3))},
      {"r1 = r2 fmin r3", 0x10020867039e74c0, add(A::FMin, toR(1), r(2), r(3))},
      {"r1 = r2 fmax r3", 0x10020867049e74c0, add(A::FMax, toR(1), r(2), r(3))},
      {"r1 = r2 fminabs r3", 0x10020867059e74c0, add(A::FMinAbs, toR(1), r(2), r(3))},
      {"r1 = r2 fmaxabs r3", 0x10020867069e74c0, add(A::FMaxAbs, toR(1), r(2), r(3))},
      {"r1 = r2 v8adds r3", 0x100049e1c09e7013, mul(M::V8AddS, toR(1), r(2), r(3))},
      {"r1 = r2 v8subs r3", 0x100049e1e09e7013, mul(M::V8SubS, toR(1), r(2), r(3))},
      {"r0 = r1 mul24 r2", 0x100049e0409e700a, mul(M::Mul24, toR(0), r(1), r(2))},
      {"r0 = r1 v8muld r2", 0x100049e0609e700a, mul(M::V8MulD, toR(0), r(1), r(2))},
      {"r0 = r1 fmul 0.5", 0xd00049e0209ef00f, mul(M::FMul, toR(0), r(1), imm(47))},
      {"r0 = r1 fadd 2.0", 0xd0020827019e13c0, add(A::FAdd, toR(0), r(1), imm(33))},
      {"r0 = r1 sub -16", 0xd00208270d9d03c0, add(A::Sub, toR(0), r(1), imm(16))},
      {"r1 = r0 rotated by 15", 0xd00049e1809ff000,
       signal(Signal::SmallImmediate, both(readB(63), mul(M::V8Min, toR(1), r(0), r(0))))},
      {"r1 = r0 rotated by 1", 0xd00049e1809f1000,
       signal(Signal::SmallImmediate, both(readB(49), mul(M::V8Min, toR(1), r(0), r(0))))},
      {"r1 = r0 rotated by r5", 0xd00049e1809f0000,
       signal(Signal::SmallImmediate, both(readB(48), mul(M::V8Min, toR(1), r(0), r(0))))},
      {"r5 per quad <- r0", 0x10020967159e7000, move(toA(address::kR5), r(0))},
      {"r5 all <- r0", 0x10021967159e7000, move(toB(address::kR5), r(0))},
      {"branch always to itself", 0xf0f809e7ffffffe0, branch(-32)},
      {"branch all-Z-set, 32 bytes before itself", 0xf00809e7ffffffc0,
       branch(-64, BranchCond::AllZSet)},
      {"branch any-C-clear, 64 bytes before, link ra9", 0xf0b80267ffffffa0,
       linked(9, branch(-96, BranchCond::AnyCClear))},
      {"mov r0 <- r1 if Z set", 0x10040827159e7240, move(toR(0), r(1), Cond::ZSet)},
      {"mov r0 <- r1 if Z clear", 0x10060827159e7240, move(toR(0), r(1), Cond::ZClear)},
      {"r0 = r1 add r2 if N set", 0x100808270c9e7280,
       add(A::Add, toR(0), r(1), r(2), Cond::NSet)},
      {"r0 = r1 add r2 if N clear", 0x100a08270c9e7280,
       add(A::Add, toR(0), r(1), r(2), Cond::NClear)},
      {"r0 = r1 add r2 if C set", 0x100c08270c9e7280,
       add(A::Add, toR(0), r(1), r(2), Cond::CSet)},
      {"r0 <- 0x12345678", 0xe002082712345678, load(toR(0), 0x12345678)},
      {"ra3 <- 1.0", 0xe00200e73f800000, load(toA(3), 0x3f800000)},
      {"rb3 <- -1", 0xe00210e7ffffffff, load(toB(3), 0xffffffff)},
      {"r0 <- per element unsigned", 0xe6020827ccccaaaa,
       load(toR(0), 0xccccaaaa, Form::LoadPerElementUnsigned)},
      {"r0 <- per element signed", 0xe2020827ccccaaaa,
       load(toR(0), 0xccccaaaa, Form::LoadPerElementSigned)},
      {"semaphore 3 acquire", 0xe80009e700000013, semaphore(3, true)},
      {"semaphore 3 release", 0xe80009e700000003, semaphore(3, false)},
      {"TMU0_S <- r0", 0x10020e27159e7000, move(to(address::kTmu0S), r(0))},
      {"load tmu0", 0xa00009e7009e7000, signal(Signal::LoadTmu0)},
      {"load tmu1", 0xb00009e7009e7000, signal(Signal::LoadTmu1)},
      {"ra1 half a <- r0", 0x10120067159e7000, packed(1, move(toA(1), r(0)))},
      {"ra1 byte b <- r0 clamped", 0x10d20067159e7000, packed(13, move(toA(1), r(0)))},
      {"r0 = ra1 upper half fadd r1", 0x1402082701067c40,
       unpacked(2, add(A::FAdd, toR(0), ra(1), r(1)))},
      {"r0 = ra1 byte c add r1", 0x1c0208270c067c40,
       unpacked(6, add(A::Add, toR(0), ra(1), r(1)))},
      {"SFU recip <- r0", 0x10020d27159e7000, move(to(address::kSfuRecip), r(0))},
      {"SFU recipsqrt <- r0", 0x10020d67159e7000, move(to(address::kSfuRecipSqrt), r(0))},
      {"SFU exp2 <- r0", 0x10020da7159e7000, move(to(address::kSfuExp), r(0))},
      {"SFU log2 <- r0", 0x10020de7159e7000, move(to(address::kSfuLog), r(0))},
      {"VPM read setup <- r0", 0x10020c67159e7000, move(toA(address::kVpmSetup), r(0))},
      {"VPM write setup <- r0", 0x10021c67159e7000, move(toB(address::kVpmSetup), r(0))},
      {"VPM_WRITE <- r0", 0x10020c27159e7000, move(to(address::kVpm), r(0))},
      {"r0 <- VPM_READ", 0x1002082715c27d80, move(toR(0), ra(address::kVpm))},
      {"DMA load address <- r0", 0x10020ca7159e7000, move(toA(address::kDmaAddress), r(0))},
      {"DMA store address <- r0", 0x10021ca7159e7000, move(toB(address::kDmaAddress), r(0))},
      {"wait DMA load", 0x100009e700ca7000, readA(address::kDmaWait)},
      {"wait DMA store", 0x100009e7009f2000, readB(address::kDmaWait)},
      {"mutex acquire", 0x100009e700ce7000, readA(address::kMutex)},
      {"mutex release <- r0", 0x10020ce7159e7000, move(to(address::kMutex), r(0))},
      {"UNIFORMS_ADDRESS <- r0", 0x10020a27159e7000, move(to(address::kUniformsAddress), r(0))},
      {"HOST_INT <- 1", 0xe00209a700000001, load(to(address::kHostInterrupt), 1)},
      {"TMU_NOSWAP <- 1", 0xe002092700000001, load(to(address::kTmuNoSwap), 1)},
      {"program end", 0x300009e7009e7000, signal(Signal::End)},
      {"branch always to ra4", 0xf0f489e700000000, absolute(4)},
  };
}

}  // namespace isa_build

#endif
