// The error of this thread's last failed C call, which qpu_last_error() returns.
#ifndef QPU_SRC_RUNTIME_FAILURE_HPP
#define QPU_SRC_RUNTIME_FAILURE_HPP

namespace qpu::runtime {

// Stores the exception that is being handled. Call this function only in an exception handler.
void rememberFailure() noexcept;

// Calls f() and returns its result. If f throws an exception, stores the error and returns
// `failed`.
template <typename T, typename F>
T guarded(T failed, F f) noexcept {
  try {
    return f();
  } catch (...) {
    rememberFailure();
  }
  return failed;
}

}  // namespace qpu::runtime

#endif
