// The rules by number; their names and texts are in rules.cpp.
#ifndef QPU_SRC_ISA_RULES_HPP
#define QPU_SRC_ISA_RULES_HPP

#include <cstddef>
#include <cstdint>

namespace qpu::isa {

enum class RuleId : std::uint8_t {
  // One instruction.
  UnknownInstruction, Breakpoint, ThreadSwitch, NopWrites, ReservedPack, PackOnIo, UnpackOnIo,
  MixedUnpack, SameDestination, IoReadTwice, OnePeripheral, SemaphoreWrites, ConditionalTrigger,
  VpmPair, EndWritesRegister, ScoreboardStart, BranchTarget,
  // Instructions near each other on a path.
  RunsOut, BranchInDelaySlot, BranchNearEnd, RegisterFileLatency, SfuLatency, SfuResultWrite,
  RotateByR5Latency, RotateSourceLatency, NoSwapLatency, UniformsAddressLatency,
  VpmReadLatency, TlbZLatency, EndUniform, EndVpm, EndAddress14, EndTlbZ,
  // What a path has done before.
  Uninitialised, TmuDepth, TmuEmpty, TmuLeft, TmuSwap, SetupWord, VpmReadEmpty,
  VpmReadOutstanding, VpmReadLeft, VpmWriteSetup, DmaLoadSetup, DmaStoreSetup, DmaLoadOverlap,
  DmaStoreOverlap, DmaLoadRead, DmaLeft, MutexLeft,
  Count
};

constexpr std::size_t kRules = static_cast<std::size_t>(RuleId::Count);

}  // namespace qpu::isa

#endif
