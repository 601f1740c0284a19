#include "runtime/root.hpp"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <system_error>

namespace qpu::runtime {

bool Root::exists(const std::string& path) const {
  std::error_code none;
  return std::filesystem::exists((*this)(path), none);
}

std::optional<std::string> Root::read(const std::string& path) const {
  std::ifstream file((*this)(path), std::ios::binary);
  if (!file) return std::nullopt;
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (file.bad()) return std::nullopt;
  return text;
}

std::vector<std::string> Root::list(const std::string& path) const {
  std::vector<std::string> names;
  std::error_code failed;
  std::filesystem::directory_iterator entry((*this)(path), failed);
  for (; !failed && entry != std::filesystem::directory_iterator(); entry.increment(failed))
    names.push_back(entry->path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> splitNul(const std::string& text) {
  std::vector<std::string> parts;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\0', at), text.size());
    parts.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

}  // namespace qpu::runtime
