#include <algorithm>
#include <stdexcept>

#include "isa/access.hpp"
#include "isa/fields.hpp"
#include "isa/names.hpp"
#include "isa/text.hpp"

namespace qpu::isa {
namespace {

using names::File;

// Reads the characters in a line and reports errors with their column.
class Cursor {
 public:
  explicit Cursor(std::string_view line) : line_(line) { space(); }

  std::size_t at() const { return at_; }
  bool ended() const { return at_ == line_.size(); }
  char peek() const { return ended() ? '\0' : line_[at_]; }

  bool accept(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }
  bool acceptSpaced(char c) {
    space();
    const bool found = accept(c);
    space();
    return found;
  }
  void expect(char c) {
    if (!acceptSpaced(c)) fail(std::string("expected '") + c + "'");
  }
  void space() {
    while (peek() == ' ' || peek() == '\t') ++at_;
  }

  // Reads letters, digits and underscores. Returns an empty string if the next character is not one
  // of these characters.
  std::string_view word() {
    const std::size_t from = at_;
    while (isWordChar(peek())) ++at_;
    return line_.substr(from, at_ - from);
  }

  bool atNumber() const { return isDigit(peek()) || peek() == '-'; }

  // Reads a number of up to 64 bits: decimal with an optional minus sign, or hexadecimal.
  Word integer(Word most) {
    const std::size_t from = at_;
    const bool minus = accept('-');
    const bool hexadecimal = !minus && line_.substr(at_, 2) == "0x";
    if (hexadecimal) at_ += 2;
    const Word base = hexadecimal ? 16 : 10;
    Word value = 0;
    const std::size_t digits = at_;
    for (; digitOf(peek()) < base; ++at_) {
      const Word digit = digitOf(peek());
      if (value > (most - digit) / base) fail("expected a smaller number", from);
      value = value * base + digit;
    }
    if (digits == at_) fail("expected a number", from);
    if (minus && value > most / 2 + 1) fail("expected a larger number", from);
    return minus ? (Word{0} - value) & most : value;
  }

  [[noreturn]] void fail(const std::string& expected) const { fail(expected, at_); }
  [[noreturn]] void fail(const std::string& expected, std::size_t at) const {
    throw std::invalid_argument("column " + std::to_string(at + 1) + ": " + expected + ", found " +
                                found(at));
  }

 private:
  static bool isDigit(char c) { return c >= '0' && c <= '9'; }
  static bool isWordChar(char c) {
    return isDigit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
  }
  static Word digitOf(char c) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    const bool upper = c >= 'A' && c <= 'F';
    const std::size_t digit = kDigits.find(upper ? static_cast<char>(c - 'A' + 'a') : c);
    return digit == std::string_view::npos ? 99 : digit;
  }

  std::string found(std::size_t at) const {
    if (at >= line_.size()) return "the end of the line";
    std::size_t end = line_[at] == '-' ? at + 1 : at;
    while (end < line_.size() && (isWordChar(line_[end]) || line_[end] == '.')) ++end;
    if (end == at) ++end;
    return "'" + std::string(line_.substr(at, end - at)) + "'";
  }

  std::string_view line_;
  std::size_t at_ = 0;
};

class Parser {
 public:
  explicit Parser(std::string_view line) : in_(line) {}

  Word run() {
    if (in_.peek() == '.') return rawWord();
    do {
      part();
    } while (in_.acceptSpaced(';'));
    if (!in_.ended()) in_.fail("expected ';' or the end of the line");
    return (encode(finish()) & ~withMask_) | with_;
  }

 private:
  enum class Next : std::uint8_t { Add, Mul, Others };

  struct Suffixes {
    std::optional<Cond> cond;
    bool flags = false;
    std::optional<std::uint8_t> rotation;
  };

  Word rawWord() {
    (void)in_.accept('.');
    const std::size_t from = in_.at();
    if (in_.word() != names::kWord.substr(1)) in_.fail("expected .word", from - 1);
    in_.space();
    const Word word = in_.integer(~Word{0});
    in_.space();
    if (!in_.ended()) in_.fail("expected the end of the line");
    return word;
  }

  void part() {
    const std::size_t from = in_.at();
    const std::string_view name = in_.word();
    if (other(name, from)) {
      if (next_ == Next::Add) in_.fail("expected an operation, such as nop, first", from);
      next_ = Next::Others;
      return;
    }
    if (next_ == Next::Others) in_.fail("expected a signal, read, link, ws or with", from);
    const Pipe pipe = next_ == Next::Add ? Pipe::Add : Pipe::Mul;
    next_ = pipe == Pipe::Add ? Next::Mul : Next::Others;
    if (name == "nop") return nop(pipe, from);
    if (const auto form = names::loadForm(name)) return load(pipe, *form, from);
    if (pipe == Pipe::Add) {
      if (name == names::kRelative || name == names::kAbsolute) return branch(name);
      if (name == names::kAcquire || name == names::kRelease) return semaphore(name);
    }
    if (i_.form != Form::Alu) in_.fail("expected no other operation next to " + formName(), from);
    if (pipe == Pipe::Mul) return mul(name, from);
    if (name == names::kMove || names::find(names::kAddOps, name)) return add(name);
    if (!names::find(names::kMulOps, name)) in_.fail("expected an operation", from);
    next_ = Next::Others;
    mul(name, from);
  }

  std::string formName() const {
    if (i_.form == Form::Branch) return "a branch";
    return i_.form == Form::Semaphore ? "a semaphore" : "a load of an immediate";
  }

  // Parses a signal or another part that follows the operations.
  bool other(std::string_view name, std::size_t from) {
    if (const auto signal = names::find(names::kSignals, name)) {
      if (i_.form != Form::Alu) in_.fail("expected no signal next to " + formName(), from);
      if (i_.signal != Signal::None) in_.fail("expected only one signal", from);
      i_.signal = static_cast<Signal>(*signal);
      return true;
    }
    if (name == names::kRead) {
      if (i_.form != Form::Alu) in_.fail("expected no read next to " + formName(), from);
      in_.space();
      const std::size_t at = in_.at();
      const File file = fileRead();
      if (file == File::A ? readByAlu_[0] : readByAlu_[1])
        in_.fail("expected a file that no ALU reads", at);
      return true;
    }
    if (name == names::kLink) {
      if (i_.form != Form::Branch || linked_) in_.fail("expected link once, after a branch", from);
      linked_ = true;
      in_.space();
      target(Pipe::Add);
      if (in_.acceptSpaced(',')) target(Pipe::Mul);
      return true;
    }
    if (name == names::kWith) {
      do {
        in_.space();
        field();
      } while (in_.acceptSpaced(','));
      return true;
    }
    if (name != names::kSwap) return false;
    setSwap(true, from);
    return true;
  }

  // Parses "name=value", which sets a field in the word.
  void field() {
    const std::size_t from = in_.at();
    const std::string_view name = in_.word();
    const auto* const f =
        std::find_if(kNamedFields.begin(), kNamedFields.end(), [&](const NamedField& named) {
          return named.name == name && named.isIn(i_.form);
        });
    if (f == kNamedFields.end()) in_.fail("expected a field of this instruction", from);
    in_.expect('=');
    const std::size_t at = in_.at();
    constexpr Word kMost = 0xffffffffU;
    const Word value = in_.integer(kMost);
    // Higher signal numbers would select other forms.
    constexpr Word kLastSignal = static_cast<Word>(Signal::SmallImmediate);
    const Word most = f->name == "sig" ? kLastSignal : f->mask() >> f->low;
    if (value > most) in_.fail("expected 0.." + std::to_string(most), at);
    with_ = (with_ & ~f->mask()) | value << f->low;
    withMask_ |= f->mask();
  }

  // Parses suffixes such as .zs, .sf and .rot3, in any order.
  Suffixes suffixes() {
    Suffixes s;
    while (in_.accept('.')) {
      const std::size_t from = in_.at();
      const std::string_view name = in_.word();
      if (const auto cond = names::find(names::kConds, name); cond && !s.cond) {
        s.cond = static_cast<Cond>(*cond);
      } else if (name == names::kSetFlags && !s.flags) {
        s.flags = true;
      } else if (name.substr(0, 3) == names::kRotate && !s.rotation) {
        s.rotation = rotation(name.substr(3), from);
      } else {
        in_.fail("expected a condition, sf or rot, each once", from);
      }
    }
    in_.space();
    return s;
  }

  std::uint8_t rotation(std::string_view by, std::size_t from) const {
    if (by == names::kRotateByR5) return 48;
    for (int n = 1; n < 16; ++n)
      if (by == std::to_string(n)) return static_cast<std::uint8_t>(48 + n);
    in_.fail("expected rot1..rot15 or rotr5", from);
  }

  void setFlags(bool flags, bool allowed, std::size_t from) {
    if (flags && !allowed) in_.fail("expected sf on the operation that sets the flags", from);
    i_.setFlags = i_.setFlags || flags;
  }

  void nop(Pipe pipe, std::size_t from) {
    const Suffixes s = suffixes();
    if (s.cond || s.rotation) in_.fail("expected nop without condition or rotation", from);
    setFlags(s.flags, pipe == Pipe::Add, from);
    nopFlags_ = i_.setFlags ? std::optional(from) : std::nullopt;
  }

  void add(std::string_view name) {
    const Suffixes s = suffixes();
    const std::size_t from = in_.at();
    if (s.rotation) in_.fail("expected the rotation on the MUL operation", from);
    const bool move = name == names::kMove;
    i_.opAdd = move ? AddOp::Or : static_cast<AddOp>(*names::find(names::kAddOps, name));
    i_.condAdd = s.cond.value_or(Cond::Always);
    setFlags(s.flags, true, from);
    target(Pipe::Add);
    in_.expect(',');
    i_.addA = source();
    const bool unary = move || i_.opAdd == AddOp::FtoI || i_.opAdd == AddOp::ItoF ||
                       i_.opAdd == AddOp::Not || i_.opAdd == AddOp::Clz;
    i_.addB = secondSource(i_.addA, !move, unary);
  }

  void mul(std::string_view name, std::size_t from) {
    const bool move = name == names::kMove;
    const auto op = names::find(names::kMulOps, name);
    if (!move && !op) in_.fail("expected an operation of the MUL pipe", from);
    const Suffixes s = suffixes();
    i_.opMul = move ? MulOp::V8Min : static_cast<MulOp>(*op);
    i_.condMul = s.cond.value_or(Cond::Always);
    setFlags(s.flags, i_.opAdd == AddOp::Nop, from);
    rotation_ = s.rotation;
    target(Pipe::Mul);
    in_.expect(',');
    i_.mulA = source();
    i_.mulB = secondSource(i_.mulA, !move, move);
  }

  Mux secondSource(Mux first, bool allowed, bool optional) {
    in_.space();
    if (optional && (!allowed || in_.peek() != ',')) return first;
    in_.expect(',');
    return source();
  }

  void load(Pipe pipe, Form form, std::size_t from) {
    const bool second = i_.form == form;
    const bool afterNop = i_.form == Form::Alu && i_.opAdd == AddOp::Nop;
    if (pipe == Pipe::Mul && !second && !afterNop)
      in_.fail("expected an operation of the same kind as that of the ADD pipe", from);
    if (nopFlags_) in_.fail("expected sf on the load", *nopFlags_);
    const Suffixes s = suffixes();
    if (s.rotation) in_.fail("expected a load without rotation", from);
    i_.form = form;
    setFlags(s.flags, !second, from);
    (pipe == Pipe::Add ? i_.condAdd : i_.condMul) = s.cond.value_or(Cond::Always);
    target(pipe);
    in_.expect(',');
    const std::size_t at = in_.at();
    const std::uint32_t value = loadValue(form);
    if (second && value != i_.immediate) in_.fail("expected the same value in both pipes", at);
    i_.immediate = value;
  }

  std::uint32_t loadValue(Form form) {
    constexpr Word kMost = 0xffffffffU;
    if (form == Form::LoadImmediate || in_.peek() != '[')
      return static_cast<std::uint32_t>(in_.integer(kMost));
    in_.expect('[');
    const bool isSigned = form == Form::LoadPerElementSigned;
    std::uint32_t value = 0;
    for (unsigned e = 0; e < 16; ++e) {
      if (e != 0) in_.expect(',');
      const std::size_t at = in_.at();
      const auto element = static_cast<std::uint32_t>(in_.integer(kMost));
      if (isSigned ? element + 2 > 3 : element > 3)
        in_.fail(isSigned ? "expected -2..1" : "expected 0..3", at);
      value |= (element & 1U) << e | (element >> 1U & 1U) << (16 + e);
    }
    if (!in_.acceptSpaced(']')) in_.fail("expected ']' after 16 elements");
    return value;
  }

  void branch(std::string_view name) {
    i_.form = Form::Branch;
    i_.branchRelative = name == names::kRelative;
    if (in_.accept('.')) {
      const std::size_t from = in_.at();
      const auto cond = names::find(names::kBranchConds, in_.word());
      if (!cond) in_.fail("expected a branch condition", from);
      i_.branchCond = static_cast<BranchCond>(*cond);
    }
    in_.space();
    if (!in_.atNumber()) {
      const std::size_t from = in_.at();
      const auto found = names::readAddress(in_.word());
      if (!found || found->file != File::A || found->number > 31)
        in_.fail("expected ra0..ra31 or a number of bytes", from);
      i_.branchRegister = true;
      i_.branchRegisterA = found->number;
      in_.expect(',');
    }
    i_.immediate = static_cast<std::uint32_t>(in_.integer(0xffffffffU));
  }

  void semaphore(std::string_view name) {
    i_.form = Form::Semaphore;
    in_.space();
    const std::size_t from = in_.at();
    const Word number = in_.integer(0xffffffffU);
    if (number > 15) in_.fail("expected a semaphore 0..15", from);
    i_.immediate = static_cast<std::uint32_t>(number) | (name == names::kAcquire ? 16U : 0U);
  }

  void setSwap(bool swap, std::size_t from) {
    if (swap_ && *swap_ != swap) in_.fail("expected the two results in different files", from);
    swap_ = swap;
  }

  void target(Pipe pipe) {
    const bool add = pipe == Pipe::Add;
    const std::size_t from = in_.at();
    const std::string_view name = in_.accept('-') ? names::kNowhere : in_.word();
    const auto found = names::writeAddress(name);
    if (!found) in_.fail("expected a register to write", from);
    (add ? i_.waddrAdd : i_.waddrMul) = found->number;
    if (found->file) setSwap((*found->file == File::A) != add, from);
    if (!in_.accept('.')) return;
    const std::size_t at = in_.at();
    const std::string_view packName = in_.word();
    const auto pack = names::find(names::kPacks, packName);
    const auto colour = add ? std::nullopt : names::find(names::kColourPacks, packName);
    if (i_.form == Form::Branch || (!pack && !colour)) in_.fail("expected a valid pack", at);
    if (i_.pack != 0) in_.fail("expected only one pack", at);
    i_.pack = pack ? *pack : *colour;
    setPm(colour.has_value(), at);
    // Only a result for file A can have a pack that is not a colour pack.
    if (pack) setSwap(!add, at);
  }

  void setPm(bool pm, std::size_t from) {
    if (pm_ && *pm_ != pm) in_.fail("expected packs and unpacks of one kind", from);
    pm_ = pm;
  }

  // Parses the name of a register or I/O address that is read, and sets the read port.
  File fileRead() {
    const std::size_t from = in_.at();
    const auto found = names::readAddress(in_.word());
    if (!found) in_.fail("expected a register to read", from);
    File file = found->file.value_or(File::A);
    if (!found->file && in_.peek() == '.') {
      Cursor ahead = in_;
      (void)ahead.accept('.');
      if (ahead.word() == "b") {
        in_ = ahead;
        file = File::B;
      }
    }
    auto& address = file == File::A ? raddrA_ : raddrB_;
    if (address && *address != found->number)
      in_.fail(std::string("expected only one address of file ") + (file == File::A ? "A" : "B"), from);
    address = found->number;
    return file;
  }

  Mux source() {
    const std::size_t from = in_.at();
    if (in_.atNumber()) {
      smallImmediateOperand();
      return Mux::B;
    }
    Mux mux = Mux::R0;
    Cursor ahead = in_;
    const std::string_view name = ahead.word();
    if (name.size() == 2 && name[0] == 'r' && name[1] >= '0' && name[1] <= '5') {
      in_ = ahead;
      mux = static_cast<Mux>(name[1] - '0');
    } else {
      const File file = fileRead();
      readByAlu_.at(static_cast<std::size_t>(file)) = true;
      mux = file == File::A ? Mux::A : Mux::B;
    }
    std::uint8_t unpack = 0;
    if (in_.accept('.')) {
      const std::size_t at = in_.at();
      const auto found = names::find(names::kUnpacks, in_.word());
      if (!found || (mux != Mux::A && mux != Mux::R4)) in_.fail("expected a valid unpack", at);
      unpack = *found;
      setPm(mux == Mux::R4, at);
    }
    if (mux == Mux::A) sameUnpack(unpackA_, unpack, from);
    if (mux == Mux::R4) sameUnpack(unpackR4_, unpack, from);
    return mux;
  }

  void sameUnpack(std::optional<std::uint8_t>& known, std::uint8_t unpack, std::size_t from) {
    if (known && *known != unpack) in_.fail("expected the same unpack for all reads of the register", from);
    known = unpack;
    if (unpack != 0) i_.unpack = unpack;
  }

  void smallImmediateOperand() {
    const std::size_t from = in_.at();
    std::optional<std::uint32_t> bits;
    Cursor ahead = in_;
    std::string text(ahead.word());
    if (ahead.accept('.')) {
      text += "." + std::string(ahead.word());
      const auto index = names::find(names::kFloats, text);
      if (index) bits = smallImmediate(static_cast<std::uint8_t>(32 + *index));
      in_ = ahead;
    } else {
      const auto value = static_cast<std::uint32_t>(in_.integer(0xffffffffU));
      if (smallImmediateCode(value).value_or(32) < 32) bits = value;
    }
    if (!bits) in_.fail("expected a small immediate", from);
    if (immediate_ && *immediate_ != *bits) in_.fail("expected only one small immediate", from);
    immediate_ = bits;
  }

  Instruction finish() {
    if (swap_) i_.swap = *swap_;
    if (pm_) i_.pm = *pm_;
    if (i_.form != Form::Alu) return i_;
    if (nopFlags_ && i_.opMul != MulOp::Nop)
      in_.fail("expected sf on the operation that sets the flags", *nopFlags_);
    if (raddrA_) i_.raddrA = *raddrA_;
    if (raddrB_) i_.raddrB = *raddrB_;
    if (!immediate_ && !rotation_) return i_;
    if (raddrB_) in_.fail("expected no read of file B next to a small immediate or rotation");
    if (i_.signal != Signal::None)
      in_.fail("expected no signal next to a small immediate or rotation");
    i_.signal = Signal::SmallImmediate;
    i_.raddrB = rotation_ ? *rotation_ : *smallImmediateCode(*immediate_);
    if (immediate_ && smallImmediate(i_.raddrB) != *immediate_)
      in_.fail("expected " + names::immediate(i_.raddrB) + " as the immediate of this rotation");
    return i_;
  }

  Cursor in_;
  Instruction i_;
  Next next_ = Next::Add;
  bool linked_ = false;
  Word with_ = 0, withMask_ = 0;  // the bits that "with" sets
  std::optional<bool> swap_;
  std::optional<bool> pm_;
  std::optional<std::uint8_t> raddrA_, raddrB_, rotation_, unpackA_, unpackR4_;
  std::optional<std::uint32_t> immediate_;
  std::optional<std::size_t> nopFlags_;
  std::array<bool, 2> readByAlu_{};
};

}  // namespace

Word assemble(std::string_view line) { return Parser(line).run(); }

}  // namespace qpu::isa
