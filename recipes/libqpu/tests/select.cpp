// The front half of the compiler: its machine operations against the interpreter.
#include <cstdlib>
#include <iostream>
#include <stdexcept>

#include "compiler/compile.hpp"
#include "compiler/mir_text.hpp"
#include "tests/mir_run.hpp"

// Words that the language makes macros come last.
#include "tests/compiler_cases.hpp"

using qpu::compiler::Function;

namespace {

Function selected(const qpu::detail::Source& source, const qpu::compiler::Options& options) {
  Function function = select(source, options);
  if (std::getenv("SELECT_VERBOSE") != nullptr)
    std::cout << "level " << options.level << " " << text(function);
  CHECK(check(function) == "");
  return function;
}

}  // namespace

void execute(const qpu::detail::Source& source, const qpu::compiler::Options& options, int qpus,
             const std::vector<std::uint32_t>& arguments) {
  const Function function = selected(source, options);
  try {
    test::MirMachine(function, qpus, arguments).run();
  } catch (const std::runtime_error& e) {
    FAIL(std::string(e.what()) << "\n" << text(function));
  }
}
