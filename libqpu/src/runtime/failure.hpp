// Error of this thread's last failed C call: qpu_last_error().
#ifndef QPU_SRC_RUNTIME_FAILURE_HPP
#define QPU_SRC_RUNTIME_FAILURE_HPP

namespace qpu::runtime {

// Stores the exception that is being handled. Call it only in a handler.
void rememberFailure() noexcept;

// Returns f(). If it throws, stores the error and returns `failed`.
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
