#include "code/listing.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <stdexcept>

namespace qpu::code {
namespace {

constexpr std::uint64_t kClocksPerInstruction = 4;

template <class... T>
std::string format(const char* pattern, T... values) {
  std::array<char, 160> text{};
  (void)std::snprintf(text.data(), text.size(), pattern, values...);
  return text.data();
}

std::string counted(std::uint64_t n, const char* what) {
  return std::to_string(n) + " " + what + (n == 1 ? "" : "s");
}

std::string text(const Uniform& u) {
  switch (u.kind) {
    case Uniform::Kind::QpuNumber: return "QPU number";
    case Uniform::Kind::QpuCount: return "QPU count";
    case Uniform::Kind::Argument: return "argument " + std::to_string(u.value);
    case Uniform::Kind::SpillBase: return "spill area";
    case Uniform::Kind::Constant: return format("0x%x", u.value);
  }
  return {};
}

// Returns the width of a column that contains numbers up to `most`.
std::size_t digits(std::uint64_t most) { return std::to_string(most).size(); }

std::string inColumn(std::uint64_t n, std::size_t width) {
  const std::string text = std::to_string(n);
  return std::string(width - std::min(width, text.size()), ' ') + text;
}

unsigned share(std::size_t part, std::size_t whole) {
  return whole == 0 ? 0 : static_cast<unsigned>((part * 100 + whole / 2) / whole);
}

class Listing {
 public:
  Listing(const Object& object, const std::vector<Cycles>* profile, isa::Fields fields)
      : object_(object),
        profile_(profile),
        fields_(fields),
        instructionWidth_(digits(object.words.size())) {
    if (profile == nullptr) return;
    if (profile->size() != object.words.size())
      throw std::invalid_argument("the profile has " + counted(profile->size(), "instruction") +
                                  ", but the kernel has " + std::to_string(object.words.size()));
    for (const Cycles& c : *profile) {
      executed_ += c.executed;
      stalled_ += c.stalled;
      executedWidth_ = std::max(executedWidth_, digits(c.executed));
      stalledWidth_ = std::max(stalledWidth_, digits(c.stalled));
    }
  }

  std::string run() {
    head();
    for (std::size_t n = 0; n < object_.words.size(); ++n) {
      site(n);
      line(n);
    }
    foot();
    return out_;
  }

 private:
  void head() {
    out_ += "# kernel " + (object_.name.empty() ? "without a name" : object_.name) + ": " +
            counted(object_.words.size(), "instruction") + ", " +
            counted(object_.uniforms.size(), "uniform") + ", " +
            counted(object_.spillBytes, "byte") + " of spills per QPU" +
            (object_.usesSfu ? ", SFU" : "") + "\n";
    for (std::size_t n = 0; n < object_.uniforms.size(); ++n)
      out_ += "# uniform " + std::to_string(n) + ": " + text(object_.uniforms[n]) + "\n";
    out_ += "# instruction, clock if nothing stalls";
    out_ += profile_ == nullptr ? ", word\n" : ", executed, stalled clocks (model), word\n";
  }

  std::uint32_t siteOf(std::size_t n) const {
    const bool known = n < object_.siteOf.size() && object_.siteOf[n] < object_.sites.size();
    return known ? object_.siteOf[n] : Object::kNoSite;
  }

  void site(std::size_t n) {
    const std::uint32_t now = siteOf(n);
    if (now == (n == 0 ? Object::kNoSite : siteOf(n - 1))) return;
    out_ += "# " + (now == Object::kNoSite ? "added by the compiler" : object_.sites[now].description) +
            "\n";
  }

  void line(std::size_t n) {
    out_ += inColumn(n, instructionWidth_) + " " +
            inColumn(n * kClocksPerInstruction, instructionWidth_ + 1);
    if (profile_ != nullptr)
      out_ += " " + inColumn((*profile_)[n].executed, executedWidth_ + 1) + " " +
              inColumn((*profile_)[n].stalled, stalledWidth_);
    out_ += format("  %016llx  ", static_cast<unsigned long long>(object_.words[n]));
    out_ += isa::disassemble(object_.words[n], fields_) + target(n) + "\n";
  }

  // Returns a comment that gives the target of a branch.
  std::string target(std::size_t n) const {
    const auto i = isa::decode(object_.words[n]);
    if (!i || i->form != isa::Form::Branch || !i->branchRelative || i->branchRegister) return {};
    const std::int64_t bytes = static_cast<std::int32_t>(i->immediate);
    if (bytes % 8 != 0) return {};
    return "  # to " + std::to_string(static_cast<std::int64_t>(n) + 4 + bytes / 8);
  }

  void foot() {
    std::size_t dual = 0;
    std::size_t nops = 0;
    for (const isa::Word word : object_.words) {
      const auto i = isa::decode(word);
      if (!i) continue;
      if (*i == isa::Instruction()) ++nops;
      if (i->opAdd != isa::AddOp::Nop && i->opMul != isa::MulOp::Nop) ++dual;
    }
    const std::size_t count = object_.words.size();
    out_ += "# " + counted(count, "instruction") + ", " +
            std::to_string(dual) + format(" (%u %%)", share(dual, count)) + " with both pipes, " +
            counted(nops, "nop") + "\n";
    if (profile_ == nullptr) return;
    out_ += "# " + std::to_string(executed_) + " executed, " + std::to_string(stalled_) +
            " clocks stalled, all QPUs together (model, not measured on hardware)\n";
  }

  const Object& object_;
  const std::vector<Cycles>* profile_;
  isa::Fields fields_;
  std::size_t instructionWidth_;
  std::size_t executedWidth_ = 1, stalledWidth_ = 1;
  std::uint64_t executed_ = 0, stalled_ = 0;
  std::string out_;
};

}  // namespace

std::string listing(const Object& object, const std::vector<Cycles>* profile,
                    isa::Fields fields) {
  return Listing(object, profile, fields).run();
}

}  // namespace qpu::code
