#include <iomanip>
#include <sstream>

#include "tools/info/report.hpp"

namespace qpu::info {
namespace {

void row(std::ostream& out, const char* what, const std::string& value) {
  out << std::left << std::setw(20) << what << value << '\n';
}

std::string text(const Revision& r) {
  std::ostringstream out;
  out << std::hex << std::setw(4) << std::setfill('0') << r.code << std::dec << ": model "
      << r.model << ", " << r.soc;
  if (r.memoryMib != 0) out << ", " << r.memoryMib << " MiB";
  if (r.boardRevision >= 0) out << ", revision " << r.boardRevision;
  if (r.overvolted) out << ", has been overvolted";
  return out.str();
}

std::string text(const Node& n) {
  if (!n.present) return "missing";
  const char* access = n.readable && n.writable ? "open"
                       : n.readable             ? "read only"
                                                : "closed";
  return n.mode + " " + n.owner + ", " + access + " to this user";
}

std::string joined(const std::vector<std::string>& parts) {
  std::string all;
  for (const std::string& p : parts) all += (all.empty() ? "" : ", ") + p;
  return all;
}

}  // namespace

std::string asText(const Library& library, const Board& board, const System& system) {
  std::ostringstream out;
  row(out, "libqpu", library.version);
  row(out, "backend", library.backend.empty() ? "none: " + library.reason
                                              : library.backend + " (" + library.reason + ")");
  row(out, "board", board.model.empty() ? "unknown" : board.model);
  if (!board.compatible.empty()) row(out, "compatible", joined(board.compatible));
  row(out, "revision", board.revision ? text(*board.revision) : "unknown");
  row(out, "QPUs", board.verdict);
  for (const Node& n : system.nodes) row(out, n.path.c_str(), text(n));
  row(out, "KMS", std::string(name(system.kms)) + " (" + system.kmsEvidence + ")");
  row(out, "GPU memory", system.gpuMemoryMib
                             ? std::to_string(*system.gpuMemoryMib) + " MiB (" +
                                   system.gpuMemorySource + ")"
                             : system.gpuMemorySource);
  if (system.gpuMemSetting)
    row(out, "", system.gpuMemSetting->text + " in " + system.gpuMemSetting->file);
  for (const Obstacle& o : obstacles(board, system))
    out << "\nIn the way of the hardware: " << o.what << "\n  mend: " << o.mend << '\n';
  out << '\n' << kUnmeasured << '\n';
  return out.str();
}

}  // namespace qpu::info
