#include "program.hpp"

#include "error_facts.hpp"
#include "interp/machine.hpp"
#include "qpu/backend.h"
#include "qpu/detail/builder.h"
#include "qpu/kernel.h"

namespace qpu::detail {

const char* programName(const Program& program) noexcept { return program.name().c_str(); }

void releaseProgram(const Program* program) noexcept { delete program; }

void requireQpuCount(const Program& program, int n) {
  if (n < 1 || n > kMaxQpus)
    raise<ArgumentError>("kernel '" + program.name() + "': setNumQPUs(" + std::to_string(n) +
                             "): the VideoCore IV has 12 QPUs, so 1..12",
                         {program.name(), "setNumQPUs", -1, 0});
}

std::uint32_t arrayUniform(bool given, std::uint32_t address) {
  if (!given) raise<ArgumentError>("a kernel argument is a null SharedArray pointer");
  if (address == 0)
    raise<ArgumentError>("a kernel argument is a SharedArray without memory: call alloc() first");
  return address;
}

void launch(const Program& program, int qpus, const std::uint32_t* uniforms, std::size_t count) {
  (void)backend();
  interp::run(program.code(), qpus, uniforms, count);
}

}  // namespace qpu::detail
