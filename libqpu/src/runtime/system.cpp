#include "runtime/system.hpp"

#include <algorithm>
#include <array>
#include <grp.h>
#include <pwd.h>
#include <sstream>
#include <sys/stat.h>
#include <unistd.h>

#include "qpu/error.h"
#include "runtime/mailbox.hpp"

namespace qpu::runtime {
namespace {

std::string modeText(mode_t mode) {
  std::string text = "?rwxrwxrwx";
  text[0] = S_ISCHR(mode) ? 'c' : S_ISBLK(mode) ? 'b' : S_ISDIR(mode) ? 'd' : '-';
  for (std::size_t i = 0; i < 9; ++i)
    if ((mode & (0400U >> i)) == 0) text[i + 1] = '-';
  return text;
}

// These functions are called once per process, or by qpu-info, which has a single thread.
// NOLINTBEGIN(concurrency-mt-unsafe)
std::string userName(uid_t uid) {
  const passwd* const entry = getpwuid(uid);
  return entry != nullptr ? entry->pw_name : std::to_string(uid);
}
std::string groupName(gid_t gid) {
  const group* const entry = getgrgid(gid);
  return entry != nullptr ? entry->gr_name : std::to_string(gid);
}
// NOLINTEND(concurrency-mt-unsafe)

Node readNode(const Root& root, const std::string& path) {
  Node n;
  n.path = path;
  const std::string real = root(path).string();
  struct stat s {};
  if (stat(real.c_str(), &s) != 0) return n;
  n.present = true;
  n.mode = modeText(s.st_mode);
  n.owner = userName(s.st_uid) + ":" + groupName(s.st_gid);
  n.readable = access(real.c_str(), R_OK) == 0;
  n.writable = access(real.c_str(), W_OK) == 0;
  return n;
}

std::vector<Node> readNodes(const Root& root) {
  std::vector<Node> nodes;
  for (const char* path : {"/dev/vcio", "/dev/mem", "/dev/gpiomem"})
    nodes.push_back(readNode(root, path));
  for (const std::string& name : root.list("/dev/dri"))
    if (name.rfind("card", 0) == 0 || name.rfind("renderD", 0) == 0)
      nodes.push_back(readNode(root, "/dev/dri/" + name));
  return nodes;
}

// Returns true if the status of a device-tree node is "okay". A node without a status is also
// enabled.
bool isEnabled(const Root& root, const std::string& node) {
  const auto parts = splitNul(root.read(node + "/status").value_or(""));
  return parts.empty() || parts.front() == "okay" || parts.front() == "ok";
}

void readKms(const Root& root, System& s) {
  const std::string soc = "/proc/device-tree/soc";
  if (!root.exists(soc)) {
    s.kmsEvidence = "no device tree";
    return;
  }
  s.kms = Kms::Off;
  s.kmsEvidence = "no v3d or firmwarekms node of the device tree is enabled";
  for (const std::string& name : root.list(soc)) {
    const std::string node = std::string(soc).append("/").append(name);
    const bool fake = name.rfind("firmwarekms@", 0) == 0;
    const bool v3d = name.rfind("v3d@", 0) == 0;
    if ((!fake && !v3d) || !isEnabled(root, node)) continue;
    // Fake KMS also enables the v3d node. Only the firmwarekms node distinguishes fake KMS from
    // full KMS.
    if (s.kms == Kms::Fake) continue;
    s.kms = fake ? Kms::Fake : Kms::Full;
    s.kmsEvidence = node + " is enabled";
  }
}

std::string trimmed(const std::string& line) {
  const auto first = line.find_first_not_of(" \t\r");
  if (first == std::string::npos) return {};
  return line.substr(first, line.find_last_not_of(" \t\r") - first + 1);
}

void readConfig(const Root& root, System& s) {
  for (const char* file : {"/boot/firmware/config.txt", "/boot/config.txt"}) {
    const auto text = root.read(file);
    if (!text) continue;
    std::istringstream lines(*text);
    int number = 0;
    for (std::string raw; std::getline(lines, raw);) {
      const Setting setting{file, ++number, trimmed(raw)};
      if (setting.text.rfind("dtoverlay=vc4-kms-v3d", 0) == 0 ||
          setting.text.rfind("dtoverlay=vc4-fkms-v3d", 0) == 0)
        s.kmsSettings.push_back(setting);
      if (setting.text.rfind("gpu_mem=", 0) == 0) s.gpuMemSetting = setting;
    }
    return;  // if both files exist, the file in /boot is no longer used
  }
}

void readGpuMemory(Os* os, System& s) {
  const Node* const vcio = s.node("/dev/vcio");
  if (vcio == nullptr || !vcio->present) {
    s.gpuMemorySource = "unknown: /dev/vcio is missing";
    return;
  }
  if (os == nullptr) {
    s.gpuMemorySource = "unknown: the firmware is queried only if the root is /";
    return;
  }
  try {
    s.gpuMemoryMib = static_cast<int>(Mailbox(*os).vcMemory().bytes >> 20U);
    s.gpuMemorySource = "firmware, mailbox tag 0x00010006";
  } catch (const Error& e) {
    s.gpuMemorySource = std::string("unknown: ") + e.what();
  }
}

}  // namespace

const char* name(Kms kms) {
  switch (kms) {
    case Kms::Off: return "off";
    case Kms::Full: return "full";
    case Kms::Fake: return "fake";
    case Kms::Unknown: break;
  }
  return "unknown";
}

const Node* System::node(const std::string& path) const {
  const auto found = std::find_if(nodes.begin(), nodes.end(),
                                  [&path](const Node& n) { return n.path == path; });
  return found == nodes.end() ? nullptr : &*found;
}

System readSystem(const Root& root, Os* os) {
  System s;
  s.nodes = readNodes(root);
  readKms(root, s);
  readConfig(root, s);
  readGpuMemory(os, s);
  return s;
}

}  // namespace qpu::runtime
