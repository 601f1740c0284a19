// The names in assembly text. The tables are indexed by the numbers in the encoding. A number
// without a name has an empty entry.
#ifndef QPU_SRC_ISA_NAMES_HPP
#define QPU_SRC_ISA_NAMES_HPP

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "isa/instruction.hpp"

namespace qpu::isa::names {

constexpr std::array<std::string_view, 32> kAddOps{
    "nop", "fadd", "fsub", "fmin", "fmax", "fminabs", "fmaxabs", "ftoi", "itof", "",   "",
    "",    "add",  "sub",  "shr",  "asr",  "ror",     "shl",     "min",  "max",  "and", "or",
    "xor", "not",  "clz",  "",     "",     "",        "",        "",     "v8adds", "v8subs"};

constexpr std::array<std::string_view, 8> kMulOps{"nop",   "fmul",  "mul24",  "v8muld",
                                                  "v8min", "v8max", "v8adds", "v8subs"};

// The mnemonic for `or x, x` in the ADD pipe and `v8min x, x` in the MUL pipe.
constexpr std::string_view kMove = "mov";

constexpr std::array<std::string_view, 8> kConds{"never", "", "zs", "zc", "ns", "nc", "cs", "cc"};

constexpr std::array<std::string_view, 16> kBranchConds{
    "allzs", "allzc", "anyzs", "anyzc", "allns", "allnc", "anyns", "anync",
    "allcs", "allcc", "anycs", "anycc", "",      "",      "",      ""};

// A signal that selects an instruction form has no name.
constexpr std::array<std::string_view, 16> kSignals{
    "bkpt",  "",       "thrsw",  "thrend", "sbwait", "sbdone", "lthrsw", "loadcv",
    "loadc", "ldcend", "ldtmu0", "ldtmu1", "loadam", "",       "",       ""};

constexpr std::array<std::string_view, 8> kUnpacks{"",   "16a", "16b", "8dr",
                                                   "8a", "8b",  "8c",  "8d"};

// Packs of results for file A, which are valid if pm = 0. "s" means that the value saturates.
constexpr std::array<std::string_view, 16> kPacks{
    "",  "16a",  "16b",  "8abcd",  "8a",  "8b",  "8c",  "8d",
    "s", "16as", "16bs", "8abcds", "8as", "8bs", "8cs", "8ds"};

// Packs of the MUL result from float to colour, which are valid if pm = 1.
constexpr std::array<std::string_view, 16> kColourPacks{
    "", "", "", "c8abcd", "c8a", "c8b", "c8c", "c8d", "", "", "", "", "", "", "", ""};

constexpr std::array<std::string_view, 16> kFloats{
    "1.0",        "2.0",       "4.0",      "8.0",     "16.0",   "32.0",  "64.0", "128.0",
    "0.00390625", "0.0078125", "0.015625", "0.03125", "0.0625", "0.125", "0.25", "0.5"};

constexpr std::string_view kSetFlags = "sf";
constexpr std::string_view kRotate = "rot";        // followed by 1..15 or kRotateByR5
constexpr std::string_view kRotateByR5 = "r5";
constexpr std::string_view kRelative = "brr", kAbsolute = "bra";
constexpr std::string_view kAcquire = "sacq", kRelease = "srel";
constexpr std::string_view kRead = "read", kLink = "link", kSwap = "ws", kWith = "with",
                           kWord = ".word";
constexpr std::string_view kNowhere = "-";

enum class File : std::uint8_t { A, B };

struct Address {
  std::uint8_t number = 0;
  std::optional<File> file;  // no value if the name is the same in both files
};

// load() returns the mnemonic for a load of this form. loadForm() returns the form for a
// mnemonic.
std::string_view load(Form form);
std::optional<Form> loadForm(std::string_view name);

// Returns a name such as "ra1", "uniform", "uniform.b" or "vpm_st_wait", or "a33" for an address
// without a name.
std::string readName(File file, std::uint8_t number);

// The inverse of readName(). Accepts names without ".b". If both files have the name, the result
// does not specify a file.
std::optional<Address> readAddress(std::string_view name);

// Returns a name such as "rb1", "r5_all", "tmu0_s" or "-".
std::string writeName(File file, std::uint8_t number);
bool isSided(std::uint8_t writeAddress);  // returns true if the name depends on the file
std::optional<Address> writeAddress(std::string_view name);

// Returns a small immediate in the form of an operand.
std::string immediate(std::uint8_t code);

template <std::size_t N>
std::optional<std::uint8_t> find(const std::array<std::string_view, N>& table,
                                 std::string_view name) {
  if (name.empty()) return {};
  for (std::size_t n = 0; n < N; ++n)
    if (table[n] == name) return static_cast<std::uint8_t>(n);
  return {};
}

}  // namespace qpu::isa::names

#endif
