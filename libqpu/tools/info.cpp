// qpu-info: prints the library's version, its backend, the board, and the obstacles to using the
// QPUs. Exit codes: 0 the report was printed, 1 error, 2 usage error.
#include <cstdio>
#include <exception>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "qpu.h"

namespace {

constexpr const char* kHelp =
    "usage: qpu-info [--json] [--root DIR]\n"
    "\n"
    "Print the version of libqpu, the backend that runs its kernels, and what prevents\n"
    "this machine from using its QPUs, with a fix for each problem.\n"
    "\n"
    "  --json      print one JSON object instead of text\n"
    "  --root DIR  read /proc, /sys, /dev and /boot below DIR\n"
    "  --version   print the version of libqpu\n"
    "  --help      print this text\n";

struct Options {
  bool json = false;
  std::string root = "/";
};

int wrongUse(const std::string& problem) {
  (void)std::fprintf(stderr, "qpu-info: %s; see qpu-info --help\n", problem.c_str());
  return 2;
}

int print(const std::string& text) {
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (written && std::fflush(stdout) == 0) return 0;
  (void)std::fputs("qpu-info: cannot write to standard output\n", stderr);
  return 1;
}

int report(const Options& options) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(options.root, ignored))
    return wrongUse("--root " + options.root + " is not a directory");
  const std::unique_ptr<char, void (*)(void*)> text(
      qpu_machine_report(options.root.c_str(), options.json ? 1 : 0), qpu_free);
  if (text) return print(text.get());
  (void)std::fprintf(stderr, "qpu-info: %s\n", qpu_last_error());
  return 1;
}

int run(const std::vector<std::string>& arguments) {
  Options options;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& a = arguments[i];
    if (a == "--help") return print(kHelp);
    if (a == "--version") return print(std::string(qpu_version()) + "\n");
    if (a == "--json") {
      options.json = true;
    } else if (a == "--root") {
      if (++i == arguments.size()) return wrongUse("--root needs a directory");
      options.root = arguments[i];
    } else if (a.rfind("--root=", 0) == 0) {
      options.root = a.substr(std::string_view("--root=").size());
    } else {
      return wrongUse("unknown argument '" + a + "'");
    }
  }
  return report(options);
}

}  // namespace

int main(int count, char** values) {
  try {
    return run({values + 1, values + count});
  } catch (const std::exception& e) {
    (void)std::fprintf(stderr, "qpu-info: %s\n", e.what());
    return 1;
  }
}
