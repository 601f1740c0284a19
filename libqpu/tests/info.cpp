// Tests the findings of qpu-info in the directory trees of various boards.
#include <doctest/doctest.h>

#include <sys/stat.h>
#include <unistd.h>

#include "runtime/report.hpp"
#include "tests/folder.hpp"

using qpu::runtime::Board;
using qpu::runtime::Kms;
using qpu::runtime::Obstacle;
using qpu::runtime::Root;
using qpu::runtime::Soc;
using qpu::runtime::System;

namespace {

// A root directory that is created for one test.
class Tree {
 public:
  Tree& file(const std::string& path, const std::string& text, int mode = 0644) {
    CHECK(chmod(folder_.write(path, text).c_str(), static_cast<mode_t>(mode)) == 0);
    return *this;
  }
  Tree& board(const std::string& model, const std::string& soc, const std::string& revision) {
    return file("proc/device-tree/model", model + '\0')
        .file("proc/device-tree/compatible", "raspberrypi,some" + std::string(1, '\0') + "brcm," +
                                                 soc + '\0')
        .file("proc/cpuinfo", "processor\t: 0\nHardware\t: BCM2835\nRevision\t: " + revision + "\n");
  }
  Tree& pi3() { return board("Raspberry Pi 3 Model B Rev 1.2", "bcm2837", "a02082"); }
  Tree& v3d(const std::string& status) {
    return file("proc/device-tree/soc/v3d@7ec00000/status", status + '\0');
  }

  Root root() const { return Root(folder_.path); }
  Board readBoard() const { return qpu::runtime::readBoard(root()); }
  System readSystem() const { return qpu::runtime::readSystem(root(), nullptr); }
  std::vector<Obstacle> obstacles() const {
    return qpu::runtime::obstacles(readBoard(), readSystem());
  }

 private:
  test::Folder folder_;
};

bool names(const std::vector<Obstacle>& found, const std::string& what, const std::string& fix) {
  for (const Obstacle& o : found)
    if (o.what.find(what) != std::string::npos && o.fix.find(fix) != std::string::npos)
      return true;
  return false;
}

}  // namespace

TEST_CASE("a Pi 3 is recognised by its device tree and revision") {
  Tree tree;
  const Board b = tree.pi3().readBoard();
  CHECK(b.model == "Raspberry Pi 3 Model B Rev 1.2");
  CHECK(b.socName == "BCM2837");
  CHECK(b.soc == Soc::Suitable);
  REQUIRE(b.revision);
  CHECK(b.revision->model == "3B");
  CHECK(b.revision->memoryMib == 1024);
  CHECK(b.revision->boardRevision == 2);
  CHECK(b.revision->soc == "BCM2837");
}

TEST_CASE("revision codes are decoded") {
  const auto decode = qpu::runtime::decodeRevision;
  CHECK(decode(0x9000c1).model == "Zero W");
  CHECK(decode(0x9000c1).soc == "BCM2835");
  CHECK(decode(0x9000c1).memoryMib == 512);
  CHECK(decode(0x902120).model == "Zero 2 W");
  CHECK(decode(0xa22042).model == "2B");
  CHECK(decode(0xa22042).soc == "BCM2837");
  CHECK(decode(0xc03111).soc == "BCM2711");
  CHECK(decode(0xc03111).memoryMib == 4096);
  CHECK(decode(0xd04170).model == "5");
  CHECK(decode(0x000e).soc == "BCM2835");
  CHECK_FALSE(decode(0x000e).overvolted);
  CHECK(decode(0x100000e).overvolted);
  CHECK(decode(0x100000e).soc == "BCM2835");
  CHECK(decode(0x0001).soc == "unknown");
  CHECK(decode(0x800000 | 0xf << 12 | 0xff << 4).model == "unknown (0xff)");
}

TEST_CASE("a Pi 4 and a Pi 5 are rejected by name") {
  Tree four;
  four.board("Raspberry Pi 4 Model B Rev 1.1", "bcm2711", "c03111");
  CHECK(four.readBoard().soc == Soc::Unsuitable);
  CHECK(names(four.obstacles(),
              "Raspberry Pi 4 Model B Rev 1.1 (BCM2711) has a VideoCore VI, which libqpu does not support",
              "Raspberry Pi 1, 2, 3 or Zero"));
  Tree five;
  five.board("Raspberry Pi 5", "bcm2712", "d04170");
  CHECK(names(five.obstacles(), "VideoCore VII, which libqpu does not support", "interpreter"));
  Tree keyboard;
  keyboard.board("Raspberry Pi 500 Rev 1.0", "bcm2712", "d04190");
  CHECK(keyboard.readBoard().revision->model == "500");
  qpu::runtime::Findings f;
  f.board = keyboard.readBoard();
  CHECK(qpu::runtime::asText(f).find("Raspberry Pi 500 Rev 1.0 (BCM2712) has a VideoCore VII") !=
        std::string::npos);
  CHECK(qpu::runtime::asJson(f).find("\"suitable\": false") != std::string::npos);
}

TEST_CASE("a 64-bit kernel has the revision code in the device tree only") {
  Tree tree;
  tree.pi3()
      .file("proc/cpuinfo", "processor\t: 0\nCPU architecture: 8\n")
      .file("proc/device-tree/system/linux,revision", {'\x00', '\xa0', '\x20', '\x82'});
  REQUIRE(tree.readBoard().revision);
  CHECK(tree.readBoard().revision->model == "3B");
  CHECK(tree.readBoard().soc == Soc::Suitable);
  tree.file("proc/device-tree/system/linux,revision", "?");
  CHECK_FALSE(tree.readBoard().revision);
}

TEST_CASE("other boards and unknown boards are rejected") {
  Tree other;
  other.file("proc/device-tree/model", "EAIDK-310" + std::string(1, '\0'));
  CHECK(other.readBoard().soc == Soc::Unsuitable);
  CHECK(names(other.obstacles(), "EAIDK-310 is not a Raspberry Pi", ""));
  const Tree none;
  CHECK(none.readBoard().soc == Soc::Unknown);
  CHECK(none.obstacles().size() == 1);
}

TEST_CASE("the revision code gives the SoC without device tree") {
  Tree tree;
  tree.file("proc/cpuinfo", "Revision\t: 1000010\n");
  CHECK(tree.readBoard().socName == "BCM2835");
  CHECK(tree.readBoard().soc == Soc::Suitable);
}

TEST_CASE("KMS is reported as off, full, fake or unknown") {
  Tree off;
  CHECK(off.pi3().v3d("disabled").readSystem().kms == Kms::Off);
  CHECK_FALSE(names(off.obstacles(), "KMS", ""));
  Tree full;
  CHECK(full.pi3().v3d("okay").readSystem().kms == Kms::Full);
  CHECK(names(full.obstacles(), "full KMS driver owns V3D", "comment out"));
  Tree fake;
  fake.pi3().v3d("okay").file("proc/device-tree/soc/firmwarekms@7e600000/status",
                              "okay" + std::string(1, '\0'));
  CHECK(fake.readSystem().kms == Kms::Fake);
  const Tree none;
  CHECK(none.readSystem().kms == Kms::Unknown);
}

TEST_CASE("the fix names the line of config.txt") {
  Tree tree;
  tree.pi3().v3d("okay").file("boot/firmware/config.txt",
                              "# dtoverlay=vc4-fkms-v3d\ngpu_mem=64\n  dtoverlay=vc4-kms-v3d,"
                              "noaudio\r\n");
  const System s = tree.readSystem();
  REQUIRE(s.kmsSettings.size() == 1);
  CHECK(s.kmsSettings[0].line == 3);
  REQUIRE(s.gpuMemSetting);
  CHECK(s.gpuMemSetting->text == "gpu_mem=64");
  CHECK(names(tree.obstacles(), "KMS",
              "dtoverlay=vc4-kms-v3d,noaudio (/boot/firmware/config.txt line 3)"));
}

TEST_CASE("missing and inaccessible device nodes are reported") {
  Tree tree;
  tree.pi3().v3d("disabled");
  CHECK(names(tree.obstacles(), "/dev/vcio is missing", "Raspberry Pi kernel"));
  CHECK(names(tree.obstacles(), "/dev/mem is missing", "mknod"));
  tree.file("dev/vcio", "", 0600).file("dev/gpiomem", "", 0660).file("dev/dri/card0", "", 0660);
  const System s = tree.readSystem();
  REQUIRE(s.node("/dev/vcio") != nullptr);
  CHECK(s.node("/dev/vcio")->present);
  CHECK(s.node("/dev/vcio")->mode == "-rw-------");
  CHECK(s.node("/dev/vcio")->writable);
  CHECK_FALSE(s.node("/dev/mem")->present);
  REQUIRE(s.node("/dev/dri/card0") != nullptr);
  CHECK_FALSE(names(tree.obstacles(), "/dev/vcio", ""));
  CHECK(s.gpuMemorySource.find("only if the root is /") != std::string::npos);
  if (geteuid() != 0) {  // root can open any file
    tree.file("dev/mem", "", 0000);
    CHECK(names(tree.obstacles(), "/dev/mem (----------", "run as root"));
  }
}

TEST_CASE("a render node contradicts a disabled KMS driver") {
  Tree tree;
  tree.pi3().v3d("disabled").file("dev/dri/renderD128", "");
  CHECK(names(tree.obstacles(), "/dev/dri/renderD128", "disable the KMS driver"));
}

TEST_CASE("too little GPU memory is reported") {
  Tree tree;
  System s = tree.pi3().v3d("disabled").readSystem();
  s.gpuMemoryMib = 16;
  CHECK(names(qpu::runtime::obstacles(tree.readBoard(), s), "16 MiB", "gpu_mem=64"));
  s.gpuMemoryMib = 32;
  CHECK_FALSE(names(qpu::runtime::obstacles(tree.readBoard(), s), "MiB", "gpu_mem"));
}

TEST_CASE("the report contains the findings as text and JSON") {
  Tree tree;
  tree.pi3().v3d("okay").file("dev/vcio", "", 0660);
  qpu::runtime::Findings f;
  f.library = {"1.2.3", "", "QPU_BACKEND=\"x\\y\" does not name a backend"};
  f.backends = {{"vc4-registers", false, "no power"}, {"interpreter", true, "the reference"}};
  f.board = tree.readBoard();
  f.system = tree.readSystem();
  f.v3d.ident0 = 0x02443356;
  f.v3d.clockHz = 400000000;
  f.v3d.source = "firmware";
  f.stateFolder = "/run/qpu";
  f.users.resize(2);
  f.users[0].pid = 4711;
  f.users[0].alive = true;
  f.users[0].holds = true;
  f.users[1].pid = 12;
  f.users[1].pieces = 3;
  f.users[1].bytes = 12288;
  f.note = "gave back much";
  const std::string text = qpu::runtime::asText(f);
  for (const char* part :
       {"1.2.3", "none: QPU_BACKEND", "Raspberry Pi 3 Model B Rev 1.2", "unavailable: no power",
        "works: the reference", "a02082: model 3B, BCM2837, 1024 MiB, revision 2", "full (",
        "IDENT0 0x02443356, 400 MHz (firmware)", "/run/qpu/qpu.state",
        "process 4711 has enabled the QPUs", "process 12 (ended) has not enabled the QPUs, 12288 bytes",
        "gave back much", "Obstacle to using the hardware", "fix: ", "not measured on hardware"})
    CHECK_MESSAGE(text.find(part) != std::string::npos, part);
  const std::string json = qpu::runtime::asJson(f);
  for (const char* part :
       {R"("version": "1.2.3")", R"("name": null)", R"("reason": "QPU_BACKEND=\"x\\y\" does)",
        R"({"name": "vc4-registers", "usable": false, "reason": "no power"})",
        R"("compatible": ["raspberrypi,some", "brcm,bcm2837"])", R"("suitable": true)",
        R"("code": "a02082")", R"("memory_mib": 1024)", R"("state": "full")",
        R"({"ident0": "0x02443356", "ident1": null, "clock_hz": 400000000)",
        R"({"pid": 4711, "alive": true, "holds_qpus": true, "pieces": 0, "bytes": 0})",
        R"("cleaned_up": "gave back much")", R"("mode": "-rw-rw----")", R"("mib": null)",
        R"("obstacles": [{"what": )"})
    CHECK_MESSAGE(json.find(part) != std::string::npos, part);
}

TEST_CASE("with another root, only files are read") {
  Tree tree;
  tree.pi3().v3d("disabled").file("dev/vcio", "", 0660);
  qpu::runtime::Host host;
  host.root = tree.root();
  const qpu::runtime::Findings f = qpu::runtime::findAll(host);
  CHECK(f.backends.empty());
  CHECK(f.v3d.source.find("root is not /") != std::string::npos);
  CHECK(f.board.socName == "BCM2837");
  CHECK(f.library.backend == "interpreter");
}
