// OpenCL on the board. libOpenCL is opened when a client first requests it, so boards without OpenCL can run other
// kernels.
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
  std::size_t device = 0;            // index in the list that devices() returns
  std::string digest;                // identifies the source and the device; the name of the binary's file
  std::string kernel;                // the name of the function
  std::array<std::size_t, 3> global{}, local{};  // work items; a local size of 0 lets the driver choose
  std::string options;               // compiler options
  std::string source;
};

// Builds a kernel from its source or, if an earlier session kept a binary, from this binary; then `kept` is true.
std::unique_ptr<Library> build(const Request &request, bool &kept);

}  // namespace opencl

#endif
