#include "compiler/mir_text.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <vector>

namespace qpu::compiler {
namespace {

using isa::AddOp;
using isa::Cond;
using isa::MulOp;

const char* name(AddOp op) {
  switch (op) {
    case AddOp::Nop: return "nop";
    case AddOp::FAdd: return "fadd";
    case AddOp::FSub: return "fsub";
    case AddOp::FMin: return "fmin";
    case AddOp::FMax: return "fmax";
    case AddOp::FMinAbs: return "fminabs";
    case AddOp::FMaxAbs: return "fmaxabs";
    case AddOp::FtoI: return "ftoi";
    case AddOp::ItoF: return "itof";
    case AddOp::Add: return "add";
    case AddOp::Sub: return "sub";
    case AddOp::Shr: return "shr";
    case AddOp::Asr: return "asr";
    case AddOp::Ror: return "ror";
    case AddOp::Shl: return "shl";
    case AddOp::Min: return "min";
    case AddOp::Max: return "max";
    case AddOp::And: return "and";
    case AddOp::Or: return "or";
    case AddOp::Xor: return "xor";
    case AddOp::Not: return "not";
    case AddOp::Clz: return "clz";
    case AddOp::V8AddS: return "v8adds";
    case AddOp::V8SubS: return "v8subs";
  }
  return "?";
}

const char* name(MulOp op) {
  static constexpr std::array<const char*, 8> kNames = {"nop",   "fmul",  "mul24",  "v8muld",
                                                        "v8min", "v8max", "v8adds", "v8subs"};
  return kNames[static_cast<std::size_t>(op)];
}

const char* name(Op op) {
  switch (op) {
    case Op::Add:
    case Op::Mul: break;
    case Op::Move: return "move";
    case Op::Load: return "load";
    case Op::LoadPerElement: return "load-per-element";
    case Op::ElementNumber: return "element-number";
    case Op::Uniform: return "uniform";
    case Op::Rotate: return "rotate";
    case Op::Broadcast: return "broadcast";
    case Op::Sfu: return "sfu";
    case Op::TmuRequest: return "tmu-request";
    case Op::TmuReceive: return "tmu-receive";
    case Op::VpmReadSetup: return "vpm-read-setup";
    case Op::VpmWriteSetup: return "vpm-write-setup";
    case Op::VpmRead: return "vpm-read";
    case Op::VpmWrite: return "vpm-write";
    case Op::DmaLoadStart: return "dma-load-start";
    case Op::DmaStoreStart: return "dma-store-start";
    case Op::DmaLoadWait: return "dma-load-wait";
    case Op::DmaStoreWait: return "dma-store-wait";
    case Op::SemaphoreAcquire: return "acquire";
    case Op::SemaphoreRelease: return "release";
    case Op::MutexAcquire: return "mutex-acquire";
    case Op::MutexRelease: return "mutex-release";
    case Op::HostInterrupt: return "host-interrupt";
  }
  return "?";
}

const char* name(Cond c) {
  static constexpr std::array<const char*, 8> kNames = {".never", "",    ".zs", ".zc",
                                                        ".ns",    ".nc", ".cs", ".cc"};
  return kNames[static_cast<std::size_t>(c)];
}

const char* name(isa::BranchCond c) {
  static constexpr std::array<const char*, 12> kNames = {
      "all-zs", "all-zc", "any-zs", "any-zc", "all-ns", "all-nc",
      "any-ns", "any-nc", "all-cs", "all-cc", "any-cs", "any-cc"};
  return c == isa::BranchCond::Always ? "always" : kNames.at(static_cast<std::size_t>(c));
}

std::string hex(std::uint32_t bits) {
  std::array<char, 16> buffer{};
  (void)std::snprintf(buffer.data(), buffer.size(), "0x%08x", bits);
  return buffer.data();
}

std::string small(std::uint32_t bits) {
  const auto number = static_cast<std::int32_t>(bits);
  return number >= -16 && number <= 15 ? std::to_string(number) : hex(bits);
}

std::string text(const Operand& o) {
  switch (o.kind) {
    case Operand::Kind::Register: return "v" + std::to_string(o.value);
    case Operand::Kind::Immediate: return small(o.value);
    case Operand::Kind::None: break;
  }
  return "";
}

bool hasConstant(Op op) {
  return op == Op::Load || op == Op::LoadPerElement || op == Op::Broadcast || op == Op::Sfu ||
         op == Op::SemaphoreAcquire || op == Op::SemaphoreRelease;
}

}  // namespace

std::string text(const Operation& o) {
  std::string s;
  if (o.target != Operation::kNone) s = "v" + std::to_string(o.target) + " = ";
  s += o.op == Op::Add ? name(o.add) : o.op == Op::Mul ? name(o.mul) : name(o.op);
  if (o.op == Op::TmuRequest || o.op == Op::TmuReceive) s += std::to_string(o.unit);
  s += name(o.cond);
  if (o.setsFlags) s += ".sf";
  if (o.a.kind != Operand::Kind::None) s += " " + text(o.a);
  if (o.b.kind != Operand::Kind::None) s += ", " + text(o.b);
  if (hasConstant(o.op))
    s += (o.a.kind != Operand::Kind::None ? ", " : " ") + small(o.constant);
  return s;
}

std::string text(const Function& f) {
  std::string s = "kernel " + f.name + ", " + std::to_string(f.registers) + " registers\n";
  for (std::size_t i = 0; i < f.blocks.size(); ++i) {
    const Block& b = f.blocks[i];
    s += std::to_string(i) + ":";
    if (b.loopDepth > 0) s += "  ; depth " + std::to_string(b.loopDepth);
    s += "\n";
    for (const Operation& o : b.operations) s += "  " + text(o) + "\n";
    if (b.exit == Block::Exit::End) s += "  end\n";
    if (b.exit == Block::Exit::Branch)
      s += std::string("  branch ") + name(b.cond) + " to " + std::to_string(b.taken) + "\n";
    if (b.exit != Block::Exit::End && b.next != i + 1)
      s += "  jump to " + std::to_string(b.next) + "\n";
  }
  return s;
}

namespace {

enum class Allowed : std::uint8_t { None, Any, Register };

struct Signature {
  Allowed target, a, b;
};

Signature signatureOf(const Operation& o) {
  switch (o.op) {
    case Op::Add:
    case Op::Mul: return {Allowed::Any, Allowed::Any, Allowed::Any};
    case Op::Move: return {Allowed::Any, Allowed::Any, Allowed::None};
    case Op::Load:
    case Op::LoadPerElement:
    case Op::ElementNumber:
    case Op::Uniform:
    case Op::TmuReceive:
    case Op::VpmRead: return {Allowed::Any, Allowed::None, Allowed::None};
    case Op::Rotate: return {Allowed::Any, Allowed::Register, Allowed::Any};
    case Op::Broadcast:
    case Op::Sfu: return {Allowed::Any, Allowed::Register, Allowed::None};
    case Op::TmuRequest:
    case Op::VpmReadSetup:
    case Op::VpmWriteSetup:
    case Op::VpmWrite:
    case Op::DmaLoadStart:
    case Op::DmaStoreStart: return {Allowed::None, Allowed::Any, Allowed::None};
    default: return {Allowed::None, Allowed::None, Allowed::None};
  }
}

bool mayHaveCondition(Op op) {
  return op == Op::Add || op == Op::Mul || op == Op::Move || op == Op::Load;
}

class Verifier {
 public:
  explicit Verifier(const Function& f) : f_(f) {}

  std::string run() {
    if (f_.blocks.empty()) return "the function has no blocks";
    if (f_.qpuNumber >= f_.registers) return "no register holds the QPU number";
    std::size_t uniforms = 0;
    for (std::size_t b = 0; b < f_.blocks.size() && error_.empty(); ++b) {
      const Block& block = f_.blocks[b];
      bool flags = false;
      bool start = b == 0;
      for (const Operation& o : block.operations) {
        operation(b, o);
        start = start && o.op == Op::Uniform;
        if (o.op == Op::Uniform) ++uniforms;
        if (o.op == Op::Uniform && !start) fail(b, o, "uniforms can be read only at the start");
        if (o.cond != Cond::Always && !flags) fail(b, o, "no flags are set in this block");
        flags = flags || o.setsFlags;
      }
      if (block.exit != Block::Exit::End) target(b, block.next);
      if (block.exit == Block::Exit::Branch) {
        target(b, block.taken);
        if (!flags) fail(b, "the branch reads flags, but no flags are set in this block");
      }
    }
    if (error_.empty() && uniforms != f_.uniforms.size()) error_ = "the number of uniforms is wrong";
    if (error_.empty()) checkPaths();
    return error_;
  }

 private:
  void fail(std::size_t block, const std::string& what) {
    if (error_.empty()) error_ = "block " + std::to_string(block) + ": " + what;
  }
  void fail(std::size_t block, const Operation& o, const std::string& what) {
    fail(block, text(o) + ": " + what);
  }

  void target(std::size_t block, std::uint32_t to) {
    if (to >= f_.blocks.size()) fail(block, "jump to a block that does not exist");
  }

  void operand(std::size_t block, const Operation& o, const Operand& a, Allowed allowed) {
    switch (a.kind) {
      case Operand::Kind::None:
        if (allowed != Allowed::None) fail(block, o, "an operand is missing");
        break;
      case Operand::Kind::Register:
        if (allowed == Allowed::None) fail(block, o, "too many operands");
        if (a.value >= f_.registers) fail(block, o, "the register does not exist");
        break;
      case Operand::Kind::Immediate:
        if (allowed != Allowed::Any) fail(block, o, "the operand must be a register");
        if (o.op != Op::Rotate && !isa::smallImmediateCode(a.value))
          fail(block, o, "the immediate has no small-immediate code");
        break;
    }
  }

  void operation(std::size_t block, const Operation& o) {
    const Signature s = signatureOf(o);
    operand(block, o, o.a, s.a);
    operand(block, o, o.b, s.b);
    const bool compares = (o.op == Op::Add || o.op == Op::Mul) && o.setsFlags;
    if (o.target == Operation::kNone) {
      if (s.target != Allowed::None && !compares) fail(block, o, "the target is missing");
    } else {
      if (s.target == Allowed::None) fail(block, o, "the operation cannot have a target");
      if (o.target >= f_.registers) fail(block, o, "the register does not exist");
    }
    if (o.cond == Cond::Never) fail(block, o, "the condition is never true");
    if (o.cond != Cond::Always && !mayHaveCondition(o.op)) fail(block, o, "the operation cannot have a condition");
    if (o.setsFlags && !mayHaveCondition(o.op)) fail(block, o, "the operation cannot set flags");
    if (o.a.kind == Operand::Kind::Immediate && o.b.kind == Operand::Kind::Immediate &&
        o.a.value != o.b.value)
      fail(block, o, "two different immediates");
    if (o.unit > (f_.usesTwoTmus ? 1 : 0)) fail(block, o, "the TMU does not exist");
    if (o.site != code::Object::kNoSite && o.site >= f_.sites.size())
      fail(block, o, "the site does not exist");
    if (o.op == Op::Rotate && o.b.kind == Operand::Kind::Immediate &&
        (o.b.value < 1 || o.b.value > 15))
      fail(block, o, "the rotation is not in 1..15");
    if (o.op == Op::Broadcast && o.constant > 15) fail(block, o, "the element is not in 0..15");
    if (o.op == Op::Sfu && (o.constant < isa::address::kSfuRecip ||
                            o.constant > isa::address::kSfuLog))
      fail(block, o, "the SFU function does not exist");
    if ((o.op == Op::SemaphoreAcquire || o.op == Op::SemaphoreRelease) && o.constant > 15)
      fail(block, o, "the semaphore does not exist");
  }

  // Checks that each register is written before it is read, on all paths.
  void checkPaths() {
    const std::size_t words = (f_.registers + 63) / 64;
    std::vector<std::uint64_t> in(f_.blocks.size() * words, ~std::uint64_t{0});
    std::vector<bool> seen(f_.blocks.size(), false);
    std::fill_n(in.begin(), words, 0);
    std::vector<std::uint32_t> work = {0};
    seen[0] = true;
    while (!work.empty() && error_.empty()) {
      const std::uint32_t b = work.back();
      work.pop_back();
      const auto first = in.begin() + static_cast<std::ptrdiff_t>(b * words);
      std::vector<std::uint64_t> written(first, first + static_cast<std::ptrdiff_t>(words));
      const auto read = [&](const Operation& o, Vreg v) {
        if ((written[v / 64] >> (v % 64) & 1U) == 0)
          fail(b, o, "v" + std::to_string(v) + " is read before it is written");
      };
      for (const Operation& o : f_.blocks[b].operations) {
        if (o.a.isRegister()) read(o, o.a.value);
        if (o.b.isRegister()) read(o, o.b.value);
        if (o.target == Operation::kNone) continue;
        if (o.cond != Cond::Always) read(o, o.target);
        written[o.target / 64] |= std::uint64_t{1} << (o.target % 64);
      }
      const auto follow = [&](std::uint32_t to) {
        bool changed = !seen[to];
        for (std::size_t w = 0; w < words; ++w) {
          std::uint64_t& old = in[to * words + w];
          changed = changed || (old & ~written[w]) != 0;
          old &= written[w];
        }
        if (!changed) return;
        seen[to] = true;
        work.push_back(to);
      };
      const Block& block = f_.blocks[b];
      if (block.exit != Block::Exit::End) follow(block.next);
      if (block.exit == Block::Exit::Branch) follow(block.taken);
    }
  }

  const Function& f_;
  std::string error_;
};

}  // namespace

std::string check(const Function& function) { return Verifier(function).run(); }

}  // namespace qpu::compiler
