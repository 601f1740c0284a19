// Tests the listings of compiled kernels.
#include <doctest/doctest.h>

#include <stdexcept>

#include "code/listing.hpp"
#include "isa/text.hpp"

using qpu::code::Cycles;
using qpu::code::listing;
using qpu::code::Object;
using Kind = qpu::code::Uniform::Kind;

namespace {

Object example() {
  Object o;
  o.name = "rot3D";
  o.parameters = 1;
  for (const char* const line :
       {"mov ra0, uniform", "nop", "fadd r0, ra0, ra0; fmul r1, ra0, ra0", "brr -40", "nop", "nop",
        "nop; ldtmu0", "nop; thrend", "nop", "nop", ".word 0xffffffffffffffff"})
    o.words.push_back(qpu::isa::assemble(line));
  o.uniforms = {{Kind::Argument, 0}, {Kind::QpuNumber, 0}, {Kind::QpuCount, 0},
                {Kind::SpillBase, 0}, {Kind::Constant, 0xa00}};
  o.sites = {{"gather", "gather at rot3d.cpp:12"}};
  o.siteOf.assign(o.words.size(), Object::kNoSite);
  o.siteOf[2] = o.siteOf[3] = 0;
  o.spillBytes = 128;
  return o;
}

}  // namespace

TEST_CASE("a listing shows instructions and their sources") {
  CHECK(listing(example()) ==
        "# kernel rot3D: 11 instructions, 5 uniforms, 128 bytes of spills per QPU\n"
        "# uniform 0: argument 0\n"
        "# uniform 1: QPU number\n"
        "# uniform 2: QPU count\n"
        "# uniform 3: spill area\n"
        "# uniform 4: 0xa00\n"
        "# instruction, clock if nothing stalls, word\n"
        " 0   0  1002002715827d80  mov ra0, uniform\n"
        " 1   4  100009e7009e7000  nop\n"
        "# gather at rot3d.cpp:12\n"
        " 2   8  1002482121027db6  fadd r0, ra0, ra0; fmul r1, ra0, ra0\n"
        " 3  12  f0f809e7ffffffd8  brr -40  # to 2\n"
        "# added by the compiler\n"
        " 4  16  100009e7009e7000  nop\n"
        " 5  20  100009e7009e7000  nop\n"
        " 6  24  a00009e7009e7000  nop; ldtmu0\n"
        " 7  28  300009e7009e7000  nop; thrend\n"
        " 8  32  100009e7009e7000  nop\n"
        " 9  36  100009e7009e7000  nop\n"
        "10  40  ffffffffffffffff  .word 0xffffffffffffffff\n"
        "# 11 instructions, 1 (9 %) with both pipes, 5 nops\n");
}

TEST_CASE("a listing shows the counts of a profiled run") {
  Object o = example();
  o.words.resize(2);
  o.siteOf.resize(2);
  o.usesSfu = true;
  const std::vector<Cycles> profile{{12, 0}, {12345, 678}};
  const std::string text = listing(o, &profile);
  CHECK(text.find("per QPU, SFU\n") != std::string::npos);
  CHECK(text.find("executed, stalled clocks (model), word\n"
                  "0  0     12   0  1002002715827d80  mov ra0, uniform\n"
                  "1  4  12345 678  100009e7009e7000  nop\n"
                  "# 2 instructions, 0 (0 %) with both pipes, 1 nop\n"
                  "# 12357 executed, 678 clocks stalled, all QPUs together (model, not measured "
                  "on hardware)\n") != std::string::npos);
}

TEST_CASE("incomplete objects can be listed") {
  Object o;
  CHECK(listing(o).find("# kernel without a name: 0 instructions") == 0);
  o.words = {0};
  CHECK(listing(o).find("0  0  0000000000000000  nop; bkpt\n") != std::string::npos);
  o.siteOf = {7};  // this site does not exist
  CHECK(listing(o).find("0  0  0000000000000000  nop; bkpt\n") != std::string::npos);
  const std::vector<Cycles> none;
  CHECK_THROWS_WITH_AS((void)listing(o, &none),
                       "the profile has 0 instructions, but the kernel has 1", std::invalid_argument);
}
