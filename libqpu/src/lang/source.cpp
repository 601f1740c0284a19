#include "lang/source.hpp"

namespace qpu::detail {

bool isBinary(Op op) {
  if (op <= Op::VpmRead) return false;
  switch (op) {
    case Op::Not:
    case Op::ItoF:
    case Op::FtoI:
    case Op::Recip:
    case Op::RecipSqrt:
    case Op::Exp2:
    case Op::Log2:
    case Op::Load:
    case Op::MaskNot:
    case Op::Any:
    case Op::All: return false;
    default: return true;
  }
}

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
