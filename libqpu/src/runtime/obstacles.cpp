#include "runtime/obstacles.hpp"

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "error_facts.hpp"

namespace qpu::runtime {
namespace {

// If the GPU has less memory than this limit, the board runs the cut-down firmware, which does not
// support the tags for the QPUs.
constexpr int kLeastGpuMemoryMib = 32;

constexpr const char* kJoinVideo = "add the user to group video and log in again";
constexpr const char* kNeedsPiKernel = "boot a Raspberry Pi kernel; others lack the vcio driver";

std::string reason(int error) { return std::generic_category().message(error); }

void checkNode(const System& system, const std::string& path, const char* missing,
               const char* refused, std::vector<Obstacle>& found) {
  const Node* const node = system.node(path);
  if (node == nullptr || !node->present)
    found.push_back({path + " is missing", missing});
  else if (!node->readable || !node->writable)
    found.push_back(
        {path + " (" + node->mode + " " + node->owner + ") is not accessible to this user", refused});
}

const Node* renderNode(const System& system) {
  const auto found =
      std::find_if(system.nodes.begin(), system.nodes.end(), [](const Node& n) {
        return n.present && n.path.rfind("/dev/dri/renderD", 0) == 0;
      });
  return found == system.nodes.end() ? nullptr : &*found;
}

std::string kmsFix(const System& system) {
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
             "use a Raspberry Pi 1, 2, 3 or Zero; on this machine kernels run on the interpreter"}};
  std::vector<Obstacle> found;
  if (system.kms == Kms::Full || system.kms == Kms::Fake)
    found.push_back({std::string("the ") + name(system.kms) +
                         " KMS driver owns V3D, so the firmware refuses to enable the QPUs (" +
                         system.kmsEvidence + ")",
                     kmsFix(system)});
  else if (const Node* const render = renderNode(system))
    found.push_back({render->path + " indicates that a kernel driver might own V3D; a launch while "
                                    "this driver uses V3D can hang the GPU",
                     "disable the KMS driver and reboot, or unload the vc4 module"});
  if (system.gpuMemoryMib && *system.gpuMemoryMib < kLeastGpuMemoryMib)
    found.push_back({"the GPU has " + std::to_string(*system.gpuMemoryMib) +
                         " MiB; with this size, a cut-down firmware is loaded that does not support the QPUs",
                     "set gpu_mem=64 in config.txt (128 for large arrays) and reboot"});
  checkNode(system, "/dev/vcio", kNeedsPiKernel, kJoinVideo, found);
  checkNode(system, "/dev/mem", "create it with: mknod -m 640 /dev/mem c 1 1",
            "run as root: access to GPU memory and V3D's registers requires it", found);
  return found;
}

std::string text(const Obstacle& obstacle) { return obstacle.what + "; " + obstacle.fix; }

void raiseObstacle(const Obstacle& obstacle) { detail::raise<BackendError>(text(obstacle)); }

Obstacle cannotOpen(const std::string& path, int error) {
  const bool vcio = path == "/dev/vcio";
  std::string fix = "run as root";
  if (error == ENOENT || error == ENXIO || error == ENODEV)
    fix = vcio ? kNeedsPiKernel : "create it with: mknod -m 640 " + path + " c 1 1";
  else if (vcio && (error == EACCES || error == EPERM))
    fix = kJoinVideo;
  return {"cannot open " + path + ": " + reason(error), fix};
}

Obstacle cannotMap(const std::string& what, int error) {
  const bool refused = error == EPERM || error == EACCES;
  return {"cannot map " + what + " through /dev/mem: " + reason(error),
          refused ? "run as root; if the kernel also refuses root, add iomem=relaxed to "
                    "cmdline.txt of the boot partition and reboot"
                  : "close programs that use a lot of memory"};
}

Obstacle mailboxFails(std::uint32_t tag, int error) {
  const std::string what =
      "the property call " + detail::hex(tag) + " through /dev/vcio fails: " + reason(error);
  switch (error) {
    case ENOTTY:
    case EINVAL: return {what, "/dev/vcio does not belong to a Raspberry Pi kernel; boot a Raspberry Pi kernel"};
    case EPERM:
    case EACCES: return {what, "use the unrestricted /dev/vcio; run as root or as a member of group video"};
    case ETIMEDOUT: return {what, "the firmware hangs; reboot"};
    default: return {what, "reboot; if the error persists, update the firmware"};
  }
}

Obstacle tagRefused(std::uint32_t tag, std::uint32_t code) {
  return {"the firmware does not support the property tag " + detail::hex(tag) +
              " (its response is " + detail::hex(code) + ")",
          "update the firmware; gpu_mem=16 loads a cut-down firmware, so set gpu_mem=64 in "
          "config.txt and reboot"};
}

Obstacle enableRefused(const System& system) {
  const std::string what = "the firmware refuses to enable the QPUs";
  if (system.kms == Kms::Full || system.kms == Kms::Fake)
    return {what + ": the " + name(system.kms) + " KMS driver owns V3D", kmsFix(system)};
  if (system.gpuMemoryMib && *system.gpuMemoryMib < kLeastGpuMemoryMib)
    return {what + ": the GPU has " + std::to_string(*system.gpuMemoryMib) + " MiB",
            "set gpu_mem=64 in config.txt (128 for large arrays) and reboot"};
  return {what,
          "end other programs that use the QPUs; if there are none, disable dtoverlay=vc4-kms-v3d "
          "and dtoverlay=vc4-fkms-v3d, set gpu_mem=64 in config.txt, update the firmware and reboot"};
}

Obstacle noV3d(std::uint32_t ident) {
  return {"V3D's identification is " + detail::hex(ident) + ", but should be " +
              detail::hex(0x02443356) + " for a VideoCore IV: V3D is powered off or missing",
          "reboot; if the error persists, set QPU_BACKEND=vc4-mailbox"};
}

Obstacle v3dBusy(const std::string& registers) {
  return {"V3D is running a 3D job of another program (" + registers + ")",
          "end programs that draw with OpenGL ES, and disable the KMS driver"};
}

Obstacle outOfGpuMemory(std::uint32_t bytes, const System& system) {
  const std::string split =
      system.gpuMemoryMib ? " of " + std::to_string(*system.gpuMemoryMib) + " MiB" : "";
  return {"the GPU memory" + split + " has no room for " + std::to_string(bytes) + " bytes",
          "release arrays, or raise gpu_mem in config.txt and reboot; memory of crashed programs "
          "is released when the next program with libqpu starts, or by a reboot"};
}

Obstacle wrongMapping(std::uint32_t bus, std::uint32_t physical) {
  return {"memory at bus address " + detail::hex(bus) + " differs from what the CPU reads at " +
              detail::hex(physical),
          "report the board with the output of qpu-info, and set QPU_BACKEND=interpreter to run "
          "kernels"};
}

}  // namespace qpu::runtime
