// Files that replace parameters of the cycle model.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <set>
#include <sstream>

#include "emu/model.hpp"
#include "error_facts.hpp"
#include "qpu/error.h"

namespace qpu::emu {
namespace {

struct Range {
  double least, most;
};

Range rangeOf(const Parameter& p) {
  switch (p.unit) {
    case Unit::Hertz: return {1e6, 1e10};
    case Unit::BytesPerClock: return {0.01, 1e4};
    case Unit::BytesPerSecond: return {1e6, 1e12};
    case Unit::Bytes: return {1024, 1U << 20U};
    case Unit::Clocks:
    case Unit::Nanoseconds:
    case Unit::Microseconds: break;
  }
  return {0, 1e6};
}

std::string trimmed(const std::string& text) {
  const std::size_t from = text.find_first_not_of(" \t\r");
  if (from == std::string::npos) return {};
  return text.substr(from, text.find_last_not_of(" \t\r") - from + 1);
}

std::string format(double value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

class Reader {
 public:
  Reader(const std::string& path, bool isChosen, Board& board)
      : path_(path), isChosen_(isChosen), board_(board) {}

  std::string read(const std::string& text) {
    std::istringstream lines(text);
    for (std::string all; std::getline(lines, all);) {
      ++line_;
      const std::string content = trimmed(all.substr(0, all.find('#')));
      if (content.empty()) continue;
      const std::size_t equals = content.find('=');
      if (equals == std::string::npos)
        fail("expected 'name = value', found '" + content + "'");
      take(trimmed(content.substr(0, equals)), trimmed(content.substr(equals + 1)));
    }
    return source_;
  }

 private:
  void take(const std::string& name, const std::string& value) {
    if (!seen_.insert(name).second) fail("'" + name + "' is set twice");
    if (value.empty()) fail("'" + name + "' has no value");
    if (name == "source") {
      source_ = value;
    } else if (name == "board") {
      if (seen_.size() != 1 + seen_.count("source"))
        fail("'board' must come before all parameters");
      takeBoard(value);
    } else {
      takeParameter(name, value);
    }
  }

  void takeBoard(const std::string& value) {
    const Board* const found = findBoard(value.c_str());
    if (found == nullptr)
      fail("'" + value + "' is not a board of the emulator; valid boards are pi1, zero, pi2, pi3, zero2");
    if (isChosen_ && value != board_.name)
      fail("the file is for board " + value + ", but QPU_BOARD is " + board_.name +
           "; unset QPU_BOARD or use another file");
    board_ = *found;
  }

  void takeParameter(const std::string& name, const std::string& value) {
    const auto& all = parameters();
    const auto* const p = std::find_if(
        all.begin(), all.end(), [&name](const Parameter& known) { return name == known.name; });
    if (p == all.end())
      fail("'" + name + "' is not a parameter of the model; qpu-calibrate --parameters lists them");
    char* end = nullptr;
    const double number = std::strtod(value.c_str(), &end);
    const Range range = rangeOf(*p);
    if (end == value.c_str() || *end != '\0' || !(number >= range.least && number <= range.most))
      fail("'" + name + "' is '" + value + "'; expected a number from " + format(range.least) +
           " to " + format(range.most));
    if (p->unit == Unit::Bytes && std::exp2(std::round(std::log2(number))) != number)
      fail("'" + name + "' is " + value + "; expected a power of 2");
    board_.*p->member = number;
  }

  [[noreturn]] void fail(const std::string& what) const {
    detail::raise<BackendError>("QPU_MODEL=" + path_ + ", line " + std::to_string(line_) + ": " +
                                what);
  }

  const std::string& path_;
  bool isChosen_;
  Board& board_;
  int line_ = 0;
  std::set<std::string> seen_;
  std::string source_;
};

}  // namespace

std::string applyFile(const std::string& text, const std::string& path, bool isChosen,
                      Board& board) {
  return Reader(path, isChosen, board).read(text);
}

std::string describe(const Board& board) {
  const std::string name = std::string(board.name).substr(0, std::string(board.name).find(' '));
  const Board& fast = *findBoard(name.c_str(), Bound::Fast);
  const Board& slow = *findBoard(name.c_str(), Bound::Slow);
  std::string text = "board = " + name + "\n";
  for (const Parameter& p : parameters()) {
    text += "# " + std::string(p.source) + "\n" + p.name + " = " + format(board.*p.member);
    text += "  # ";
    if (fast.*p.member != slow.*p.member)
      text += "fast " + format(fast.*p.member) + ", slow " + format(slow.*p.member) + " ";
    text += std::string(emu::name(p.unit)) + "\n";
  }
  return text;
}

}  // namespace qpu::emu
