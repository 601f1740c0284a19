// A compiled kernel: the instruction words for the QPUs, and the data that the runtime needs to
// start the kernel. An object does not depend on the machine that compiled it. Objects are stored
// in the cache on disk.
#ifndef QPU_SRC_CODE_OBJECT_HPP
#define QPU_SRC_CODE_OBJECT_HPP

#include <cstdint>
#include <string>
#include <vector>

#include "isa/instruction.hpp"

namespace qpu::code {

// A word in a QPU's uniform stream.
struct Uniform {
  enum class Kind : std::uint8_t {
    QpuNumber,   // the logical number, 0 .. count - 1
    QpuCount,
    Argument,    // argument number `value` of the kernel
    SpillBase,   // the bus address of this QPU's spill area
    Constant     // `value` itself
  };
  Kind kind = Kind::Constant;
  std::uint32_t value = 0;
};

// The source construct that an instruction was compiled from. Error messages and listings name this
// construct.
struct Site {
  std::string construct;    // such as "store"
  std::string description;  // such as "store at rot3d.cpp:12"
};

struct Object {
  static constexpr std::uint32_t kNoSite = UINT32_MAX;

  std::string name;
  std::uint32_t parameters = 0;
  std::vector<isa::Word> words;
  std::vector<Uniform> uniforms;     // in the order in which each QPU reads them
  std::vector<Site> sites;
  // One entry per word. The entry is kNoSite for instructions that the compiler adds.
  std::vector<std::uint32_t> siteOf;
  std::uint32_t spillBytes = 0;      // size in bytes of each QPU's spill area; a multiple of 64
  bool usesSfu = false;              // true if the last bits of results may differ on hardware
};

// Returns the uniform stream for logical QPU number `qpu`. `spill` is the address of the QPU's
// spill area.
std::vector<std::uint32_t> uniformStream(const Object& object, int qpu, int count,
                                         const std::uint32_t* arguments, std::uint32_t spill);

}  // namespace qpu::code

#endif
