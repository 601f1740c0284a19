#include "isa/rules.hpp"

#include "isa/verify.hpp"

namespace qpu::isa {

const std::vector<Rule>& rules() {
  // In the order of RuleId.
  static const std::vector<Rule> all{
      {"unknown-instruction", "the word has reserved fields"},
      {"breakpoint", "signal 0 stops the QPU for a debugger"},
      {"thread-switch", "a user program has one thread to switch between"},
      {"nop-writes", "a pipe without operation must write address 39"},
      {"reserved-pack", "with pm set there are packs 3 to 7 only, of the MUL result"},
      {"pack-on-io", "packs work on registers: those of file A, with pm set any"},
      {"unpack-on-io", "values read from I/O addresses cannot be unpacked"},
      {"mixed-unpack", "one unpacked value must not feed a float and an integer operation"},
      {"same-destination", "two results for one accumulator or I/O address are undefined"},
      {"io-read-twice", "UNIFORM, VARYING and VPM_READ give one value, not one per file"},
      {"one-peripheral",
       "at most one TMU write, TMU load, TLB read, TLB write, SFU write, mutex read or semaphore"},
      {"semaphore-writes", "a semaphore instruction must not write TLB, TMU or SFU"},
      {"conditional-trigger", "addresses that start something must be written in all elements"},
      {"vpm-pair", "of VPM accesses and TMU loads, only VPM_READ and VPM_WRITE go together"},
      {"end-writes-register", "the program end instruction must not write a register file"},
      {"scoreboard-start", "the first two instructions must not wait for the scoreboard"},
      {"branch-target", "a branch must be relative, to an instruction of the program"},

      {"runs-out", "a path leaves the program without program end and its two slots"},
      {"branch-in-delay-slot", "the three instructions after a branch must not branch"},
      {"branch-near-end", "neither branch after a program end nor end in a branch's slots"},
      {"register-file-latency",
       "a register of file A or B is not readable in the instruction after its write"},
      {"sfu-latency", "r4 must not be read in the two instructions after an SFU write"},
      {"sfu-result-write", "r4 must not be loaded in the two instructions after an SFU write"},
      {"rotate-by-r5-latency", "no rotation by r5 in the instruction after its write"},
      {"rotate-source-latency",
       "an accumulator cannot be rotated in the instruction after its write"},
      {"noswap-latency", "no TMU write in the two instructions after TMU_NOSWAP"},
      {"uniforms-address-latency",
       "no uniform read in the two instructions after UNIFORMS_ADDRESS"},
      {"vpm-read-latency", "no VPM_READ in the three instructions after a VPM read setup"},
      {"tlb-z-latency", "MS_FLAGS must not be read in the two instructions after a TLB Z write"},
      {"end-uniform", "no uniform or varying in the last three instructions"},
      {"end-vpm", "no access to VPM and DMA in the last three instructions"},
      {"end-address-14", "neither ra14 nor rb14 in the last three instructions"},
      {"end-tlb-z", "no TLB Z write in the last instruction"},

      {"uninitialised", "registers and flags are undefined until written"},
      {"tmu-depth", "a TMU holds 4 requests safely; more than that are outstanding"},
      {"tmu-empty", "no request is outstanding for this TMU load"},
      {"tmu-left", "the program ends with TMU requests outstanding"},
      {"tmu-swap", "a program that uses both TMUs must set TMU_NOSWAP before its first request"},
      {"setup-word", "the setup word is not valid"},
      {"vpm-read-empty", "no vector is left of the last VPM read setup"},
      {"vpm-read-outstanding", "the last VPM read setup must be drained before the next"},
      {"vpm-read-left", "the program ends before its last VPM read setup is drained"},
      {"vpm-write-setup", "VPM_WRITE needs a VPM write setup"},
      {"dma-load-setup", "a DMA load needs a DMA load setup"},
      {"dma-store-setup", "a DMA store needs a DMA store setup"},
      {"dma-load-overlap", "the last DMA load must be finished before the next starts"},
      {"dma-store-overlap", "the last DMA store must be finished before the next starts"},
      {"dma-load-read", "what a DMA load fills can be read when it is finished"},
      {"dma-left", "the program ends before its DMA is known to be finished"},
      {"mutex-left", "the program ends with the mutex held"},
  };
  return all;
}

}  // namespace qpu::isa
