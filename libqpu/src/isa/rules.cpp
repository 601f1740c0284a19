#include "isa/rules.hpp"

#include "isa/verify.hpp"

namespace qpu::isa {

const std::vector<Rule>& rules() {
  // The entries are in the order of RuleId.
  static const std::vector<Rule> all{
      {"unknown-instruction", "the instruction word uses reserved encodings"},
      {"breakpoint", "signal 0 stops the QPU for a debugger"},
      {"thread-switch", "a user program has only one thread"},
      {"nop-writes", "a pipe without an operation must write address 39"},
      {"reserved-pack", "with pm set, only packs 3 to 7 of the MUL result exist"},
      {"pack-on-io", "only registers can be packed: any register if pm is set, otherwise those of file A"},
      {"unpack-on-io", "values read from I/O addresses cannot be unpacked"},
      {"mixed-unpack", "one unpacked value must not be used by both a float and an integer operation"},
      {"same-destination", "writing two results to one accumulator or I/O address is undefined"},
      {"io-read-twice", "UNIFORM, VARYING and VPM_READ return one value per instruction, not one per file"},
      {"one-peripheral",
       "only one of these is allowed: TMU write, TMU load, TLB read, TLB write, SFU write, mutex read, semaphore"},
      {"semaphore-writes", "a semaphore instruction must not write to the TLB, a TMU or the SFU"},
      {"conditional-trigger", "addresses that trigger an action must be written in all elements"},
      {"vpm-pair", "VPM accesses and TMU loads cannot be combined, except VPM_READ with VPM_WRITE"},
      {"end-writes-register", "the program end instruction must not write a register file"},
      {"scoreboard-start", "the first two instructions must not wait for the scoreboard"},
      {"branch-target", "a branch must be relative and lead to an instruction of the program"},

      {"runs-out", "a path leaves the program without a program end and its two delay slots"},
      {"branch-in-delay-slot", "the three instructions after a branch must not branch"},
      {"branch-near-end", "a program end and a branch must not be in each other's delay slots"},
      {"register-file-latency",
       "a register of file A or B is not readable in the instruction after its write"},
      {"sfu-latency", "r4 must not be read in the two instructions after an SFU write"},
      {"sfu-result-write", "r4 must not be loaded in the two instructions after an SFU write"},
      {"rotate-by-r5-latency", "r5 must not be used as a rotation amount in the instruction after a write to r5"},
      {"rotate-source-latency",
       "an accumulator cannot be rotated in the instruction after its write"},
      {"noswap-latency", "a TMU must not be written in the two instructions after a write to TMU_NOSWAP"},
      {"uniforms-address-latency",
       "uniforms must not be read in the two instructions after a write to UNIFORMS_ADDRESS"},
      {"vpm-read-latency", "VPM_READ must not be used in the three instructions after a VPM read setup"},
      {"tlb-z-latency", "MS_FLAGS must not be read in the two instructions after a TLB Z write"},
      {"end-uniform", "uniforms and varyings must not be read in the last three instructions"},
      {"end-vpm", "the VPM and its DMA must not be accessed in the last three instructions"},
      {"end-address-14", "ra14 and rb14 must not be used in the last three instructions"},
      {"end-tlb-z", "the last instruction must not contain a TLB Z write"},

      {"uninitialised", "a register or the flags are read before they are written"},
      {"tmu-depth", "more than 4 requests to one TMU are in flight"},
      {"tmu-empty", "no request is in flight for this TMU load"},
      {"tmu-left", "the program ends with TMU requests in flight"},
      {"tmu-swap", "a program that uses both TMUs must set TMU_NOSWAP before its first request"},
      {"setup-word", "the setup word is not valid"},
      {"vpm-read-empty", "all vectors of the last VPM read setup have been read"},
      {"vpm-read-outstanding", "all vectors of a VPM read setup must be read before the next setup"},
      {"vpm-read-left", "the program ends before all vectors of its last VPM read setup are read"},
      {"vpm-write-setup", "VPM_WRITE needs a VPM write setup"},
      {"dma-load-setup", "a DMA load needs a DMA load setup"},
      {"dma-store-setup", "a DMA store needs a DMA store setup"},
      {"dma-load-overlap", "a DMA load must finish before the next one starts"},
      {"dma-store-overlap", "a DMA store must finish before the next one starts"},
      {"dma-load-read", "the data of a DMA load can be read only after the load has finished"},
      {"dma-left", "the program may end before its DMA has finished"},
      {"mutex-left", "the program ends with the mutex held"},
  };
  return all;
}

}  // namespace qpu::isa
