// The operating-system resources that libqpu needs: device nodes, the display driver and GPU
// memory.
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
  std::string mode;   // such as "crw-rw----"
  std::string owner;  // such as "root:video"; contains numbers if there are no names
  bool readable = false;  // true if the calling user can read the node
  bool writable = false;
};

// If the kernel mode-setting driver is enabled, it owns the V3D block. Firmware released since
// October 2016 then does not run QPU programs.
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
  std::vector<Setting> kmsSettings;      // the dtoverlay lines in config.txt that enable KMS
  std::optional<Setting> gpuMemSetting;  // the gpu_mem line in config.txt
  std::optional<int> gpuMemoryMib;       // the size that the firmware reports
  std::string gpuMemorySource;           // where the size comes from, or why it is unknown

  const Node* node(const std::string& path) const;
};

// Queries the firmware through `os`, unless `os` is null.
System readSystem(const Root& root, Os* os);

}  // namespace qpu::runtime

#endif
