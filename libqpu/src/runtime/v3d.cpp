#include "runtime/v3d.hpp"

#include "error_facts.hpp"
#include "runtime/obstacles.hpp"

namespace qpu::runtime {
namespace {

constexpr std::uint32_t kV3dOffset = 0x00c00000;
constexpr std::uint32_t kOldestBase = 0x20000000;
constexpr std::uint32_t kScratchPattern = 0x5a17c0de;

std::uint32_t bigEndian(const std::string& bytes, std::size_t at) {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < 4; ++i)
    value = value << 8U | static_cast<unsigned char>(bytes[at + i]);
  return value;
}

}  // namespace

std::uint32_t peripheralBase(const Root& root) {
  const std::string ranges = root.read("/proc/device-tree/soc/ranges").value_or("");
  if (ranges.size() < 8) return kOldestBase;
  const std::uint32_t base = bigEndian(ranges, 4);
  return base == 0 && ranges.size() >= 12 ? bigEndian(ranges, 8) : base;
}

V3d::V3d(Os& os, int memory, std::uint32_t peripherals) : os_(os) {
  void* at = nullptr;
  const int failed = os.map(memory, v3d::kWindow, peripherals + kV3dOffset, &at);
  if (failed < 0)
    raiseObstacle(cannotMap("V3D's registers at " + detail::hex(peripherals + kV3dOffset),
                            -failed));
  window_ = static_cast<volatile std::uint32_t*>(at);
}

V3d::~V3d() { (void)os_.unmap(const_cast<std::uint32_t*>(window_), v3d::kWindow); }

void V3d::requirePower() {
  if (const std::uint32_t found = read(v3d::kIdent0); found != v3d::kIdent)
    raiseObstacle(noV3d(found));
  const std::uint32_t before = read(v3d::kScratch);
  write(v3d::kScratch, kScratchPattern);
  const std::uint32_t found = read(v3d::kScratch);
  write(v3d::kScratch, before);
  if (found != kScratchPattern)
    raiseObstacle({"V3D's scratch register reads " + detail::hex(found) + " after " +
                       detail::hex(kScratchPattern) + " was written",
                   "reboot; if the error persists, set QPU_BACKEND=vc4-mailbox"});
}

void V3d::requireIdle() const {
  const std::uint32_t list0 = read(v3d::kList0);
  const std::uint32_t list1 = read(v3d::kList1);
  if (((list0 | list1) & v3d::kListRunning) != 0)
    raiseObstacle(v3dBusy("CT0CS " + detail::hex(list0) + ", CT1CS " + detail::hex(list1)));
}

bool V3d::finished() const {
  const std::uint32_t queue = read(v3d::kQueue);
  const std::uint32_t completed = queue >> 16U & 0xffU;
  const std::uint32_t requested = queue >> 8U & 0xffU;
  return completed == requested;
}

std::string V3d::state() const {
  return "SRQCS " + detail::hex(read(v3d::kQueue)) + ", PCS " +
         detail::hex(read(v3d::kPipelineStatus)) + ", ERRSTAT " +
         detail::hex(read(v3d::kErrors));
}

}  // namespace qpu::runtime
