// Facts about the board that the loader and compiled models use.
#ifndef PITORCH_ON_BOARD_HPP
#define PITORCH_ON_BOARD_HPP

#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

// The folder `name` in this user's cache, in which sessions keep files; empty if the folder cannot be created.
inline std::string keptFolder(const char *name) {
  const char *cache = std::getenv("XDG_CACHE_HOME");
  const char *home = std::getenv("HOME");
  std::string path = cache != nullptr && *cache == '/' ? cache : home != nullptr ? std::string(home) + "/.cache" : "";
  if (path.empty()) return "";
  (void)mkdir(path.c_str(), 0700);
  for (const char *part : {"pitorch", name}) {
    path += std::string("/") + part;
    if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return "";
  }
  return path;
}

// The peak memory of this process in bytes; 0 if unknown. ru_maxrss would include the program that started this one.
inline std::int64_t peakMemory() {
  std::int64_t kibibytes = 0;
  if (FILE *status = std::fopen("/proc/self/status", "r")) {
    std::array<char, 256> line{};
    while (std::fgets(line.data(), static_cast<int>(line.size()), status) != nullptr)
      if (std::strncmp(line.data(), "VmHWM:", 6) == 0) kibibytes = std::strtoll(line.data() + 6, nullptr, 10);
    (void)std::fclose(status);
  }
  return kibibytes * 1024;
}

#endif
