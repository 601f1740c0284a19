// Checks that qpu-calibrate on the emulator finds the model's own parameters, and that it marks
// results as measured on hardware only if they were measured on hardware.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "emu/model.hpp"
#include "qpu.h"
#include "runtime/backends.hpp"
#include "runtime/executable.hpp"
#include "runtime/machine.hpp"
#include "tests/fake_vcio.hpp"
#include "tests/folder.hpp"
#include "tests/support.hpp"
#include "tools/calibrate/calibrate.hpp"

using qpu::calibrate::provenance;
using qpu::calibrate::Source;
using test::contains;
using test::Folder;
using test::Setting;

namespace {

struct Result {
  int code;
  std::string out;
  std::string errors;
};

Result run(const std::vector<std::string>& arguments) {
  std::ostringstream out;
  std::ostringstream errors;
  const int code = qpu::calibrate::run(arguments, {out, errors});
  return {code, out.str(), errors.str()};
}

// Checks all parameters except the size of the uniform cache, which qpu-calibrate does not
// measure.
void checkRecovered() {
  const qpu::emu::Board& model = qpu::runtime::emulatedBoard();
  const Result found = run({});
  REQUIRE(found.code == 0);
  INFO(found.out);
  CHECK_FALSE(contains(found.out, "not determined"));
  CHECK(contains(found.out, "source = emulator"));
  CHECK_FALSE(contains(found.out, "= measured on hardware"));
  qpu::emu::Board board = qpu::emu::kPi1;
  (void)qpu::emu::applyFile(found.out, "found", false, board);
  for (const qpu::emu::Parameter& p : qpu::emu::parameters()) {
    if (p.member == &qpu::emu::Board::uniformCacheBytes) continue;
    INFO(p.name);
    CHECK(contains(found.out, std::string("\n") + p.name + " = "));
    const double expected = model.*p.member;
    // On the emulator, transfers and loads end at multiples of a clock.
    const double clock = p.unit == qpu::emu::Unit::Clocks        ? 1
                         : p.unit == qpu::emu::Unit::Nanoseconds ? 1e9 / model.clockHz
                                                                 : 0;
    INFO(board.*p.member << ", the model has " << expected);
    CHECK(std::fabs(board.*p.member - expected) <= std::max(0.01 * expected, clock));
  }
}

}  // namespace

TEST_CASE("the emulator's parameters are recovered") {
  const Setting backend("QPU_BACKEND", "emulator");
  SUBCASE("of the default board") { checkRecovered(); }
  SUBCASE("of another board") {
    const Setting board("QPU_BOARD", "pi1");
    checkRecovered();
  }
  SUBCASE("at the fast end") {
    const Setting model("QPU_MODEL", "fast");
    checkRecovered();
  }
  SUBCASE("at the slow end") {
    const Setting model("QPU_MODEL", "slow");
    checkRecovered();
  }
  SUBCASE("of a file in which every parameter differs") {
    const Folder folder;
    const Setting model(
        "QPU_MODEL",
        folder.write("others",
                     "board = zero\nclock_hz = 3.1e8\ntmu_l1_clocks = 29\ntmu_l2_clocks = 61\n"
                     "tmu_memory_clocks = 133\ntmu_request_clocks = 9\nfetch_l2_clocks = 37\n"
                     "fetch_memory_clocks = 101\nl2_bytes_per_clock = 11\n"
                     "memory_bytes_per_s = 9.7e8\npage_miss_ns = 45\nstore_ns = 301\n"
                     "store_burst_ns = 91\nstore_word_ns = 4.1\nload_ns = 377\n"
                     "load_burst_ns = 120\nload_word_ns = 6.6\nvpm_port_clocks = 6.5\n"
                     "vpm_setup_clocks = 27\nsemaphore_clocks = 19\nsfu_clocks = 5\n"
                     "l1_bytes = 2048\nl2_bytes = 16384\nicache_bytes = 8192\n"
                     "registers_launch_us = 13\nmailbox_launch_us = 222\n"));
    checkRecovered();
  }
}

TEST_CASE("parameters hidden by another limit are omitted") {
  const Setting backend("QPU_BACKEND", "emulator");
  const Folder folder;
  const Setting model("QPU_MODEL", folder.write("m", "vpm_port_clocks = 0.1\n"
                                                     "l2_bytes_per_clock = 1000\n"
                                                     "memory_bytes_per_s = 1e12\n"));
  const Result found = run({});
  CHECK(found.code == 0);
  for (const char* const name : {"vpm_port_clocks", "l2_bytes_per_clock", "memory_bytes_per_s"}) {
    CHECK(contains(found.out, std::string("# ") + name + " not determined"));
    CHECK_FALSE(contains(found.out, std::string("\n") + name + " ="));
  }
}

TEST_CASE("a written file is a valid model with its source") {
  const Setting backend("QPU_BACKEND", "emulator");
  const Folder folder;
  const std::string path = folder.write("pi.model", "old contents");
  const Result found = run({"--output", path});
  CHECK(found.code == 0);
  CHECK(found.out.empty());
  CHECK(contains(found.errors, "not measured on hardware"));
  CHECK(contains(found.errors, "wrote " + path));
  CHECK(folder.files().size() == 1);
  CHECK(contains(folder.read("pi.model"), "store_ns = "));
  const Setting model("QPU_MODEL", path);
  CHECK(contains(qpu::runtime::emulatedBoard().name, "not measured on hardware"));
  CHECK(contains(run({"--parameters"}).out, "store_ns = "));
}

TEST_CASE("a failed write is reported and leaves no files") {
  const Setting backend("QPU_BACKEND", "emulator");
  const Folder folder;
  const std::string path = (folder.path / "none" / "m").string();
  const Result found = run({"--output", path});
  CHECK(found.code == 1);
  CHECK(contains(found.errors, "cannot write " + path));
  CHECK(folder.files().empty());
  const Result onFolder = run({"--output", folder.path.string()});
  CHECK(onFolder.code == 1);
  CHECK_FALSE(std::filesystem::exists(folder.path.string() + ".new"));
}

TEST_CASE("the interpreter cannot be measured") {
  const Setting backend("QPU_BACKEND", "interpreter");
  const Result found = run({});
  CHECK(found.code == 1);
  CHECK(found.out.empty());
  CHECK(contains(found.errors, "the interpreter, which does not count clocks"));
  CHECK(contains(found.errors, "QPU_BACKEND=emulator"));
}

TEST_CASE("--parameters prints a model file with ranges and sources") {
  const Setting board("QPU_BOARD", "pi1");
  const Result found = run({"--parameters"});
  CHECK(found.code == 0);
  CHECK(contains(found.out, "\nstore_ns = 157  # fast 132, slow 196 ns\n"));
  CHECK(contains(found.out, "# Sugizaki at 250 MHz"));
  qpu::emu::Board read = qpu::emu::kPi3;
  (void)qpu::emu::applyFile(found.out, "printed", false, read);
  CHECK(read.storeNs == 157);
}

TEST_CASE("only a Pi's device tree counts as hardware") {
  const std::string nul(1, '\0');
  const Folder folder;
  const std::string tree = folder.path.string();
  CHECK(provenance("vc4-registers", tree).source == Source::Unverified);
  folder.write("model", "Raspberry Pi 3 Model B Rev 1.2" + nul);
  folder.write("compatible", "raspberrypi,3-model-b" + nul + "brcm,bcm2837" + nul);
  CHECK(contains(provenance("vc4-registers", tree).text, "without the revision code"));
  folder.write("system/linux,revision", std::string("\x00\xa0\x20\x82", 4));
  folder.write("serial-number", "0000000000000000" + nul);
  CHECK(provenance("vc4-registers", tree).source == Source::Unverified);
  CHECK(contains(provenance("vc4-registers", tree).text, "without the serial number"));
  folder.write("serial-number", "00000000deadbeef" + nul);
  const auto real = provenance("vc4-mailbox", tree);
  CHECK(real.source == Source::Hardware);
  CHECK(real.board == "pi3");
  CHECK(real.text == "measured on hardware: Raspberry Pi 3 Model B Rev 1.2, revision 00a02082, by "
                     "vc4-mailbox");
  // The result does not depend on the machine on which the emulator runs.
  const auto emulated = provenance("emulator", tree);
  CHECK(emulated.source == Source::Emulator);
  CHECK(contains(emulated.text, "not measured on hardware"));
  folder.write("compatible", "linux,dummy-virt" + nul);
  CHECK(provenance("vc4-registers", tree).source == Source::Unverified);
}

TEST_CASE("boards are identified by their device trees") {
  const Folder folder;
  struct Case {
    const char* model;
    const char* soc;
    const char* board;
  };
  for (const Case& c : {Case{"Raspberry Pi Model B Rev 2", "bcm2835", "pi1"},
                        Case{"Raspberry Pi Zero W Rev 1.1", "bcm2835", "zero"},
                        Case{"Raspberry Pi 2 Model B Rev 1.1", "bcm2836", "pi2"},
                        Case{"Raspberry Pi 2 Model B Rev 1.2", "bcm2837", "pi2"},
                        Case{"Raspberry Pi 3 Model A Plus", "bcm2837", "pi3"},
                        Case{"Raspberry Pi Zero 2 W Rev 1.0", "bcm2837", "zero2"},
                        Case{"another board", "x", ""}}) {
    folder.write("model", c.model);
    folder.write("compatible", std::string("brcm,") + c.soc);
    CHECK(provenance("vc4-registers", folder.path.string()).board == c.board);
  }
}

TEST_CASE("programs run on both hardware backends") {
  test::FakeVcio os{8U << 20U};
  const test::FakeTree tree;
  const qpu::runtime::WithHost host{tree.host(os)};
  for (const char* const name : {"vc4-registers", "vc4-mailbox"}) {
    INFO(name);
    const Setting backend("QPU_BACKEND", name);
    qpu::calibrate::Bench bench;
    CHECK(bench.backend() == name);
    CHECK_FALSE(bench.isEmulator());
    const std::uint32_t before = os.launches();
    qpu::calibrate::Assembly a;
    a.loop([](qpu::calibrate::Assembly& body) { body << "nop"; });
    CHECK(bench.run(a.end(), 12, 3).seconds > 0);
    CHECK(os.launches() >= before + 12);
    CHECK(bench.launch(name).seconds > 0);
    CHECK(os.fault.empty());
    CHECK(os.complaints().empty());
  }
}
