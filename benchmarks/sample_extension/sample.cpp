// A pybind11 module that is built instead of the QPU extension if there is no torch wheel. The module's templates
// take some seconds to compile.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <regex>
#include <string>
#include <vector>

namespace py = pybind11;

namespace {

std::map<std::string, int> words(const std::string& text) {
  static const std::regex word("[A-Za-z]+");
  std::map<std::string, int> found;
  for (std::sregex_iterator next(text.begin(), text.end(), word), end; next != end; ++next) ++found[next->str()];
  return found;
}

double dot(const py::array_t<double, py::array::c_style | py::array::forcecast>& a,
           const py::array_t<double, py::array::c_style | py::array::forcecast>& b) {
  if (a.size() != b.size()) throw py::value_error("the arrays have different sizes");
  return std::inner_product(a.data(), a.data() + a.size(), b.data(), 0.0);
}

std::vector<std::vector<double>> sorted_rows(std::vector<std::vector<double>> rows) {
  for (auto& row : rows) std::sort(row.begin(), row.end());
  return rows;
}

}  // namespace

PYBIND11_MODULE(sample, module) {
  module.def("words", &words);
  module.def("dot", &dot);
  module.def("sorted_rows", &sorted_rows);
}
