// Tests qpu-objdump on temporary files.
#include <doctest/doctest.h>

#include <sstream>
#include <string>

#include "code/serialise.hpp"
#include "isa/text.hpp"
#include "tests/folder.hpp"
#include "tools/objdump/objdump.hpp"

using qpu::code::Object;
using test::Folder;

namespace {

struct Result {
  int code;
  std::string out;
  std::string errors;
};

Result run(const std::vector<std::string>& arguments, const std::string& input = "",
           bool terminal = false) {
  std::istringstream in(input);
  std::ostringstream out;
  std::ostringstream errors;
  const int code = qpu::objdump::run(arguments, {in, out, errors, terminal});
  return {code, out.str(), errors.str()};
}

const std::string kClean = "ldi r0, 0x2a\nnop; thrend\nnop\nnop\n";

std::string words(const std::string& text) {
  const Result r = run({"--assemble", "-"}, text);
  REQUIRE(r.code == 0);
  return r.out;
}

Object hazard() {
  Object o;
  o.name = "tri";
  for (const char* const line : {"ldi ra1, 1", "mov r0, ra1", "nop; thrend", "nop", "nop"})
    o.words.push_back(qpu::isa::assemble(line));
  o.sites = {{"store", "store at tri.cpp:7"}};
  o.siteOf = {Object::kNoSite, 0, 0, 0, 0};
  return o;
}

}  // namespace

TEST_CASE("raw words from files and standard input are listed") {
  const Folder folder;
  const std::string data = words(kClean);
  REQUIRE(data.size() == 32);
  CHECK(data.substr(24) == std::string("\x00\x70\x9e\x00\xe7\x09\x00\x10", 8));
  const std::string file = folder.write("a.bin", data);
  const Result r = run({file});
  CHECK(r.code == 0);
  CHECK(r.errors.empty());
  CHECK(r.out.find("# kernel " + file + ": 4 instructions") == 0);
  CHECK(r.out.find("\n0  0  e00208270000002a  ldi r0, 0x2a\n") != std::string::npos);
  CHECK(run({"-"}, data).out.find("# kernel standard input: 4 instructions") == 0);
}

TEST_CASE("saved kernels are listed with their source lines") {
  const Folder folder;
  const std::string file = folder.write("tri", qpu::code::save(hazard()));
  const Result r = run({file});
  CHECK(r.code == 0);
  CHECK(r.out.find("# kernel tri: 5 instructions") == 0);
  CHECK(r.out.find("# store at tri.cpp:7\n") != std::string::npos);
}

TEST_CASE("fields without effect are listed on request") {
  const std::string data = words("nop; fmul r0, r1, r2; with add_a=5, raddr_a=7\nnop\n");
  const std::string brief = run({"-"}, data).out;
  CHECK(brief.find("  nop; fmul r0, r1, r2\n") != std::string::npos);
  const std::string all = run({"--fields", "-"}, data).out;
  CHECK(all.find("  nop; fmul r0, r1, r2; with raddr_a=7, add_a=5\n") != std::string::npos);
  CHECK(words("nop; fmul r0, r1, r2; with raddr_a=7, add_a=5\nnop\n") == data);
}

TEST_CASE("--verify lists faults and sets the exit code") {
  const Folder folder;
  const std::string file = folder.write("tri", qpu::code::save(hazard()));
  const Result r = run({"--verify", file});
  CHECK(r.code == 1);
  CHECK(r.out == file + ": register-file-latency: instruction 1 (mov r0, ra1) after instruction 0 "
                        "(ldi ra1, 0x1): a register of file A or B is not readable in the "
                        "instruction after its write [store at tri.cpp:7]\n" +
                     file + ": 5 instructions, 1 fault\n");
  const Result clean = run({"--verify", "-"}, words(kClean));
  CHECK(clean.code == 0);
  CHECK(clean.out == "standard input: 4 instructions, no faults\n");
}

TEST_CASE("--assemble writes words or reports every invalid line") {
  const Folder folder;
  CHECK(words("# only a comment\n\n  nop # and one\r\n").size() == 8);
  CHECK(words("nop").size() == 8);
  const std::string source = folder.write("a.qpu", kClean);
  const std::string output = (folder.path / "a.bin").string();
  CHECK(run({"--assemble", "--output", output, source}).code == 0);
  CHECK(folder.read("a.bin") == words(kClean));
  CHECK(run({"--assemble", "--output=" + output, source}, "", true).code == 0);

  const Result bad = run({"--assemble", "-"}, "nop\nfadd r0\nnop\nfrob\n");
  CHECK(bad.code == 1);
  CHECK(bad.out.empty());
  CHECK(bad.errors ==
        "qpu-objdump: standard input:2: column 8: expected ',', found the end of the line\n"
        "standard input:4: column 1: expected an operation, found 'frob'\n");

  const Result terminal = run({"--assemble", source}, "", true);
  CHECK(terminal.code == 2);
  CHECK(terminal.errors.find("use --output FILE") != std::string::npos);
  const Result nowhere = run({"--assemble", "--output", (folder.path / "no/such/place").string(), source});
  CHECK(nowhere.code == 1);
  CHECK(nowhere.errors.find("cannot write") != std::string::npos);
}

TEST_CASE("invalid files are rejected with the reason") {
  const Folder folder;
  const std::string kernel = qpu::code::save(hazard());
  CHECK(run({folder.write("torn", kernel.substr(0, kernel.size() - 8))}).errors.find(
            "is a saved kernel that is damaged or was saved by another version") != std::string::npos);
  // Read the same bytes as raw words.
  const std::string whole = folder.write("whole", kernel.substr(0, kernel.size() / 8 * 8));
  CHECK(run({"--raw", whole}).code == 0);
  CHECK(run({"--raw", whole}).out.find(".word 0x") != std::string::npos);
  CHECK(run({folder.write("odd", "123456789")}).errors.find(
            "its size of 9 bytes is not a multiple of 8") != std::string::npos);
  CHECK(run({folder.write("empty", "")}).errors.find("is empty") != std::string::npos);
  CHECK(run({(folder.path / ".").string()}).errors.find("is a directory") != std::string::npos);
  CHECK(run({(folder.path / "missing").string()}).errors.find("cannot open") != std::string::npos);
  CHECK(run({folder.write("big", std::string((4U << 20U) + 8, '\0'))}).errors.find(
            "is larger than 4 MiB") != std::string::npos);
  for (const char* const name : {"torn", "odd", "empty", ".", "missing", "big"})
    CHECK(run({(folder.path / name).string()}).code == 1);
}

TEST_CASE("errors in arguments are reported") {
  const auto wrong = [](const std::vector<std::string>& arguments) {
    const Result r = run(arguments);
    CHECK(r.code == 2);
    CHECK(r.out.empty());
    return r.errors;
  };
  CHECK(wrong({}) == "qpu-objdump: no file given; see qpu-objdump --help\n");
  CHECK(wrong({"--frob", "a"}) ==
        "qpu-objdump: unknown argument '--frob'; see qpu-objdump --help\n");
  CHECK(wrong({"a", "b"}).find("also found 'b'") != std::string::npos);
  CHECK(wrong({"--output"}).find("--output needs a file") != std::string::npos);
  CHECK(wrong({"--output", "a", "b"}).find("requires --assemble") != std::string::npos);
  CHECK(wrong({"--assemble", "--raw", "a"}).find("cannot be used with --raw") != std::string::npos);
  CHECK(wrong({"--assemble", "--fields", "a"}).find("cannot be used") != std::string::npos);
  CHECK(wrong({"--verify", "--fields", "a"}).find("cannot be used with --verify") != std::string::npos);
  CHECK(run({"--", "--frob"}).errors.find("cannot open --frob") != std::string::npos);
  CHECK(run({"--help"}).out.find("usage: qpu-objdump") == 0);
}

TEST_CASE("output that cannot be written is an error") {
  std::istringstream in;
  std::ostringstream out;
  std::ostringstream errors;
  out.setstate(std::ios::badbit);
  CHECK(qpu::objdump::run({"--help"}, {in, out, errors, false}) == 1);
  CHECK(errors.str() == "qpu-objdump: cannot write to standard output\n");
}
