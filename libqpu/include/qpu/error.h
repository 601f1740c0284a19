// The exceptions that libqpu throws. Each message says what was expected, what was found and,
// where possible, how to fix the error.
//
// No std::string is passed through this interface, so that programs built with either value of
// _GLIBCXX_USE_CXX11_ABI can link against the same libqpu.so.
#ifndef QPU_ERROR_H
#define QPU_ERROR_H

#include <cstdint>
#include <memory>
#include <stdexcept>

#include "qpu/detail/export.h"

namespace qpu {

namespace detail {
struct ErrorFacts;
}

// Base class of all errors that the library's user can fix.
class QPU_API Error : public std::runtime_error {
 public:
  explicit Error(const char* text);
  Error(const char* text, std::shared_ptr<const detail::ErrorFacts> facts);
  Error(const Error&) = default;
  Error& operator=(const Error&) = default;
  ~Error() noexcept override;

  // The kernel's name, or "" if the error does not concern a kernel.
  const char* kernel() const noexcept;
  // The language construct that caused the error, such as "While" or "store". The text is "" if no
  // construct caused the error.
  const char* construct() const noexcept;

 protected:
  const detail::ErrorFacts* facts() const noexcept { return facts_.get(); }

 private:
  std::shared_ptr<const detail::ErrorFacts> facts_;
};

// The kernel's source is invalid. compile() throws this error while it records the kernel.
class QPU_API CompileError : public Error {
 public:
  using Error::Error;
  CompileError(const CompileError&) = default;
  CompileError& operator=(const CompileError&) = default;
  ~CompileError() noexcept override;
};

// A running kernel performed an operation that would cause wrong results or a hang on hardware.
// Buffers keep the data that the kernel stored before the error.
class QPU_API ExecutionError : public Error {
 public:
  using Error::Error;
  ExecutionError(const ExecutionError&) = default;
  ExecutionError& operator=(const ExecutionError&) = default;
  ~ExecutionError() noexcept override;

  // Logical number (0..11) of the QPU that failed, or -1 if the failure does not concern a single
  // QPU.
  int qpu() const noexcept;
};

// A kernel accessed an address outside all live SharedArrays, or a misaligned address.
class QPU_API BoundsError : public ExecutionError {
 public:
  using ExecutionError::ExecutionError;
  BoundsError(const BoundsError&) = default;
  BoundsError& operator=(const BoundsError&) = default;
  ~BoundsError() noexcept override;

  // The first of the accessed bus addresses that lies outside all SharedArrays.
  std::uint32_t address() const noexcept;
};

// All QPUs that have not finished are waiting for semaphores.
class QPU_API DeadlockError : public ExecutionError {
 public:
  using ExecutionError::ExecutionError;
  DeadlockError(const DeadlockError&) = default;
  DeadlockError& operator=(const DeadlockError&) = default;
  ~DeadlockError() noexcept override;
};

// An argument that the host passed, such as a QPU count, an index or a copy length, is out of
// range.
class QPU_API ArgumentError : public Error {
 public:
  using Error::Error;
  ArgumentError(const ArgumentError&) = default;
  ArgumentError& operator=(const ArgumentError&) = default;
  ~ArgumentError() noexcept override;
};

// A SharedArray cannot be allocated, because its length is 0 or because no memory or bus
// addresses are left.
class QPU_API AllocationError : public Error {
 public:
  using Error::Error;
  AllocationError(const AllocationError&) = default;
  AllocationError& operator=(const AllocationError&) = default;
  ~AllocationError() noexcept override;
};

// QPU_BACKEND names an unknown backend or a backend that does not work on this machine. This error
// also reports any other setting of the library that is out of range.
class QPU_API BackendError : public Error {
 public:
  using Error::Error;
  BackendError(const BackendError&) = default;
  BackendError& operator=(const BackendError&) = default;
  ~BackendError() noexcept override;
};

}  // namespace qpu

#endif
