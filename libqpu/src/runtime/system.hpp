// Resources of the operating system: device nodes, display driver, GPU memory.
#ifndef QPU_SRC_RUNTIME_SYSTEM_HPP
#define QPU_SRC_RUNTIME_SYSTEM_HPP

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/os.hpp"
#include "runtime/root.hpp"

namespace qpu::runtime {

struct Node {
  std::string path;
  bool present = false;
  std::string mode;   // "crw-rw----"
  std::string owner;  // "root:video"; numbers if there are no names
  bool readable = false;  // by the calling user
  bool writable = false;
};

// The kernel mode-setting driver, if enabled, owns the V3D block. Firmware released since October
// 2016 then refuses to run QPU programs.
enum class Kms : std::uint8_t { Off, Full, Fake, Unknown };
const char* name(Kms kms);

struct Setting {
  std::string file;
  int line = 0;
  std::string text;
};

struct System {
  std::vector<Node> nodes;  // /dev/vcio, /dev/mem, /dev/gpiomem, /dev/dri/*
  Kms kms = Kms::Unknown;
  std::string kmsEvidence;
  std::vector<Setting> kmsSettings;      // dtoverlay lines of config.txt that enable it
  std::optional<Setting> gpuMemSetting;  // gpu_mem line of config.txt
  std::optional<int> gpuMemoryMib;       // size that the firmware reports
  std::string gpuMemorySource;           // source of the number, or why it is unknown

  const Node* node(const std::string& path) const;
};

// The firmware is queried through `os` unless it is null.
System readSystem(const Root& root, Os* os);

}  // namespace qpu::runtime

#endif
