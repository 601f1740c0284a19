#include "code/object.hpp"

namespace qpu::code {

std::vector<std::uint32_t> uniformStream(const Object& object, int qpu, int count,
                                         const std::uint32_t* arguments, std::uint32_t spill) {
  std::vector<std::uint32_t> stream;
  stream.reserve(object.uniforms.size());
  for (const Uniform& u : object.uniforms) {
    switch (u.kind) {
      case Uniform::Kind::QpuNumber: stream.push_back(static_cast<std::uint32_t>(qpu)); break;
      case Uniform::Kind::QpuCount: stream.push_back(static_cast<std::uint32_t>(count)); break;
      case Uniform::Kind::Argument: stream.push_back(arguments[u.value]); break;
      case Uniform::Kind::SpillBase: stream.push_back(spill); break;
      case Uniform::Kind::Constant: stream.push_back(u.value); break;
    }
  }
  return stream;
}

}  // namespace qpu::code
