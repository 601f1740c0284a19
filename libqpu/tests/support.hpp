// Helpers for tests that do not use the kernel language.
#ifndef TESTS_SUPPORT_HPP
#define TESTS_SUPPORT_HPP

#include <doctest/doctest.h>

#include <cstdlib>
#include <exception>
#include <string>

namespace test {

// Sets an environment variable, and unsets it at the end of the scope.
struct Setting {
  Setting(const char* key, const std::string& value) : name(key) { setenv(key, value.c_str(), 1); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;
  ~Setting() { unsetenv(name); }
  const char* name;
};

// Returns the message of the exception of type E that `f` throws.
template <typename E, typename F>
std::string thrown(F f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  } catch (const std::exception& e) {
    FAIL("another exception: " << e.what());
  }
  FAIL("no exception");
  return {};
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace test

#endif
