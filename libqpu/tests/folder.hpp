#ifndef TESTS_FOLDER_HPP
#define TESTS_FOLDER_HPP

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace test {

// A temporary folder, which is removed with its contents when the object is destroyed.
struct Folder {
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "qpu-test-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot create " + pattern);
    path = pattern;
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    std::filesystem::remove_all(path);
  }

  // Writes a file and returns its path. Creates the parent folders of the file.
  std::string write(const std::string& name, const std::string& text) const {
    const std::filesystem::path full = path / name;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full, std::ios::binary) << text;
    return full.string();
  }
  std::string read(const std::string& name) const {
    std::ostringstream text;
    text << std::ifstream(path / name, std::ios::binary).rdbuf();
    return text.str();
  }
  std::vector<std::filesystem::path> files() const {
    std::vector<std::filesystem::path> all;
    for (const auto& f : std::filesystem::directory_iterator(path)) all.push_back(f.path());
    return all;
  }

  std::filesystem::path path;
};

}  // namespace test

#endif
