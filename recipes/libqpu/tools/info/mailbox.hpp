// One question to the firmware through /dev/vcio.
#ifndef QPU_TOOLS_INFO_MAILBOX_HPP
#define QPU_TOOLS_INFO_MAILBOX_HPP

#include <array>
#include <cstdint>
#include <optional>
#include <string>

namespace qpu::info {

// Property message of tag 0x00010006, get VC memory. Words as in the firmware's
// mailbox property interface: size, code, tag, value size, request size,
// values, end.
using VcMemoryMessage = std::array<std::uint32_t, 8>;
VcMemoryMessage vcMemoryRequest();
// Size of the GPU's memory in bytes; nothing when the reply is no success.
std::optional<std::uint32_t> vcMemorySize(const VcMemoryMessage& reply);

// Asks through the node at `path`. Not measured on hardware. Nothing when that
// fails; `fault` then says why.
std::optional<std::uint32_t> askVcMemory(const std::string& path, std::string& fault);

}  // namespace qpu::info

#endif
