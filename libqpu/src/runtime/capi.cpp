// Implements qpu.h. No exception propagates out of these functions.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

#include "emu/model.hpp"
#include "error_facts.hpp"
#include "qpu.h"
#include "qpu/backend.h"
#include "qpu/shared_array.h"
#include "runtime/backends.hpp"
#include "runtime/executable.hpp"
#include "runtime/failure.hpp"
#include "runtime/machine.hpp"
#include "runtime/object_file.hpp"
#include "runtime/report.hpp"

struct qpu_buffer {
  qpu::detail::SharedWords words;
};

struct qpu_program {
  explicit qpu_program(qpu::code::Object object)
      : code(std::make_shared<const qpu::code::Object>(std::move(object))) {}
  qpu::runtime::Executable code;
  std::atomic<bool> profile{false};
};

namespace qpu::runtime {
namespace {

struct Failure {
  std::string text;
  const char* kind = "";
};
thread_local Failure lastFailure;

void remember(const char* kind, const char* text) noexcept {
  try {
    lastFailure.text = text;
  } catch (...) {
    lastFailure.text.clear();
  }
  lastFailure.kind = kind;
}

// Returns a copy of the text, which the caller must free.
char* copied(const std::string& text) {
  char* const copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy == nullptr) throw std::bad_alloc();
  std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

template <typename T>
T& given(T* pointer, const char* what) {
  if (pointer == nullptr) detail::raise<ArgumentError>(std::string(what) + " is NULL");
  return *pointer;
}

void requireQpus(int qpus) {
  if (qpus < 1 || qpus > 12)
    detail::raise<ArgumentError>("the number of QPUs is " + std::to_string(qpus) +
                                 ", but must be 1..12, because the VideoCore IV has 12 QPUs");
}

qpu_cycles forC(const Cycles& c) {
  return {c.instructions,      c.clocks,   c.stalledOnTmu,    c.stalledOnVpm,
          c.stalledOnOther,    c.tmuBytes, c.memoryReadBytes, c.memoryWriteBytes,
          c.seconds(),         c.board,    c.launches,        c.registersLaunchSeconds,
          c.mailboxLaunchSeconds};
}

// Returns the address of the words in the range [offset, offset + bytes) of a buffer.
std::uint32_t* wordsAt(const qpu_buffer& buffer, std::size_t offset, std::size_t bytes,
                       const void* data) {
  if (offset % 4 != 0 || bytes % 4 != 0 || reinterpret_cast<std::uintptr_t>(data) % 4 != 0)
    detail::raise<ArgumentError>("a copy of " + std::to_string(bytes) + " bytes at offset " +
                                 std::to_string(offset) +
                                 ": offset, size and data address must be multiples of 4");
  buffer.words.requireRange(offset / 4, bytes / 4, "copy");
  return buffer.words.words() + offset / 4;
}

}  // namespace

void rememberFailure() noexcept {
  try {
    throw;
  } catch (const CompileError& e) {
    remember("CompileError", e.what());
  } catch (const BoundsError& e) {
    remember("BoundsError", e.what());
  } catch (const DeadlockError& e) {
    remember("DeadlockError", e.what());
  } catch (const ExecutionError& e) {
    remember("ExecutionError", e.what());
  } catch (const ArgumentError& e) {
    remember("ArgumentError", e.what());
  } catch (const AllocationError& e) {
    remember("AllocationError", e.what());
  } catch (const BackendError& e) {
    remember("BackendError", e.what());
  } catch (const std::exception& e) {
    remember("Error", e.what());
  } catch (...) {
    remember("Error", "an exception of an unknown type");
  }
}

// Returns the backend that runs machine code.
Kind machineBackend() {
  const Kind kind = requireBackend();
  if (kind != Kind::Interpreter) return kind;
  const char* const set = std::getenv("QPU_BACKEND");  // NOLINT(concurrency-mt-unsafe): only read
  if (set == nullptr || *set == '\0') return Kind::Emulator;
  detail::raise<BackendError>(
      "the interpreter runs kernels from their source, not machine code; set "
      "QPU_BACKEND=emulator, or unset it");
}

}  // namespace qpu::runtime

using qpu::detail::copyWords;
using qpu::runtime::copied;
using qpu::runtime::given;
using qpu::runtime::guarded;

extern "C" {

const char* qpu_version(void) { return qpu::version(); }

const char* qpu_backend_name(void) {
  return guarded<const char*>(nullptr, [] { return qpu::runtime::currentChoice().name; });
}

const char* qpu_backend_reason(void) {
  return guarded<const char*>("out of memory",
                              [] { return qpu::runtime::currentChoice().text.c_str(); });
}

const char* qpu_last_error(void) { return qpu::runtime::lastFailure.text.c_str(); }
const char* qpu_last_error_class(void) { return qpu::runtime::lastFailure.kind; }

void qpu_free(void* text) { std::free(text); }

char* qpu_machine_report(const char* root, int json) {
  return guarded<char*>(nullptr, [root, json] {
    qpu::runtime::Host host = qpu::runtime::host();
    if (root != nullptr && std::string(root) != "/") {
      host.os = nullptr;
      host.root = qpu::runtime::Root(root);
    }
    const qpu::runtime::Findings f = findAll(host);
    return copied(json != 0 ? asJson(f) : asText(f));
  });
}

qpu_buffer* qpu_buffer_new(std::size_t bytes) {
  return guarded<qpu_buffer*>(nullptr, [bytes] {
    return new qpu_buffer{qpu::detail::SharedWords(bytes / 4 + (bytes % 4 != 0 ? 1 : 0))};
  });
}

void qpu_buffer_delete(qpu_buffer* buffer) { delete buffer; }

std::size_t qpu_buffer_bytes(const qpu_buffer* buffer) {
  return buffer != nullptr ? 4 * buffer->words.count() : 0;
}

void* qpu_buffer_data(const qpu_buffer* buffer) {
  return buffer != nullptr ? buffer->words.words() : nullptr;
}

std::uint32_t qpu_buffer_address(const qpu_buffer* buffer) {
  return buffer != nullptr ? buffer->words.address() : 0;
}

int qpu_buffer_write(qpu_buffer* buffer, std::size_t offset, const void* data, std::size_t bytes) {
  return guarded(-1, [=] {
    copyWords(qpu::runtime::wordsAt(given(buffer, "buffer"), offset, bytes, data), data, bytes / 4);
    return 0;
  });
}

int qpu_buffer_read(const qpu_buffer* buffer, std::size_t offset, void* data, std::size_t bytes) {
  return guarded(-1, [=] {
    copyWords(data, qpu::runtime::wordsAt(given(buffer, "buffer"), offset, bytes, data), bytes / 4);
    return 0;
  });
}

qpu_program* qpu_program_open(const char* path) {
  return guarded<qpu_program*>(nullptr, [path] {
    return new qpu_program(qpu::runtime::openObject(&given(path, "path")));
  });
}

qpu_program* qpu_program_from_bytes(const void* data, std::size_t bytes, const char* name) {
  return guarded<qpu_program*>(nullptr, [=] {
    const std::string_view all(&given(static_cast<const char*>(data), "data"), bytes);
    return new qpu_program(qpu::runtime::readObject(all, name != nullptr ? name : "program"));
  });
}

qpu_program* qpu_program_from_words(const std::uint64_t* words, std::size_t count,
                                    const char* name) {
  return guarded<qpu_program*>(nullptr, [=] {
    return new qpu_program(
        qpu::runtime::objectOf(words, count, name != nullptr ? name : "program"));
  });
}

void qpu_program_delete(qpu_program* program) { delete program; }

int qpu_program_save(const qpu_program* program, const char* path) {
  return guarded(-1, [=] {
    qpu::runtime::saveObject(given(program, "program").code.object(), &given(path, "path"));
    return 0;
  });
}

const char* qpu_program_name(const qpu_program* program) {
  return program != nullptr ? program->code.object().name.c_str() : "";
}

std::size_t qpu_program_words(const qpu_program* program, const std::uint64_t** words) {
  if (program == nullptr) return 0;
  if (words != nullptr) *words = program->code.object().words.data();
  return program->code.object().words.size();
}

std::size_t qpu_program_parameters(const qpu_program* program) {
  return program != nullptr ? program->code.object().parameters : 0;
}

int qpu_program_uses_sfu(const qpu_program* program) {
  return program != nullptr && program->code.object().usesSfu ? 1 : 0;
}

int qpu_program_run(qpu_program* program, int qpus, const std::uint32_t* arguments,
                    std::size_t count) {
  return guarded(-1, [=] {
    qpu_program& p = given(program, "program");
    qpu::runtime::requireQpus(qpus);
    const std::size_t expected = p.code.object().parameters;
    if (count != expected)
      qpu::detail::raise<qpu::ArgumentError>(
          "kernel '" + p.code.object().name + "' takes " + std::to_string(expected) +
          " arguments, found " + std::to_string(count));
    if (count != 0) (void)given(arguments, "arguments");
    p.code.run(qpu::runtime::machineBackend(), qpus, arguments, p.profile);
    return 0;
  });
}

int qpu_program_run_raw(qpu_program* program, int qpus, const std::uint32_t* uniforms,
                        std::size_t count) {
  return guarded(-1, [=] {
    qpu_program& p = given(program, "program");
    qpu::runtime::requireQpus(qpus);
    if (count != 0) (void)given(uniforms, "uniforms");
    std::vector<std::vector<std::uint32_t>> streams;
    for (int q = 0; q < qpus; ++q) {
      const std::uint32_t* const first = uniforms + static_cast<std::size_t>(q) * count;
      streams.emplace_back(first, first + count);
    }
    p.code.runStreams(qpu::runtime::machineBackend(), std::move(streams), p.profile);
    return 0;
  });
}

void qpu_program_profile(qpu_program* program, int on) {
  if (program != nullptr) program->profile = on != 0;
}

int qpu_program_cycles(const qpu_program* program, qpu_cycles* cycles) {
  return guarded(-1, [=] {
    const qpu::Cycles c = given(program, "program").code.cycles();
    if (*c.board == '\0')
      qpu::detail::raise<qpu::ArgumentError>("the program has not run on the emulator");
    given(cycles, "cycles") = qpu::runtime::forC(c);
    return 0;
  });
}

int qpu_thread_cycles(qpu_cycles* cycles) {
  return guarded(-1, [=] {
    const qpu::Cycles c = qpu::runtime::cyclesOfThread();
    if (*c.board == '\0')
      qpu::detail::raise<qpu::ArgumentError>("this thread has not run any program on the emulator");
    given(cycles, "cycles") = qpu::runtime::forC(c);
    return 0;
  });
}

char* qpu_model_parameters() {
  return guarded<char*>(
      nullptr, [] { return copied(qpu::emu::describe(qpu::runtime::emulatedBoard())); });
}

int qpu_model_parameter(const char* name, double* value) {
  return guarded(-1, [=] {
    const std::string requested = &given(name, "name");
    for (const qpu::emu::Parameter& p : qpu::emu::parameters()) {
      if (requested != p.name) continue;
      given(value, "value") = qpu::runtime::emulatedBoard().*p.member;
      return 0;
    }
    qpu::detail::raise<qpu::ArgumentError>("'" + requested +
                                           "' is not a parameter of the model; "
                                           "qpu_model_parameters() lists them");
  });
}

char* qpu_program_listing(const qpu_program* program) {
  return guarded<char*>(nullptr,
                        [=] { return copied(given(program, "program").code.listing()); });
}

char* qpu_disassemble(const std::uint64_t* words, std::size_t count) {
  return guarded<char*>(nullptr, [=] {
    if (count != 0) (void)given(words, "words");
    return copied(qpu::runtime::disassembleWords(words, count));
  });
}

long qpu_assemble(const char* text, std::uint64_t* words, std::size_t room) {
  return guarded<long>(-1, [=] {
    const auto all = qpu::runtime::assembleLines(&given(text, "text"));
    if (room != 0) std::copy_n(all.begin(), std::min(room, all.size()), &given(words, "words"));
    return static_cast<long>(all.size());
  });
}

}  // extern "C"
