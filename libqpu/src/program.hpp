// A compiled kernel as the API holds it.
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
  // Compiles for the backend in force. Throws CompileError.
  explicit Program(Source source);

  const std::string& name() const { return code_.name; }
  const interp::Code& code() const { return code_; }
  const Source& source() const { return source_; }

  // Machine code, made when it is first asked for. Throws CompileError.
  runtime::Executable& executable() const;
  // Null when none was made yet.
  const runtime::Executable* madeExecutable() const;

 private:
  Source source_;
  interp::Code code_;
  mutable std::mutex mutex_;
  mutable std::unique_ptr<runtime::Executable> executable_;
};

}  // namespace qpu::detail

#endif
