// The details that an error object contains in addition to its message.
#ifndef QPU_SRC_ERROR_FACTS_HPP
#define QPU_SRC_ERROR_FACTS_HPP

#include <cstdint>
#include <memory>
#include <string>

#include "qpu/error.h"

namespace qpu::detail {

struct ErrorFacts {
  std::string kernel;
  std::string construct;
  int qpu = -1;
  std::uint32_t address = 0;
};

template <typename E>
[[noreturn]] void raise(const std::string& text, ErrorFacts facts = {}) {
  throw E(text.c_str(), std::make_shared<const ErrorFacts>(std::move(facts)));
}

std::string hex(std::uint32_t value);

}  // namespace qpu::detail

#endif
