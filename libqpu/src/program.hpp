// The internal representation of a compiled kernel.
#ifndef QPU_SRC_PROGRAM_HPP
#define QPU_SRC_PROGRAM_HPP

#include <memory>
#include <mutex>
#include <string>

#include "interp/code.hpp"
#include "lang/source.hpp"
#include "runtime/executable.hpp"

namespace qpu::detail {

constexpr int kMaxQpus = 12;

class Program {
 public:
  // Compiles the kernel for the selected backend. Throws CompileError if the compilation fails.
  explicit Program(Source source);

  const std::string& name() const { return code_.name; }
  const interp::Code& code() const { return code_; }
  const Source& source() const { return source_; }

  // Returns the machine code. The first call compiles the kernel. Throws CompileError if the
  // compilation fails.
  runtime::Executable& executable() const;
  // Returns null if the machine code has not been compiled yet.
  const runtime::Executable* compiledExecutable() const;

 private:
  Source source_;
  interp::Code code_;
  mutable std::mutex mutex_;
  mutable std::unique_ptr<runtime::Executable> executable_;
};

}  // namespace qpu::detail

#endif
