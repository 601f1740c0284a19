#include "compiler/compile.hpp"

#include <optional>
#include <string>
#include <utility>

#include "compiler/coalesce_recurrences.hpp"
#include "compiler/emit.hpp"
#include "compiler/register_pressure.hpp"
#include "compiler/simplify_cfg.hpp"
#include "compiler/spill.hpp"
#include "error_facts.hpp"

namespace qpu::compiler {
namespace {

constexpr std::uint32_t kLeastRegisters = 7;  // the lowest register limit for which spilling is tried
// The overlap of the DMA transfers of several QPUs is known only at run time. If many QPUs run,
// however, they wait for the busier DMA engine. Code that the front end has optimised and that
// spills to memory is therefore used only if its DMA time on the busier engine is at most this
// fraction of the DMA time of code that the front end has not optimised. The latter has the same
// transfers as code at level 0.
constexpr double kMostDmaTime = 0.9;

// Thrown if there are not enough registers even after spilling.
struct OutOfRegisters {
  std::string kernel;
  bool usesVpmByHand;
  std::uint32_t needed, registers;
};
[[noreturn]] void fail(const OutOfRegisters& e) {
  detail::raise<CompileError>(
      "kernel '" + e.kernel + "' does not fit into " + std::to_string(e.registers) + " registers: up to " +
          std::to_string(e.needed) + " vectors are live at once, and some instructions need copies of them" +
          (e.usesVpmByHand ? "; vectors cannot be spilled to memory because the kernel sets up the VPM or its DMA "
                             "itself"
                           : "") +
          ". Use fewer variables at the same time",
      {e.kernel, "", -1, 0});
}

Emitted emitWithCost(Function function, const Options& options) {
  simplifyCfg(function);
  coalesceRecurrences(function);
  const std::uint32_t registers = 2 * static_cast<std::uint32_t>(options.fileRegisters);
  const std::uint32_t most = pressure(function);
  if (most <= registers) {
    std::optional<Emitted> emitted = emitWithoutSpilling(function, options);
    if (emitted) return std::move(*emitted);
  }
  // Rematerialisation costs less than spilling to memory and is possible in every kernel. A lower
  // register limit leaves more registers to the scheduler but results in more spill code.
  for (const bool memory : {false, true}) {
    if (memory && function.usesVpmByHand) break;
    if (memory && (function.keepsWriteWindow || function.mergesStores)) throw SpillsNeeded();
    for (const std::uint32_t spared : {0U, 1U, 2U, 4U, 8U, 16U, 24U, 32U, 40U}) {
      if (spared + kLeastRegisters > registers) break;
      Function smaller = function;
      std::uint32_t bytes = 0;
      if (!spill(smaller, registers - spared, memory, bytes)) continue;
      std::optional<Emitted> emitted = emitWithoutSpilling(smaller, options);
      if (!emitted) continue;
      emitted->object.spillBytes = bytes;
      emitted->hasSpilled = true;
      return std::move(*emitted);
    }
  }
  throw OutOfRegisters{function.name, function.usesVpmByHand, most, registers};
}

// Returns true if code from level `front` of the front end is better than code from a higher level.
bool isBetter(const Emitted& other, int front, const Emitted& best) {
  if (other.cost < best.cost) return true;
  return front == 0 && best.object.spillBytes > 0 && kMostDmaTime * other.dmaTime < best.dmaTime;
}

// `front` is the front end's optimisation level.
Emitted compileAt(const detail::Source& source, const Options& options, int front) {
  Options selecting = options;
  selecting.level = front;
  try {
    return emitWithCost(select(source, selecting), options);
  } catch (const SpillsNeeded&) {
    selecting.keepWriteWindow = false;
    selecting.mergeStores = false;
    return emitWithCost(select(source, selecting), options);
  }
}

}  // namespace

code::Object emit(Function function, const Options& options) {
  try {
    return emitWithCost(std::move(function), options).object;
  } catch (const OutOfRegisters& e) {
    fail(e);
  }
}

code::Object compile(const detail::Source& source, const Options& options) {
  std::optional<Emitted> best;
  std::optional<OutOfRegisters> failure;
  // The front end's optimisations change which vectors are spilled, so code from a lower level of
  // the front end may be faster.
  for (int front = options.level; front >= 0 && (!best || best->hasSpilled); --front) {
    try {
      Emitted other = compileAt(source, options, front);
      if (!best || isBetter(other, front, *best)) best = std::move(other);
    } catch (const OutOfRegisters& e) {
      if (!failure) failure = e;
    }
  }
  if (!best) fail(*failure);
  return std::move(best->object);
}

}  // namespace qpu::compiler
