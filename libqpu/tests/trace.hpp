// Records kernel functions for tests of individual parts of the compiler.
#ifndef TESTS_TRACE_HPP
#define TESTS_TRACE_HPP

#include <string>
#include <vector>

#include "lang/recorder.hpp"
// The following header is included last. It defines the name End, which many other headers use, as
// a macro.
#include "QPULib.h"

namespace test {

template <typename F, typename... Ts>
qpu::detail::Source record(F& f, const char* name) {
  using qpu::detail::Type;
  const std::vector<Type> types = {
      qpu::detail::Element<typename qpu::detail::Plain<Ts>::type>::type()...};
  qpu::detail::Recorder recorder(name, types);
  qpu::detail::Call<F, Ts...>::run(f, typename qpu::detail::MakeIndices<sizeof...(Ts)>::type());
  return recorder.finish();
}

template <typename... Ts>
qpu::detail::Source trace(void (*f)(Ts...), const char* name = "test") {
  return record<void (*)(Ts...), Ts...>(f, name);
}

template <typename M>
struct Traceable;
template <typename C, typename... Ts>
struct Traceable<void (C::*)(Ts...) const> {
  template <typename F>
  static qpu::detail::Source trace(F& f, const char* name) {
    return record<F, Ts...>(f, name);
  }
};

template <typename F>
qpu::detail::Source trace(F f, const char* name = "test") {
  return Traceable<decltype(&F::operator())>::trace(f, name);
}

}  // namespace test

#endif
