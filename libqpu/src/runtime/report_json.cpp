#include <array>
#include <cstdio>

#include "runtime/report.hpp"

namespace qpu::runtime {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte >= 0x7f) {
      // A valid device tree contains only ASCII. If a device tree contains any other byte, the
      // document must still be valid JSON.
      std::array<char, 8> code{};
      (void)std::snprintf(code.data(), code.size(), "\\u%04x", byte);
      out += code.data();
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string quotedOrNull(const std::string& text) { return text.empty() ? "null" : quoted(text); }

const char* boolean(bool b) { return b ? "true" : "false"; }

// A JSON object. The keys stay in the order in which they were inserted.
class Object {
 public:
  Object& raw(const char* key, const std::string& value) {
    body_ += (body_.empty() ? "" : ", ") + quoted(key) + ": " + value;
    return *this;
  }
  Object& text(const char* key, const std::string& value) { return raw(key, quotedOrNull(value)); }
  std::string str() const { return "{" + body_ + "}"; }

 private:
  std::string body_;
};

template <typename Items, typename F>
std::string array(const Items& items, F one) {
  std::string body;
  for (const auto& item : items) body += (body.empty() ? "" : ", ") + one(item);
  return "[" + body + "]";
}

std::string json(const Revision& r) {
  std::array<char, 16> code{};
  (void)std::snprintf(code.data(), code.size(), "%04x", r.code);
  return Object()
      .text("code", code.data())
      .text("model", r.model)
      .text("soc", r.soc)
      .raw("memory_mib", r.memoryMib == 0 ? "null" : std::to_string(r.memoryMib))
      .raw("board_revision", r.boardRevision < 0 ? "null" : std::to_string(r.boardRevision))
      .raw("overvolted", boolean(r.overvolted))
      .str();
}

std::string json(const Node& n) {
  return Object()
      .text("path", n.path)
      .raw("present", boolean(n.present))
      .text("mode", n.mode)
      .text("owner", n.owner)
      .raw("readable", boolean(n.readable))
      .raw("writable", boolean(n.writable))
      .str();
}

std::string json(const Setting& s) {
  return Object()
      .text("file", s.file)
      .raw("line", std::to_string(s.line))
      .text("text", s.text)
      .str();
}

const char* socWord(Soc soc) {
  switch (soc) {
    case Soc::Suitable: return "true";
    case Soc::Unsuitable: return "false";
    case Soc::Unknown: break;
  }
  return "null";
}

std::string hexOrNull(const std::optional<std::uint32_t>& value) {
  if (!value) return "null";
  std::array<char, 16> code{};
  (void)std::snprintf(code.data(), code.size(), "\"0x%08x\"", *value);
  return code.data();
}

std::string json(const BackendFinding& b) {
  return Object()
      .text("name", b.name)
      .raw("usable", boolean(b.usable))
      .text("reason", b.reason)
      .str();
}

std::string json(const V3dFacts& v) {
  return Object()
      .raw("ident0", hexOrNull(v.ident0))
      .raw("ident1", hexOrNull(v.ident1))
      .raw("clock_hz", v.clockHz ? std::to_string(*v.clockHz) : "null")
      .text("source", v.source)
      .str();
}

std::string json(const User& u) {
  return Object()
      .raw("pid", std::to_string(u.pid))
      .raw("alive", boolean(u.alive))
      .raw("holds_qpus", boolean(u.holds))
      .raw("pieces", std::to_string(u.pieces))
      .raw("bytes", std::to_string(u.bytes))
      .str();
}

std::string json(const Board& b) {
  return Object()
      .text("model", b.model)
      .raw("compatible", array(b.compatible, quoted))
      .raw("revision", b.revision ? json(*b.revision) : "null")
      .text("soc", b.socName)
      .raw("suitable", socWord(b.soc))
      .text("verdict", b.verdict)
      .str();
}

}  // namespace

std::string asJson(const Findings& f) {
  const auto one = [](const auto& item) { return json(item); };
  Object kms;
  kms.text("state", name(f.system.kms))
      .text("evidence", f.system.kmsEvidence)
      .raw("settings", array(f.system.kmsSettings, one));
  Object memory;
  memory.raw("mib", f.system.gpuMemoryMib ? std::to_string(*f.system.gpuMemoryMib) : "null")
      .text("source", f.system.gpuMemorySource)
      .raw("setting", f.system.gpuMemSetting ? json(*f.system.gpuMemSetting) : "null");
  Object state;
  state.text("folder", f.stateFolder)
      .raw("users", array(f.users, one))
      .text("cleaned_up", f.note);
  const auto obstacle = [](const Obstacle& o) {
    return Object().text("what", o.what).text("fix", o.fix).str();
  };
  return Object()
             .text("version", f.library.version)
             .raw("backend", Object()
                                 .text("name", f.library.backend)
                                 .text("reason", f.library.reason)
                                 .str())
             .raw("backends", array(f.backends, one))
             .raw("board", json(f.board))
             .raw("v3d", json(f.v3d))
             .raw("nodes", array(f.system.nodes, one))
             .raw("kms", kms.str())
             .raw("gpu_memory", memory.str())
             .raw("state", state.str())
             .raw("obstacles", array(obstacles(f.board, f.system), obstacle))
             .text("note", kUnmeasured)
             .str() +
         "\n";
}

}  // namespace qpu::runtime
