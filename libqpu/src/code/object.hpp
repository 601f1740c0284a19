// A compiled kernel: instruction words for the QPUs, and the data that the runtime needs to start
// them. The object does not depend on the machine that compiled it, and is stored in the cache on
// disk.
#ifndef QPU_SRC_CODE_OBJECT_HPP
#define QPU_SRC_CODE_OBJECT_HPP

#include <cstdint>
#include <string>
#include <vector>

#include "isa/instruction.hpp"

namespace qpu::code {

// One word of a QPU's uniform stream.
struct Uniform {
  enum class Kind : std::uint8_t {
    QpuNumber,   // logical, 0 .. count - 1
    QpuCount,
    Argument,    // argument number `value` of the kernel
    SpillBase,   // the bus address of this QPU's spill area
    Constant     // `value` itself
  };
  Kind kind = Kind::Constant;
  std::uint32_t value = 0;
};

// The source construct that an instruction belongs to, for errors and listings.
struct Site {
  std::string construct;    // "store"
  std::string description;  // "store at rot3d.cpp:12"
};

struct Object {
  static constexpr std::uint32_t kNoSite = UINT32_MAX;

  std::string name;
  std::uint32_t parameters = 0;
  std::vector<isa::Word> words;
  std::vector<Uniform> uniforms;     // read in this order by every QPU
  std::vector<Site> sites;
  std::vector<std::uint32_t> siteOf; // one per word; kNoSite for instructions that the compiler adds
  std::uint32_t spillBytes = 0;      // size of one QPU's spill area; a multiple of 64
  bool usesSfu = false;              // results on hardware are not bit-exact
};

// The uniform stream of logical QPU `qpu`. `spill` is the address of its spill area.
std::vector<std::uint32_t> uniformStream(const Object& object, int qpu, int count,
                                         const std::uint32_t* arguments, std::uint32_t spill);

}  // namespace qpu::code

#endif
