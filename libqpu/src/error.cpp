#include "qpu/error.h"

#include <array>
#include <cstdio>

#include "error_facts.hpp"

namespace qpu {

Error::Error(const char* text)
    : Error(text, std::make_shared<const detail::ErrorFacts>()) {}
Error::Error(const char* text, std::shared_ptr<const detail::ErrorFacts> facts)
    : std::runtime_error(text), facts_(std::move(facts)) {}
Error::~Error() noexcept = default;
CompileError::~CompileError() noexcept = default;
ExecutionError::~ExecutionError() noexcept = default;
BoundsError::~BoundsError() noexcept = default;
DeadlockError::~DeadlockError() noexcept = default;
ArgumentError::~ArgumentError() noexcept = default;
AllocationError::~AllocationError() noexcept = default;
BackendError::~BackendError() noexcept = default;

const char* Error::kernel() const noexcept { return facts_->kernel.c_str(); }
const char* Error::construct() const noexcept { return facts_->construct.c_str(); }
int ExecutionError::qpu() const noexcept { return facts()->qpu; }
std::uint32_t BoundsError::address() const noexcept { return facts()->address; }

std::string detail::hex(std::uint32_t value) {
  std::array<char, 11> text{};
  (void)std::snprintf(text.data(), text.size(), "0x%08x", value);
  return text.data();
}

}  // namespace qpu
