#include "tools/calibrate/calibrate.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <memory>
#include <ostream>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <system_error>

namespace qpu::calibrate {
namespace {

constexpr const char* kHelp =
    "usage: qpu-calibrate [--output FILE]\n"
    "       qpu-calibrate --parameters\n"
    "\n"
    "Run ten measurements on this Raspberry Pi's QPUs to determine the parameters of the\n"
    "emulator's cycle model, and write the results in the format of a QPU_MODEL file.\n"
    "With QPU_BACKEND=emulator, read the model's own parameters back; the file is then\n"
    "marked as not measured on hardware.\n"
    "\n"
    "  --output FILE  write to FILE instead of standard output\n"
    "  --parameters   print the parameters in use (QPU_BOARD, QPU_MODEL), each with its\n"
    "                 range and source\n"
    "  --version      print the version of libqpu\n"
    "  --help         print this text\n";

constexpr const char* kDeviceTree = "/proc/device-tree";

int wrongUse(const Streams& s, const std::string& problem) {
  s.errors << "qpu-calibrate: " << problem << "; see qpu-calibrate --help\n";
  return 2;
}

int print(const Streams& s, const std::string& text) {
  s.out << text << std::flush;
  if (s.out) return 0;
  s.errors << "qpu-calibrate: cannot write to standard output\n";
  return 1;
}

// Writes a temporary file and renames it, so that `path` is never an incomplete file.
void write(const std::string& path, const std::string& text) {
  const std::string temporary = path + ".new";
  std::error_code error;
  {
    std::ofstream file(temporary);
    file << text << std::flush;
    if (!file) error = std::make_error_code(std::errc::io_error);
  }
  if (!error) std::filesystem::rename(temporary, path, error);
  if (!error) return;
  std::error_code ignored;
  std::filesystem::remove(temporary, ignored);
  throw std::runtime_error("cannot write " + path +
                           "; check that its folder exists, is writable and has free space");
}

std::string oneLine(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

std::string parameters() {
  const std::unique_ptr<char, void (*)(void*)> text(qpu_model_parameters(), qpu_free);
  if (!text) throw std::runtime_error(qpu_last_error());
  return text.get();
}

int calibrate(const Streams& s, const std::string& output) {
  Bench bench;
  const Provenance from = provenance(bench.backend(), kDeviceTree);
  s.errors << "qpu-calibrate: " << from.text << "\n";
  const std::vector<Measured> all = measureAll(bench, [&s](int number) {
    s.errors << number << " of " << kMeasurements << ": " << title(number) << "\n" << std::flush;
  });
  const std::string file = modelFile(from, all);
  if (output.empty()) return print(s, file);
  write(output, file);
  s.errors << "wrote " << output << "; set QPU_MODEL=" << output << " to use it on the emulator\n";
  return 0;
}

}  // namespace

std::string modelFile(const Provenance& from, const std::vector<Measured>& all) {
  std::ostringstream text;
  text << "# Parameters of the emulator's cycle model, for QPU_MODEL. Written by qpu-calibrate of libqpu "
       << qpu_version() << ".\nsource = " << oneLine(from.text) << "\n";
  if (!from.board.empty()) text << "board = " << from.board << "\n";
  int number = 0;
  for (const Measured& m : all) {
    if (m.measurement != number) {
      number = m.measurement;
      text << "\n# " << number << ": " << title(number);
      if (m.spread > 0)
        text << "; repetitions differ by " << std::setprecision(2) << 100 * m.spread << " %";
      text << "\n";
    }
    if (m.missing.empty())
      text << m.parameter << " = " << std::setprecision(6) << m.value << "\n";
    else
      text << "# " << m.parameter << " not determined: " << oneLine(m.missing) << "\n";
  }
  return text.str();
}

int run(const std::vector<std::string>& arguments, const Streams& s) {
  std::string output;
  bool list = false;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& a = arguments[i];
    if (a == "--help") return print(s, kHelp);
    if (a == "--version") return print(s, std::string(qpu_version()) + "\n");
    if (a == "--parameters") {
      list = true;
    } else if (a == "--output") {
      if (++i == arguments.size() || arguments[i].empty())
        return wrongUse(s, "--output needs a file");
      output = arguments[i];
    } else {
      return wrongUse(s, "unknown argument '" + a + "'");
    }
  }
  if (list && !output.empty()) return wrongUse(s, "--output cannot be used with --parameters");
  try {
    return list ? print(s, parameters()) : calibrate(s, output);
  } catch (const std::exception& e) {
    s.errors << "qpu-calibrate: " << e.what() << "\n";
    return 1;
  }
}

}  // namespace qpu::calibrate
