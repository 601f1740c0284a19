// The Python module torch_qpu._C, which provides everything except the operators. This file does
// not depend on torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <qpu.h>
#include <qpu/backend.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "chains.h"
#include "memory.h"
#include "settings.h"
#include "trace.h"

namespace py = pybind11;

namespace {

const char* name_of(torch_qpu::Kind kind) {
  switch (kind) {
    case torch_qpu::Kind::launch: return "launch";
    case torch_qpu::Kind::copy: return "copy";
    case torch_qpu::Kind::fallback: return "fallback";
  }
  return "";
}

torch_qpu::Kind kind_of(const std::string& name) {
  using torch_qpu::Kind;
  for (const auto kind : {Kind::launch, Kind::copy, Kind::fallback})
    if (name == name_of(kind)) return kind;
  throw std::invalid_argument("expected launch, copy or fallback, found " + name);
}

py::dict counts_of(const std::string& kind) {
  py::dict found;
  for (const auto& [name, count] : torch_qpu::counts(kind_of(kind)))
    found[py::str(name)] = py::make_tuple(count.calls, count.bytes);
  return found;
}

py::list ended_record() {
  py::list found;
  for (const torch_qpu::Event& e : torch_qpu::stop_record())
    found.append(py::make_tuple(name_of(e.kind), e.name, e.thread, e.start_ns, e.duration_ns,
                                e.bytes, e.clocks));
  return found;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  using namespace torch_qpu;
  module.doc() = "Native extension of torch_qpu.";
  install_handlers();

  module.def("memory_statistics", &memory_statistics);
  module.def("reset_peaks", &reset_peaks);
  module.def("release_cached", &release_cached);
  module.def("set_limit", &set_limit, py::arg("size"));
  module.def("limit", &limit);
  module.def("is_plain_memory", &is_plain_memory);
  module.def("in_bad_fork", &in_bad_fork);
  module.def("set_qpus", &set_qpus, py::arg("count"));
  module.def("qpus", &qpus);
  module.def("set_finite_only", &set_finite_only, py::arg("on"));
  module.def("is_finite_only", &is_finite_only);
  module.def("compiled_chains", &compiled_chains);
  module.def("counts", &counts_of, py::arg("kind"));
  module.def("reset_counts", &reset_counts);
  module.def("start_record", &start_record);
  module.def("stop_record", &ended_record);
  module.def("backend", [] {
    const qpu::Backend found = qpu::backend();
    return py::make_tuple(found.name, found.reason);
  });
  // Returns the board, the clock rate and the memory bandwidth in bytes per clock of the emulator's
  // model. This thread must already have run a kernel.
  module.def("model", [] {
    qpu_cycles cycles{};
    if (qpu_thread_cycles(&cycles) != 0) throw std::runtime_error(qpu_last_error());
    double memory = 0;
    if (qpu_model_parameter("memory_bytes_per_s", &memory) != 0) throw std::runtime_error(qpu_last_error());
    const double clock = static_cast<double>(cycles.clocks) / cycles.seconds;
    return py::make_tuple(cycles.board, clock, memory / clock);
  });
  module.def("machine_report", [] {
    char* const text = qpu_machine_report(nullptr, 1);
    if (text == nullptr) throw std::runtime_error(qpu_last_error());
    std::string report(text);
    qpu_free(text);
    return report;
  });
}
