// What this thread's last failed call through C says: qpu_last_error().
#ifndef QPU_SRC_RUNTIME_FAILURE_HPP
#define QPU_SRC_RUNTIME_FAILURE_HPP

namespace qpu::runtime {

// Keeps the exception that is being handled. In a handler only.
void rememberFailure() noexcept;

// What `f` returns, or `failed` with the error's text kept.
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
