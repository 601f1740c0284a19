// The numbers of the rules that the verifier checks. The names and texts of the rules are in
// rules.cpp.
#ifndef QPU_SRC_ISA_RULES_HPP
#define QPU_SRC_ISA_RULES_HPP

#include <cstddef>
#include <cstdint>

namespace qpu::isa {

enum class RuleId : std::uint8_t {
  // Rules that concern a single instruction.
  UnknownInstruction, Breakpoint, ThreadSwitch, NopWrites, ReservedPack, PackOnIo, UnpackOnIo,
  MixedUnpack, SameDestination, IoReadTwice, OnePeripheral, SemaphoreWrites, ConditionalTrigger,
  VpmPair, EndWritesRegister, ScoreboardStart, BranchTarget,
  // Rules that concern instructions that are close to each other on a path.
  RunsOut, BranchInDelaySlot, BranchNearEnd, RegisterFileLatency, SfuLatency, SfuResultWrite,
  RotateByR5Latency, RotateSourceLatency, NoSwapLatency, UniformsAddressLatency,
  VpmReadLatency, TlbZLatency, EndUniform, EndVpm, EndAddress14, EndTlbZ,
  // Rules that depend on the complete path to an instruction.
  Uninitialised, TmuDepth, TmuEmpty, TmuLeft, TmuSwap, SetupWord, VpmReadEmpty,
  VpmReadOutstanding, VpmReadLeft, VpmWriteSetup, DmaLoadSetup, DmaStoreSetup, DmaLoadOverlap,
  DmaStoreOverlap, DmaLoadRead, DmaLeft, MutexLeft,
  Count
};

constexpr std::size_t kRules = static_cast<std::size_t>(RuleId::Count);

}  // namespace qpu::isa

#endif
