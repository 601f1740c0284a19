#include "isa/names.hpp"

namespace qpu::isa::names {
namespace {

constexpr std::size_t kFirst = 32;  // lower addresses are registers
using Table = std::array<std::string_view, 32>;

// The names of read addresses 32..63. If a name is in both tables, it takes a suffix for file B.
constexpr Table kReadA{
    "uniform",        "",            "",            "varying", "", "", "element_number", "nop",
    "",               "x_coord",     "ms_flags",    "",        "", "", "",               "",
    "vpm",            "vpm_ld_busy", "vpm_ld_wait", "mutex"};
constexpr Table kReadB{
    "uniform", "",            "",            "varying", "", "", "qpu_number", "nop",
    "",        "y_coord",     "rev_flag",    "",        "", "", "",           "",
    "vpm",     "vpm_st_busy", "vpm_st_wait", "mutex"};

// The names of write addresses 32..63. If a name is in both tables, it does not determine the
// file.
constexpr Table kWriteA{
    "r0", "r1", "r2", "r3", "tmu_noswap", "r5_quad", "host_int", "-",
    "uniforms_addr", "quad_x", "ms_flags", "tlb_stencil", "tlb_z", "tlb_colour_ms",
    "tlb_colour_all", "tlb_alpha_mask",
    "vpm", "vpm_rd_setup", "vpm_ld_addr", "mutex", "sfu_recip", "sfu_recipsqrt", "sfu_exp",
    "sfu_log",
    "tmu0_s", "tmu0_t", "tmu0_r", "tmu0_b", "tmu1_s", "tmu1_t", "tmu1_r", "tmu1_b"};
constexpr Table kWriteB{
    "r0", "r1", "r2", "r3", "tmu_noswap", "r5_all", "host_int", "-",
    "uniforms_addr", "quad_y", "rev_flag", "tlb_stencil", "tlb_z", "tlb_colour_ms",
    "tlb_colour_all", "tlb_alpha_mask",
    "vpm", "vpm_wr_setup", "vpm_st_addr", "mutex", "sfu_recip", "sfu_recipsqrt", "sfu_exp",
    "sfu_log",
    "tmu0_s", "tmu0_t", "tmu0_r", "tmu0_b", "tmu1_s", "tmu1_t", "tmu1_r", "tmu1_b"};

constexpr std::array<std::string_view, 5> kLoads{"", "", "ldi", "ldis", "ldiu"};

std::string_view inTable(const Table& table, std::uint8_t number) {
  return table.at(number - kFirst);
}

// Parses a decimal number of at most two digits, without a sign or leading zeros.
std::optional<std::uint8_t> decimal(std::string_view digits) {
  if (digits.empty() || digits.size() > 2) return {};
  if (digits.size() == 2 && digits[0] == '0') return {};
  unsigned value = 0;
  for (const char c : digits) {
    if (c < '0' || c > '9') return {};
    value = value * 10 + static_cast<unsigned>(c - '0');
  }
  return static_cast<std::uint8_t>(value);
}

// Parses "ra0".."rb31". A register has the same name as a read address and as a write address.
std::optional<Address> fileRegister(std::string_view name) {
  if (name.size() < 3 || name[0] != 'r' || (name[1] != 'a' && name[1] != 'b')) return {};
  const auto number = decimal(name.substr(2));
  if (!number || *number >= kFirst) return {};
  return Address{*number, name[1] == 'a' ? File::A : File::B};
}

std::optional<Address> inTables(const Table& a, const Table& b, std::string_view name) {
  const auto inA = find(a, name);
  const auto inB = find(b, name);
  if (!inA && !inB) return {};
  const std::size_t index = inA ? *inA : *inB;
  Address found;
  found.number = static_cast<std::uint8_t>(kFirst + index);
  if (!inA || !inB) found.file = inA ? File::A : File::B;
  return found;
}

}  // namespace

std::string_view load(Form form) { return kLoads.at(static_cast<std::size_t>(form)); }

std::optional<Form> loadForm(std::string_view name) {
  const auto index = find(kLoads, name);
  if (!index) return {};
  return static_cast<Form>(*index);
}

std::string readName(File file, std::uint8_t number) {
  const bool a = file == File::A;
  if (number < kFirst) return (a ? "ra" : "rb") + std::to_string(number);
  const std::string_view name = inTable(a ? kReadA : kReadB, number);
  if (name.empty()) return (a ? "a" : "b") + std::to_string(number);
  const bool both = inTable(kReadA, number) == inTable(kReadB, number);
  return std::string(name) + (both && !a ? ".b" : "");
}

std::optional<Address> readAddress(std::string_view name) {
  if (const auto r = fileRegister(name)) return r;
  if (const auto found = inTables(kReadA, kReadB, name)) return found;
  if (name.empty() || (name[0] != 'a' && name[0] != 'b')) return {};
  const auto number = decimal(name.substr(1));
  if (!number || *number < kFirst || *number > 63) return {};
  // An address that has a name must be written by its name.
  if (!inTable(kReadA, *number).empty()) return {};
  return Address{*number, name[0] == 'a' ? File::A : File::B};
}

std::string writeName(File file, std::uint8_t number) {
  const bool a = file == File::A;
  if (number < kFirst) return (a ? "ra" : "rb") + std::to_string(number);
  return std::string(inTable(a ? kWriteA : kWriteB, number));
}

bool isSided(std::uint8_t writeAddress) {
  return writeAddress < kFirst || inTable(kWriteA, writeAddress) != inTable(kWriteB, writeAddress);
}

std::optional<Address> writeAddress(std::string_view name) {
  if (const auto r = fileRegister(name)) return r;
  return inTables(kWriteA, kWriteB, name);
}

std::string immediate(std::uint8_t code) {
  if (code >= 32 && code < 48) return std::string(kFloats.at(code - 32U));
  return std::to_string(static_cast<std::int32_t>(smallImmediate(code)));
}

}  // namespace qpu::isa::names
