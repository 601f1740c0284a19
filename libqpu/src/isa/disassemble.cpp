#include <cstdio>

#include "isa/fields.hpp"
#include "isa/names.hpp"
#include "isa/text.hpp"

namespace qpu::isa {
namespace {

using names::File;

std::string hex(Word value, int digits) {
  std::array<char, 20> text{};
  (void)std::snprintf(text.data(), text.size(), "0x%0*llx", digits,
                      static_cast<unsigned long long>(value));
  return text.data();
}

std::string suffix(std::string_view name) {
  return name.empty() ? std::string() : "." + std::string(name);
}

template <std::size_t N, class T>
std::string_view in(const std::array<std::string_view, N>& table, T index) {
  return table.at(static_cast<std::size_t>(index));
}

// Writes an instruction as a line of text. `shown_` collects the fields that the line expresses.
class Writer {
 public:
  explicit Writer(const Instruction& i) : i_(i) { shown_.form = i.form; }

  std::string line() {
    switch (i_.form) {
      case Form::Alu: alu(); break;
      case Form::Branch: branch(); break;
      case Form::Semaphore: semaphore(); break;
      default: load(); break;
    }
    return out_;
  }

  const Instruction& shown() const { return shown_; }

 private:
  enum class Pipe : std::uint8_t { Add, Mul };

  void part(const std::string& text) {
    if (!out_.empty()) out_ += "; ";
    out_ += text;
  }

  std::string_view packName() {
    const std::string_view name = in(i_.pm ? names::kColourPacks : names::kPacks, i_.pack);
    if (name.empty()) return {};
    shown_.pack = i_.pack;
    shown_.pm = i_.pm;
    return name;
  }

  std::string target(Pipe pipe) {
    const bool add = pipe == Pipe::Add;
    const std::uint8_t address = add ? i_.waddrAdd : i_.waddrMul;
    (add ? shown_.waddrAdd : shown_.waddrMul) = address;
    const File file = add == i_.swap ? File::B : File::A;
    std::string text = names::writeName(file, address);
    bool showsFile = names::isSided(address);
    const bool packs = i_.form != Form::Branch && (i_.pm ? !add : file == File::A);
    if (const auto name = packs ? packName() : std::string_view(); !name.empty()) {
      text += suffix(name);
      showsFile = showsFile || !i_.pm;
    }
    if (showsFile) shown_.swap = i_.swap;
    return text;
  }

  std::string condition(Pipe pipe) {
    const bool add = pipe == Pipe::Add;
    const Cond cond = add ? i_.condAdd : i_.condMul;
    (add ? shown_.condAdd : shown_.condMul) = cond;
    return suffix(in(names::kConds, cond));
  }

  std::string flags(bool setsFlags) {
    if (!setsFlags || !i_.setFlags) return {};
    shown_.setFlags = true;
    return suffix(names::kSetFlags);
  }

  std::string unpack() {
    if (i_.unpack == 0) return {};
    shown_.unpack = i_.unpack;
    shown_.pm = i_.pm;
    return suffix(in(names::kUnpacks, i_.unpack));
  }

  bool rotates() const {
    return i_.signal == Signal::SmallImmediate && i_.raddrB >= 48 && i_.opMul != MulOp::Nop;
  }

  std::string source(Mux mux) {
    if (mux == Mux::A) {
      shown_.raddrA = i_.raddrA;
      return names::readName(File::A, i_.raddrA) + (i_.pm ? std::string() : unpack());
    }
    if (mux == Mux::B && i_.signal == Signal::SmallImmediate) {
      // Without a MUL operation, the code of a rotation is an ordinary value. Several codes
      // represent the same value.
      shown_.raddrB =
          rotates() ? i_.raddrB : *smallImmediateCode(smallImmediate(i_.raddrB));
      shown_.signal = i_.signal;
      return names::immediate(i_.raddrB);
    }
    if (mux == Mux::B) {
      shown_.raddrB = i_.raddrB;
      return names::readName(File::B, i_.raddrB);
    }
    const std::string name = "r" + std::to_string(static_cast<int>(mux));
    return name + (mux == Mux::R4 && i_.pm ? unpack() : std::string());
  }

  void addPart(bool setsFlags) {
    shown_.opAdd = i_.opAdd;
    shown_.addA = i_.addA;
    shown_.addB = i_.addB;
    const bool same = i_.addA == i_.addB;
    const bool move = i_.opAdd == AddOp::Or && same;
    const bool unary = i_.opAdd == AddOp::FtoI || i_.opAdd == AddOp::ItoF ||
                       i_.opAdd == AddOp::Not || i_.opAdd == AddOp::Clz;
    std::string text(move ? names::kMove : in(names::kAddOps, i_.opAdd));
    text += condition(Pipe::Add) + flags(setsFlags) + " " + target(Pipe::Add) + ", " +
            source(i_.addA);
    if (!same || (!move && !unary)) text += ", " + source(i_.addB);
    part(text);
  }

  void mulPart(bool setsFlags) {
    shown_.opMul = i_.opMul;
    shown_.mulA = i_.mulA;
    shown_.mulB = i_.mulB;
    const bool move = i_.opMul == MulOp::V8Min && i_.mulA == i_.mulB;
    std::string text(move ? names::kMove : in(names::kMulOps, i_.opMul));
    if (rotates()) {
      shown_.raddrB = i_.raddrB;
      shown_.signal = i_.signal;
      text += suffix(names::kRotate);
      text += i_.raddrB == 48 ? std::string(names::kRotateByR5) : std::to_string(i_.raddrB - 48);
    }
    text += condition(Pipe::Mul) + flags(setsFlags) + " " + target(Pipe::Mul) + ", " +
            source(i_.mulA);
    if (!move) text += ", " + source(i_.mulB);
    part(text);
  }

  void swapPart() {
    if (shown_.swap == i_.swap) return;
    shown_.swap = i_.swap;
    part(std::string(names::kSwap));
  }

  void alu() {
    const bool add = i_.opAdd != AddOp::Nop;
    const bool mul = i_.opMul != MulOp::Nop;
    if (add)
      addPart(true);
    else
      part("nop" + flags(!mul));
    if (mul) mulPart(!add);
    // Reading an I/O address has side effects even if the ALUs do not use the value.
    constexpr std::uint8_t firstIo = 32;
    if (i_.raddrA != shown_.raddrA && i_.raddrA >= firstIo) {
      shown_.raddrA = i_.raddrA;
      part(std::string(names::kRead) + " " + names::readName(File::A, i_.raddrA));
    }
    if (i_.raddrB != shown_.raddrB && i_.raddrB >= firstIo &&
        i_.signal != Signal::SmallImmediate) {
      shown_.raddrB = i_.raddrB;
      part(std::string(names::kRead) + " " + names::readName(File::B, i_.raddrB));
    }
    swapPart();
    if (const auto name = in(names::kSignals, i_.signal); !name.empty()) {
      shown_.signal = i_.signal;
      part(std::string(name));
    }
  }

  std::string value() {
    shown_.immediate = i_.immediate;
    if (i_.form == Form::LoadImmediate) return hex(i_.immediate, 1);
    std::string text = "[";
    for (unsigned e = 0; e < 16; ++e) {
      const int low = static_cast<int>(i_.immediate >> e & 1U);
      const int high = static_cast<int>(i_.immediate >> (16 + e) & 1U);
      if (e != 0) text += ",";
      text += std::to_string(low + (i_.form == Form::LoadPerElementSigned ? -2 : 2) * high);
    }
    return text + "]";
  }

  void loadPart(Pipe pipe, bool setsFlags) {
    std::string text(names::load(i_.form));
    text += condition(pipe) + flags(setsFlags) + " " + target(pipe) + ", " + value();
    part(text);
  }

  void load() {
    const auto used = [](Cond cond, std::uint8_t waddr) {
      return cond != Cond::Never || waddr != address::kNop;
    };
    const bool mul = used(i_.condMul, i_.waddrMul);
    const bool add = used(i_.condAdd, i_.waddrAdd) || !mul;
    if (add)
      loadPart(Pipe::Add, true);
    else
      part("nop");
    if (mul) loadPart(Pipe::Mul, !add);
    swapPart();
  }

  void semaphore() {
    shown_.immediate = i_.immediate & 31U;
    const bool acquire = (i_.immediate & 16U) != 0;
    part(std::string(acquire ? names::kAcquire : names::kRelease) + " " +
         std::to_string(i_.immediate & 15U));
  }

  void branch() {
    shown_.branchCond = i_.branchCond;
    shown_.branchRelative = i_.branchRelative;
    shown_.branchRegister = i_.branchRegister;
    shown_.immediate = i_.immediate;
    std::string text(i_.branchRelative ? names::kRelative : names::kAbsolute);
    text += suffix(in(names::kBranchConds, i_.branchCond)) + " ";
    if (i_.branchRegister) {
      shown_.branchRegisterA = i_.branchRegisterA;
      text += names::readName(File::A, i_.branchRegisterA) + ", ";
    }
    text += i_.branchRelative ? std::to_string(static_cast<std::int32_t>(i_.immediate))
                              : hex(i_.immediate, 1);
    part(text);
    const bool mul = i_.waddrMul != address::kNop;
    if (mul || i_.waddrAdd != address::kNop) {
      std::string link = std::string(names::kLink) + " " + target(Pipe::Add);
      if (mul) link += ", " + target(Pipe::Mul);
      part(link);
    }
    swapPart();
  }

  const Instruction& i_;
  Instruction shown_;
  std::string out_;
};

// Lists the fields in which `word` differs from `shown`.
std::string differences(Word word, Word shown, Form form) {
  std::string text;
  for (const NamedField& f : kNamedFields) {
    if (!f.isIn(form) || ((word ^ shown) & f.mask()) == 0) continue;
    text += text.empty() ? "; " + std::string(names::kWith) + " " : ", ";
    text += std::string(f.name) + "=" + std::to_string((word & f.mask()) >> f.low);
  }
  return text;
}

}  // namespace

std::string disassemble(Word word, Fields fields) {
  const auto i = decode(word);
  if (!i) return std::string(names::kWord) + " " + hex(word, 16);
  Writer writer(*i);
  const std::string line = writer.line();
  const bool all = fields == Fields::All || i->form == Form::Semaphore;
  return all ? line + differences(word, encode(writer.shown()), i->form) : line;
}

}  // namespace qpu::isa
