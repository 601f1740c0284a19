#include "lang/source.hpp"

namespace qpu::detail {

std::string Source::describe(const Site& site) const {
  std::string text = site.construct;
  const bool known = site.file < files.size() && site.line > 0;
  const std::string place = known ? files[site.file] + ":" + std::to_string(site.line) : "";
  if (site.exact && known) return text + " at " + place;
  text += " (statement " + std::to_string(site.number);
  if (known) text += ", after " + place;
  return text + ")";
}

}  // namespace qpu::detail
