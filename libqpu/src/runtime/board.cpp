#include "runtime/board.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <sstream>

namespace qpu::runtime {
namespace {

struct Named {
  std::uint32_t code;
  const char* name;
};

constexpr std::array<Named, 5> kSocs = {{
    {0, "BCM2835"}, {1, "BCM2836"}, {2, "BCM2837"}, {3, "BCM2711"}, {4, "BCM2712"}}};

constexpr std::array<Named, 22> kModels = {{
    {0x00, "A"},         {0x01, "B"},    {0x02, "A+"},  {0x03, "B+"},
    {0x04, "2B"},        {0x06, "CM1"},  {0x08, "3B"},  {0x09, "Zero"},
    {0x0a, "CM3"},       {0x0c, "Zero W"}, {0x0d, "3B+"}, {0x0e, "3A+"},
    {0x10, "CM3+"},      {0x11, "4B"},   {0x12, "Zero 2 W"}, {0x13, "400"},
    {0x14, "CM4"},       {0x15, "CM4S"}, {0x17, "5"},   {0x18, "CM5"},
    {0x19, "500"},       {0x1a, "CM5 Lite"}}};

template <std::size_t N>
std::string nameOf(const std::array<Named, N>& table, std::uint32_t code) {
  const auto* const found = std::find_if(table.begin(), table.end(),
                                         [code](const Named& n) { return n.code == code; });
  if (found != table.end()) return found->name;
  std::array<char, 24> text{};
  (void)std::snprintf(text.data(), text.size(), "unknown (0x%x)", code);
  return text.data();
}

constexpr std::uint32_t kNewStyle = 1U << 23U;
constexpr std::uint32_t kOldOvervolted = 0x1000000;
constexpr std::uint32_t kOldFirst = 0x0002;
constexpr std::uint32_t kOldLast = 0x0015;

std::uint32_t field(std::uint32_t code, unsigned low, std::uint32_t width) {
  return (code >> low) & ((1U << width) - 1U);
}

std::optional<std::uint32_t> revisionLine(const std::string& cpuinfo) {
  std::istringstream lines(cpuinfo);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("Revision", 0) != 0) continue;
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    std::istringstream digits(line.substr(colon + 1));
    std::uint32_t code = 0;
    if (digits >> std::hex >> code) return code;
  }
  return std::nullopt;
}

// Reads the revision code that the firmware passes in the device tree. 64-bit kernels other than
// Raspberry Pi's own do not show the code in /proc/cpuinfo.
std::optional<std::uint32_t> revisionOfTree(const Root& root) {
  const std::string bytes = root.read("/proc/device-tree/system/linux,revision").value_or("");
  if (bytes.size() != 4) return std::nullopt;
  std::uint32_t code = 0;
  for (const char c : bytes) code = code << 8U | static_cast<unsigned char>(c);
  return code;
}

// Converts a string such as "brcm,bcm2837" to "BCM2837".
std::string socOfTree(const std::vector<std::string>& compatible) {
  for (const Named& soc : kSocs) {
    std::string lower = soc.name;
    std::transform(lower.begin(), lower.end(), lower.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    if (std::find(compatible.begin(), compatible.end(), "brcm," + lower) != compatible.end())
      return soc.name;
  }
  return {};
}

void classify(Board& b) {
  const std::string subject = b.model.empty() ? b.socName : b.model + " (" + b.socName + ")";
  if (b.socName == "BCM2835" || b.socName == "BCM2836" || b.socName == "BCM2837") {
    b.soc = Soc::Suitable;
    b.verdict = subject + " has the VideoCore IV's 12 QPUs";
  } else if (b.socName == "BCM2711" || b.socName == "BCM2712") {
    b.soc = Soc::Unsuitable;
    b.verdict = subject + (b.socName == "BCM2711" ? " has a VideoCore VI" : " has a VideoCore VII") +
                ", which libqpu does not support: its QPUs have a different instruction set";
  } else if (!b.model.empty() || !b.compatible.empty()) {
    b.soc = Soc::Unsuitable;
    b.verdict = (b.model.empty() ? b.compatible.front() : b.model) +
                " is not a Raspberry Pi with a VideoCore IV";
  } else {
    b.verdict = "no device tree and no revision code: this is not a Raspberry Pi, or /proc is missing";
  }
}

}  // namespace

Revision decodeRevision(std::uint32_t code) {
  Revision r;
  r.code = code;
  if ((code & kNewStyle) == 0) {
    const std::uint32_t old = code & 0xffffffU;
    r.overvolted = (code & kOldOvervolted) != 0;
    const bool listed = old >= kOldFirst && old <= kOldLast;
    r.soc = listed ? "BCM2835" : "unknown";
    r.model = listed ? "1 or CM1 (old-style code)" : "unknown";
    return r;
  }
  r.memoryMib = 256 << field(code, 20, 3);
  r.soc = nameOf(kSocs, field(code, 12, 4));
  r.model = nameOf(kModels, field(code, 4, 8));
  r.boardRevision = static_cast<int>(field(code, 0, 4));
  return r;
}

Board readBoard(const Root& root) {
  Board b;
  const auto model = root.read("/proc/device-tree/model");
  if (model) {
    const auto parts = splitNul(*model);
    if (!parts.empty()) b.model = parts.front();
  }
  b.compatible = splitNul(root.read("/proc/device-tree/compatible").value_or(""));
  auto code = revisionLine(root.read("/proc/cpuinfo").value_or(""));
  if (!code) code = revisionOfTree(root);
  if (code) b.revision = decodeRevision(*code);

  // Prefer the device tree, because /proc/cpuinfo names BCM2835 on every model.
  b.socName = socOfTree(b.compatible);
  if (b.socName.empty() && b.revision && b.revision->soc.rfind("BCM", 0) == 0)
    b.socName = b.revision->soc;
  classify(b);
  return b;
}

}  // namespace qpu::runtime
