// Implements compile(): determines the name of the kernel, records the kernel function and
// compiles the recording.
#include <atomic>
#include <cstdlib>
#include <cxxabi.h>
#include <dlfcn.h>
#include <memory>
#include <string>
#include <utility>

#include "lang/recorder.hpp"
#include "program.hpp"
#include "qpu/backend.h"
#include "qpu/detail/builder.h"

namespace qpu::detail {
namespace {

std::string symbolName(const void* function) {
  Dl_info info{};
  if (function == nullptr || dladdr(function, &info) == 0 || info.dli_saddr != function ||
      info.dli_sname == nullptr)
    return {};
  int status = -1;
  const std::unique_ptr<char, void (*)(void*)> plain(
      abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status), std::free);
  const std::string name = status == 0 ? plain.get() : info.dli_sname;
  return name.substr(0, name.find('('));
}

std::string kernelName(const char* given, const void* function) {
  static std::atomic<unsigned> unnamed{0};
  if (given != nullptr && *given != '\0') return given;
  const std::string symbol = symbolName(function);
  return symbol.empty() ? "kernel-" + std::to_string(++unnamed) : symbol;
}

}  // namespace

Trace::Trace(const char* name, const void* function, const Type* parameters, std::size_t count) {
  (void)backend();  // throws if QPU_BACKEND is unusable, before anything is recorded
  recorder_ = new Recorder(kernelName(name, function), {parameters, parameters + count});
}

Trace::~Trace() { delete recorder_; }

const Program* Trace::finish() {
  Source source = recorder_->finish();
  checkGathers(source);
  return new Program(std::move(source));
}

}  // namespace qpu::detail
