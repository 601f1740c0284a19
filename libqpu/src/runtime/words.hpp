// Copies blocks of words to and from GPU memory. The mapping can be device memory, which requires
// aligned accesses, but memcpy() and memset() can make unaligned accesses.
#ifndef QPU_SRC_RUNTIME_WORDS_HPP
#define QPU_SRC_RUNTIME_WORDS_HPP

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace qpu::runtime {

inline bool alignedTo8(const volatile void* p) { return reinterpret_cast<std::uintptr_t>(p) % 8 == 0; }

// Both addresses must be multiples of 4.
inline void copyDeviceWords(void* to, const void* from, std::size_t count) noexcept {
  auto* target = static_cast<volatile std::uint32_t*>(to);
  const auto* source = static_cast<const volatile std::uint32_t*>(from);
  // Use 8-byte accesses if both addresses have the same alignment to 8 bytes.
  if (sizeof(void*) == 8 && count > 1 && alignedTo8(target) == alignedTo8(source)) {
    if (!alignedTo8(target)) {
      *target++ = *source++;
      --count;
    }
    auto* wideTarget = reinterpret_cast<volatile std::uint64_t*>(const_cast<std::uint32_t*>(target));
    const auto* wideSource =
        reinterpret_cast<const volatile std::uint64_t*>(const_cast<const std::uint32_t*>(source));
    for (std::size_t i = 0; i < count / 2; ++i) wideTarget[i] = wideSource[i];
    target += count / 2 * 2;
    source += count / 2 * 2;
    count %= 2;
  }
  for (std::size_t i = 0; i < count; ++i) target[i] = source[i];
}

inline void clearDeviceWords(void* to, std::size_t count) noexcept {
  auto* const target = static_cast<volatile std::uint32_t*>(to);
  for (std::size_t i = 0; i < count; ++i) target[i] = 0;
}

}  // namespace qpu::runtime

#endif
