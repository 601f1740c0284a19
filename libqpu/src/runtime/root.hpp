// Access to the system's files below a root directory. The root directory is "/" or, in a test, a
// directory with copies of the files.
#ifndef QPU_SRC_RUNTIME_ROOT_HPP
#define QPU_SRC_RUNTIME_ROOT_HPP

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace qpu::runtime {

class Root {
 public:
  explicit Root(std::filesystem::path directory) : directory_(std::move(directory)) {}

  // Converts an absolute path on the board to a path below the root directory.
  std::filesystem::path operator()(const std::string& path) const {
    return directory_ / std::filesystem::path(path).relative_path();
  }
  bool isLive() const { return directory_ == "/"; }
  bool exists(const std::string& path) const;
  // Returns std::nullopt if the file cannot be read.
  std::optional<std::string> read(const std::string& path) const;
  // Returns the sorted names of the entries in a directory, or an empty list if the directory
  // does not exist.
  std::vector<std::string> list(const std::string& path) const;

 private:
  std::filesystem::path directory_;
};

// Splits a string list from the device tree, in which each string ends with NUL.
std::vector<std::string> splitNul(const std::string& text);

}  // namespace qpu::runtime

#endif
