// qpu-objdump on files made for each test.
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "code/serialise.hpp"
#include "isa/text.hpp"
#include "tools/objdump/objdump.hpp"

using qpu::code::Object;

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

class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "objdump-XXXXXX").string();
    REQUIRE(mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { std::filesystem::remove_all(path_); }

  std::string path(const std::string& name) const { return (path_ / name).string(); }
  std::string file(const std::string& name, const std::string& data) const {
    std::ofstream(path(name), std::ios::binary) << data;
    return path(name);
  }
  std::string content(const std::string& name) const {
    std::ostringstream data;
    data << std::ifstream(path(name), std::ios::binary).rdbuf();
    return data.str();
  }

 private:
  std::filesystem::path path_;
};

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

TEST_CASE("bare words are listed, from files and from standard input") {
  const Folder folder;
  const std::string data = words(kClean);
  REQUIRE(data.size() == 32);
  CHECK(data.substr(24) == std::string("\x00\x70\x9e\x00\xe7\x09\x00\x10", 8));
  const std::string file = folder.file("a.bin", data);
  const Result r = run({file});
  CHECK(r.code == 0);
  CHECK(r.errors.empty());
  CHECK(r.out.find("# kernel " + file + ": 4 instructions") == 0);
  CHECK(r.out.find("\n0  0  e00208270000002a  ldi r0, 0x2a\n") != std::string::npos);
  CHECK(run({"-"}, data).out.find("# kernel standard input: 4 instructions") == 0);
}

TEST_CASE("kernels as kept on disk are listed with their sources") {
  const Folder folder;
  const std::string file = folder.file("tri", qpu::code::save(hazard()));
  const Result r = run({file});
  CHECK(r.code == 0);
  CHECK(r.out.find("# kernel tri: 5 instructions") == 0);
  CHECK(r.out.find("# store at tri.cpp:7\n") != std::string::npos);
}

TEST_CASE("fields that do nothing are listed on request, and assemble") {
  const std::string data = words("nop; fmul r0, r1, r2; with add_a=5, raddr_a=7\nnop\n");
  const std::string brief = run({"-"}, data).out;
  CHECK(brief.find("  nop; fmul r0, r1, r2\n") != std::string::npos);
  const std::string all = run({"--fields", "-"}, data).out;
  CHECK(all.find("  nop; fmul r0, r1, r2; with raddr_a=7, add_a=5\n") != std::string::npos);
  CHECK(words("nop; fmul r0, r1, r2; with raddr_a=7, add_a=5\nnop\n") == data);
}

TEST_CASE("faults are listed, and make the exit code") {
  const Folder folder;
  const std::string file = folder.file("tri", qpu::code::save(hazard()));
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

TEST_CASE("text becomes words, with comments, and every wrong line is named") {
  const Folder folder;
  CHECK(words("# only a comment\n\n  nop # and one\r\n").size() == 8);
  CHECK(words("nop").size() == 8);
  const std::string source = folder.file("a.qpu", kClean);
  const std::string output = folder.path("a.bin");
  CHECK(run({"--assemble", "--output", output, source}).code == 0);
  CHECK(folder.content("a.bin") == words(kClean));
  CHECK(run({"--assemble", "--output=" + output, source}, "", true).code == 0);

  const Result bad = run({"--assemble", "-"}, "nop\nfadd r0\nnop\nfrob\n");
  CHECK(bad.code == 1);
  CHECK(bad.out.empty());
  CHECK(bad.errors ==
        "qpu-objdump: standard input:2: column 8: expected ',', found the end of the line\n"
        "standard input:4: column 1: expected an operation, found 'frob'\n");

  const Result terminal = run({"--assemble", source}, "", true);
  CHECK(terminal.code == 2);
  CHECK(terminal.errors.find("give --output FILE") != std::string::npos);
  const Result nowhere = run({"--assemble", "--output", folder.path("no/such/place"), source});
  CHECK(nowhere.code == 1);
  CHECK(nowhere.errors.find("cannot write") != std::string::npos);
}

TEST_CASE("files that are no programs are refused with the reason") {
  const Folder folder;
  const std::string kernel = qpu::code::save(hazard());
  CHECK(run({folder.file("torn", kernel.substr(0, kernel.size() - 8))}).errors.find(
            "is a damaged kernel, or one of another version of libqpu") != std::string::npos);
  // The same bytes taken as words.
  const std::string whole = folder.file("whole", kernel.substr(0, kernel.size() / 8 * 8));
  CHECK(run({"--raw", whole}).code == 0);
  CHECK(run({"--raw", whole}).out.find(".word 0x") != std::string::npos);
  CHECK(run({folder.file("odd", "123456789")}).errors.find(
            "its 9 bytes are no whole 64-bit words") != std::string::npos);
  CHECK(run({folder.file("empty", "")}).errors.find("is empty") != std::string::npos);
  CHECK(run({folder.path(".")}).errors.find("is a directory") != std::string::npos);
  CHECK(run({folder.path("missing")}).errors.find("cannot open") != std::string::npos);
  CHECK(run({folder.file("big", std::string((4U << 20U) + 8, '\0'))}).errors.find(
            "more than 4 MiB") != std::string::npos);
  for (const char* const name : {"torn", "odd", "empty", ".", "missing", "big"})
    CHECK(run({folder.path(name)}).code == 1);
}

TEST_CASE("wrong use says what is wrong") {
  const auto wrong = [](const std::vector<std::string>& arguments) {
    const Result r = run(arguments);
    CHECK(r.code == 2);
    CHECK(r.out.empty());
    return r.errors;
  };
  CHECK(wrong({}) == "qpu-objdump: no file given; see qpu-objdump --help\n");
  CHECK(wrong({"--frob", "a"}) ==
        "qpu-objdump: unknown argument '--frob'; see qpu-objdump --help\n");
  CHECK(wrong({"a", "b"}).find("not also 'b'") != std::string::npos);
  CHECK(wrong({"--output"}).find("--output needs a file") != std::string::npos);
  CHECK(wrong({"--output", "a", "b"}).find("goes with --assemble") != std::string::npos);
  CHECK(wrong({"--assemble", "--raw", "a"}).find("neither") != std::string::npos);
  CHECK(wrong({"--assemble", "--fields", "a"}).find("neither") != std::string::npos);
  CHECK(wrong({"--verify", "--fields", "a"}).find("for listings") != std::string::npos);
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
