// A compiled kernel as the API holds it.
#ifndef QPU_SRC_PROGRAM_HPP
#define QPU_SRC_PROGRAM_HPP

#include <string>

#include "interp/code.hpp"
#include "lang/source.hpp"

namespace qpu::detail {

constexpr int kMaxQpus = 12;

class Program {
 public:
  explicit Program(const Source& source) : code_(interp::lower(source)) {}

  const std::string& name() const { return code_.name; }
  const interp::Code& code() const { return code_; }

 private:
  interp::Code code_;
};

}  // namespace qpu::detail

#endif
