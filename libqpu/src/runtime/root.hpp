// The system's files below a root directory: "/", or a copy for a test.
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

  // Converts an absolute path of the board to a path below the root.
  std::filesystem::path operator()(const std::string& path) const {
    return directory_ / std::filesystem::path(path).relative_path();
  }
  bool isLive() const { return directory_ == "/"; }
  bool exists(const std::string& path) const;
  // Returns no value if the file cannot be read.
  std::optional<std::string> read(const std::string& path) const;
  // The sorted names in a directory; empty if the directory does not exist.
  std::vector<std::string> list(const std::string& path) const;

 private:
  std::filesystem::path directory_;
};

// Splits a device-tree string list, whose strings end with NUL.
std::vector<std::string> splitNul(const std::string& text);

}  // namespace qpu::runtime

#endif
