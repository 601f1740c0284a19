// OpenCL on the board: libOpenCL is opened when a client first requests it, so boards without it run other kernels.
#ifndef PITORCH_OPENCL_HPP
#define PITORCH_OPENCL_HPP

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include "library.hpp"

namespace opencl {

// One line per device, its fields separated by tabs: type (GPU, CPU, accelerator), name, version of OpenCL, driver,
// compute units, bytes of memory.
std::string devices();

struct Request {
  std::size_t device = 0;            // position in the list of devices()
  std::string digest;                // of the source and the device; names the file that keeps the binary
  std::string kernel;                // the function
  std::array<std::size_t, 3> global{}, local{};  // work items; a local size of 0 lets the driver choose
  std::string options;               // of the compiler
  std::string source;
};

// A kernel, built from its source or from the binary that an earlier session kept. Sets `kept` in the latter case.
std::unique_ptr<Library> build(const Request &request, bool &kept);

}  // namespace opencl

#endif
