#include "program.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "error_facts.hpp"
#include "interp/machine.hpp"
#include "mem/heap.hpp"
#include "qpu/detail/builder.h"
#include "qpu/kernel.h"
#include "runtime/backends.hpp"
#include "runtime/cache.hpp"
#include "runtime/object_file.hpp"

namespace qpu::detail {

namespace {

// Returns the first Print in source order, or null if there is none.
const Statement* findPrint(const std::vector<Statement>& statements) {
  for (const Statement& s : statements) {
    if (s.kind == StatementKind::PrintText || s.kind == StatementKind::PrintVector) return &s;
    for (const std::vector<Statement>* inner : {&s.body, &s.other}) {
      const Statement* const found = findPrint(*inner);
      if (found != nullptr) return found;
    }
  }
  return nullptr;
}

// Prints a warning once if the kernel contains a Print statement, because QPUs cannot print.
void warnOfPrint(const Source& source) {
  const Statement* const print = findPrint(source.body);
  if (print == nullptr) return;
  (void)std::fprintf(stderr,
                     "libqpu: kernel '%s': %s: machine code cannot print; run the kernel with "
                     "QPU_BACKEND=interpreter to see the output\n",
                     source.name.c_str(), source.describe(print->site).c_str());
}

}  // namespace

Program::Program(Source source) : source_(std::move(source)), code_(interp::lower(source_)) {
  if (runtime::requireBackend() == runtime::Kind::Interpreter) return;
  (void)executable();
  warnOfPrint(source_);
}

runtime::Executable& Program::executable() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!executable_)
    executable_ = std::make_unique<runtime::Executable>(
        runtime::compiled(source_, runtime::compilerOptions()));
  return *executable_;
}

const runtime::Executable* Program::compiledExecutable() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return executable_.get();
}

namespace {

// Requires that all arrays are in GPU memory, because QPUs cannot access other memory. Arrays
// that were allocated before a hardware backend was selected are in host memory.
void requireOnDevice(const Program& program, const std::uint32_t* uniforms) {
  const auto table = Heap::instance().table();
  const std::vector<Type>& parameters = program.source().parameters;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i] != Type::Address) continue;
    const Block* const block = table->find(uniforms[i]);
    if (block != nullptr && !block->device)
      raise<ArgumentError>("kernel '" + program.name() + "': argument " + std::to_string(i + 1) +
                               " was allocated while no hardware backend was selected; set "
                               "QPU_BACKEND before allocating arrays",
                           {program.name(), "", -1, 0});
  }
}

}  // namespace

const char* programName(const Program& program) noexcept { return program.name().c_str(); }

void releaseProgram(const Program* program) noexcept { delete program; }

Cycles programCycles(const Program& program) {
  const runtime::Executable* const made = program.compiledExecutable();
  return made != nullptr ? made->cycles() : Cycles{"", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
}

char* programListing(const Program& program) {
  const std::string text = program.executable().listing();
  char* const copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy == nullptr) throw std::bad_alloc();
  std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

void freeText(char* text) noexcept { std::free(text); }

void saveProgram(const Program& program, const char* path) {
  runtime::saveObject(program.executable().object(), path);
}

void requireQpuCount(const Program& program, int n) {
  if (n < 1 || n > kMaxQpus)
    raise<ArgumentError>("kernel '" + program.name() + "': setNumQPUs(" + std::to_string(n) +
                             "): the number must be 1..12, because the VideoCore IV has 12 QPUs",
                         {program.name(), "setNumQPUs", -1, 0});
}

std::uint32_t arrayUniform(bool given, std::uint32_t address) {
  if (!given) raise<ArgumentError>("a kernel argument is a null SharedArray pointer");
  if (address == 0)
    raise<ArgumentError>("a kernel argument is a SharedArray without memory: call alloc() first");
  return address;
}

void launch(const Program& program, int qpus, const std::uint32_t* uniforms, std::size_t count,
            bool profile) {
  const runtime::Kind kind = runtime::requireBackend();
  if (kind == runtime::Kind::Interpreter) {
    interp::run(program.code(), qpus, uniforms, count);
    return;
  }
  if (kind != runtime::Kind::Emulator) requireOnDevice(program, uniforms);
  program.executable().run(kind, qpus, uniforms, profile);
}

}  // namespace qpu::detail
