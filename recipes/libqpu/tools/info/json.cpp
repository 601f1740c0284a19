#include <array>
#include <cstdio>

#include "tools/info/report.hpp"

namespace qpu::info {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte >= 0x7f) {
      // Device trees hold ASCII; a stray byte must not break the document.
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

// Keys and values of one object, in the order given.
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

}  // namespace

std::string asJson(const Library& library, const Board& board, const System& system) {
  const auto one = [](const auto& item) { return json(item); };
  Object boardObject;
  boardObject.text("model", board.model)
      .raw("compatible", array(board.compatible, quoted))
      .raw("revision", board.revision ? json(*board.revision) : "null")
      .text("soc", board.socName)
      .raw("suitable", socWord(board.soc))
      .text("verdict", board.verdict);
  Object kms;
  kms.text("state", name(system.kms))
      .text("evidence", system.kmsEvidence)
      .raw("settings", array(system.kmsSettings, one));
  Object memory;
  memory.raw("mib", system.gpuMemoryMib ? std::to_string(*system.gpuMemoryMib) : "null")
      .text("source", system.gpuMemorySource)
      .raw("setting", system.gpuMemSetting ? json(*system.gpuMemSetting) : "null");
  const auto obstacle = [](const Obstacle& o) {
    return Object().text("what", o.what).text("mend", o.mend).str();
  };
  return Object()
             .text("version", library.version)
             .raw("backend", Object()
                                 .text("name", library.backend)
                                 .text("reason", library.reason)
                                 .str())
             .raw("board", boardObject.str())
             .raw("nodes", array(system.nodes, one))
             .raw("kms", kms.str())
             .raw("gpu_memory", memory.str())
             .raw("obstacles", array(obstacles(board, system), obstacle))
             .text("note", kUnmeasured)
             .str() +
         "\n";
}

}  // namespace qpu::info
