#include "tools/calibrate/provenance.hpp"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iomanip>
#include <iterator>
#include <sstream>

namespace qpu::calibrate {
namespace {

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file.is_open()) return {};
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Reads a string from the device tree without its terminating NUL.
std::string text(const std::string& path) {
  std::string found = read(path);
  while (!found.empty() && found.back() == '\0') found.pop_back();
  return found;
}

bool contains(const std::string& all, const char* part) {
  return all.find(part) != std::string::npos;
}

std::string boardOf(const std::string& model, const std::string& compatible) {
  if (contains(model, "Zero 2")) return "zero2";
  if (contains(compatible, "bcm2836") || contains(model, "Raspberry Pi 2")) return "pi2";
  if (contains(compatible, "bcm2837")) return "pi3";
  if (contains(model, "Zero")) return "zero";
  if (contains(compatible, "bcm2835")) return "pi1";
  return {};
}

std::string hex(const std::string& bytes) {
  std::ostringstream all;
  all << std::hex << std::setfill('0');
  for (const char c : bytes) all << std::setw(2) << +static_cast<unsigned char>(c);
  return all.str();
}

bool isBlank(const std::string& all, char zero) {
  return std::all_of(all.begin(), all.end(), [zero](char c) { return c == zero; });
}

}  // namespace

Provenance provenance(const std::string& backend, const std::string& tree) {
  if (backend == "emulator") {
    // NOLINTNEXTLINE(concurrency-mt-unsafe): only read
    const char* const board = std::getenv("QPU_BOARD");
    const std::string named = board == nullptr || *board == '\0' ? "pi3" : board;
    return {Source::Emulator, named,
            "emulator: the parameters of its own model; not measured on hardware"};
  }
  const std::string model = text(tree + "/model");
  const std::string compatible = read(tree + "/compatible");
  const std::string revision = read(tree + "/system/linux,revision");
  const std::string serial = text(tree + "/serial-number");
  Provenance p;
  p.board = boardOf(model, compatible);
  if (model.rfind("Raspberry Pi", 0) != 0 || contains(compatible, "virt") ||
      contains(compatible, "qemu")) {
    p.text = "unverified, not counted as measured on hardware: the model in the device tree is not "
             "a Raspberry Pi but '" + model + "'";
  } else if (isBlank(revision, '\0') || isBlank(serial, '0')) {
    p.text = "unverified, not counted as measured on hardware: " + model + ", without the " +
             (isBlank(revision, '\0') ? "revision code" : "serial number") +
             " that the firmware of a Raspberry Pi writes";
  } else {
    p.source = Source::Hardware;
    p.text = "measured on hardware: " + model + ", revision " + hex(revision) + ", by " + backend;
  }
  return p;
}

}  // namespace qpu::calibrate
