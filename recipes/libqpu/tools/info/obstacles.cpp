#include <algorithm>

#include "tools/info/report.hpp"

namespace qpu::info {
namespace {

// Below this, firmware is a cut-down build without QPU tags.
constexpr int kLeastGpuMemoryMib = 32;

void checkNode(const System& system, const std::string& path, const char* missing,
               const char* refused, std::vector<Obstacle>& found) {
  const Node* const node = system.node(path);
  if (node == nullptr || !node->present)
    found.push_back({path + " is missing", missing});
  else if (!node->readable || !node->writable)
    found.push_back(
        {path + " (" + node->mode + " " + node->owner + ") is closed to this user", refused});
}

const Node* renderNode(const System& system) {
  const auto found =
      std::find_if(system.nodes.begin(), system.nodes.end(), [](const Node& n) {
        return n.present && n.path.rfind("/dev/dri/renderD", 0) == 0;
      });
  return found == system.nodes.end() ? nullptr : &*found;
}

std::string kmsMend(const System& system) {
  if (system.kmsSettings.empty())
    return "comment out dtoverlay=vc4-kms-v3d and dtoverlay=vc4-fkms-v3d in config.txt of the "
           "boot partition and reboot";
  std::string text = "comment out ";
  for (const Setting& s : system.kmsSettings)
    text += (&s == &system.kmsSettings.front() ? "" : " and ") + s.text + " (" + s.file +
            " line " + std::to_string(s.line) + ")";
  return text + " and reboot";
}

}  // namespace

std::vector<Obstacle> obstacles(const Board& board, const System& system) {
  if (board.soc != Soc::Suitable)
    return {{board.verdict,
             "use a Raspberry Pi 1, 2, 3 or Zero; kernels run here on the interpreter"}};
  std::vector<Obstacle> found;
  if (system.kms == Kms::Full || system.kms == Kms::Fake)
    found.push_back({std::string("the ") + name(system.kms) +
                         " KMS driver owns V3D, so firmware refuses to enable the QPUs (" +
                         system.kmsEvidence + ")",
                     kmsMend(system)});
  else if (const Node* const render = renderNode(system))
    found.push_back({render->path + " shows that a kernel driver may own V3D; a launch beside it "
                                    "can hang the GPU",
                     "turn the KMS driver off and reboot, or unload the vc4 module"});
  if (system.gpuMemoryMib && *system.gpuMemoryMib < kLeastGpuMemoryMib)
    found.push_back({"the GPU has " + std::to_string(*system.gpuMemoryMib) +
                         " MiB, for which cut-down firmware without QPU support is loaded",
                     "set gpu_mem=64 in config.txt (128 for large arrays) and reboot"});
  checkNode(system, "/dev/vcio", "boot a Raspberry Pi kernel; others lack the vcio driver",
            "add the user to group video and log in again", found);
  checkNode(system, "/dev/mem", "make it with: mknod -m 640 /dev/mem c 1 1",
            "run as root, or choose QPU_BACKEND=vc4-mailbox where that is built", found);
  found.push_back({"this build of libqpu has no hardware backend",
                   "kernels run on the interpreter; install a libqpu with vc4-mailbox or "
                   "vc4-registers"});
  return found;
}

}  // namespace qpu::info
