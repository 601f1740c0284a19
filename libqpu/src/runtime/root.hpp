// Files of the system under a root directory, "/" or a copy made for a test.
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

  // `path` is absolute, as on the board.
  std::filesystem::path operator()(const std::string& path) const {
    return directory_ / std::filesystem::path(path).relative_path();
  }
  bool isLive() const { return directory_ == "/"; }
  bool exists(const std::string& path) const;
  // Nothing when the file cannot be read.
  std::optional<std::string> read(const std::string& path) const;
  // Names in a directory in order, empty when there is none.
  std::vector<std::string> list(const std::string& path) const;

 private:
  std::filesystem::path directory_;
};

// The parts of a device-tree string list; NUL ends each.
std::vector<std::string> splitNul(const std::string& text);

}  // namespace qpu::runtime

#endif
