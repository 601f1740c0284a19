#include <iomanip>
#include <sstream>

#include "runtime/report.hpp"

namespace qpu::runtime {
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
  const char* access = n.readable && n.writable ? "accessible"
                       : n.readable             ? "read-only"
                                                : "not accessible";
  return n.mode + " " + n.owner + ", " + access + " to this user";
}

std::string joined(const std::vector<std::string>& parts) {
  std::string all;
  for (const std::string& p : parts) all += (all.empty() ? "" : ", ") + p;
  return all;
}

std::string hex(std::uint32_t value) {
  std::ostringstream out;
  out << "0x" << std::hex << std::setw(8) << std::setfill('0') << value;
  return out.str();
}

std::string text(const V3dFacts& v) {
  std::string all;
  if (v.ident0) all += "IDENT0 " + hex(*v.ident0) + ", ";
  if (v.ident1) all += "IDENT1 " + hex(*v.ident1) + ", ";
  if (v.clockHz) all += std::to_string(*v.clockHz / 1000000) + " MHz, ";
  return all.empty() ? v.source : all.substr(0, all.size() - 2) + " (" + v.source + ")";
}

std::string text(const User& u) {
  std::string all = "process " + std::to_string(u.pid) + (u.alive ? "" : " (ended)") +
                    (u.holds ? " has enabled the QPUs" : " has not enabled the QPUs");
  if (u.pieces != 0)
    all += ", " + std::to_string(u.bytes) + " bytes of GPU memory in " +
           std::to_string(u.pieces) + " allocations";
  return all;
}

}  // namespace

std::string asText(const Findings& f) {
  std::ostringstream out;
  row(out, "libqpu", f.library.version);
  row(out, "backend", f.library.backend.empty() ? "none: " + f.library.reason
                                                : f.library.backend + " (" + f.library.reason + ")");
  for (const BackendFinding& b : f.backends)
    row(out, ("  " + b.name).c_str(), (b.usable ? "works: " : "unavailable: ") + b.reason);
  row(out, "board", f.board.model.empty() ? "unknown" : f.board.model);
  if (!f.board.compatible.empty()) row(out, "compatible", joined(f.board.compatible));
  row(out, "revision", f.board.revision ? text(*f.board.revision) : "unknown");
  row(out, "QPUs", f.board.verdict);
  row(out, "V3D", text(f.v3d));
  for (const Node& n : f.system.nodes) row(out, n.path.c_str(), text(n));
  row(out, "KMS", std::string(name(f.system.kms)) + " (" + f.system.kmsEvidence + ")");
  row(out, "GPU memory", f.system.gpuMemoryMib
                             ? std::to_string(*f.system.gpuMemoryMib) + " MiB (" +
                                   f.system.gpuMemorySource + ")"
                             : f.system.gpuMemorySource);
  if (f.system.gpuMemSetting)
    row(out, "", f.system.gpuMemSetting->text + " in " + f.system.gpuMemSetting->file);
  row(out, "state file", f.stateFolder + "/qpu.state" +
                             (f.users.empty() ? ": no process uses the QPUs" : ""));
  for (const User& u : f.users) row(out, "", text(u));
  if (!f.note.empty()) row(out, "cleaned up", f.note);
  for (const Obstacle& o : obstacles(f.board, f.system))
    out << "\nObstacle to using the hardware: " << o.what << "\n  fix: " << o.fix << '\n';
  out << '\n' << kUnmeasured << '\n';
  return out.str();
}

}  // namespace qpu::runtime
