// The board that the emulator models. QPU_BOARD selects the board, and QPU_MODEL selects the
// board's parameters.
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "emu/model.hpp"
#include "error_facts.hpp"
#include "qpu/error.h"
#include "runtime/executable.hpp"

namespace qpu::runtime {
namespace {

const char* environment(const char* name) {
  const char* const value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): only read
  return value == nullptr || *value == '\0' ? nullptr : value;
}

// A board whose parameters come from a file. The board is kept until the process ends.
struct Loaded {
  std::string name;
  emu::Board board;
};

const emu::Board& load(const emu::Board& base, bool isChosen, const char* path) {
  static std::mutex mutex;
  static std::map<std::pair<const emu::Board*, std::string>, std::unique_ptr<Loaded>>& all =
      *new std::map<std::pair<const emu::Board*, std::string>, std::unique_ptr<Loaded>>;
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Loaded>& cached = all[{isChosen ? &base : nullptr, path}];
  if (cached != nullptr) return cached->board;
  std::ifstream file(path);
  std::string text;
  for (std::string line; std::getline(file, line);) text += line + '\n';
  if (!file.is_open() || file.bad())
    detail::raise<BackendError>("QPU_MODEL=" + std::string(path) +
                                " cannot be read; expected fast, slow, or a file that "
                                "qpu-calibrate wrote");
  auto made = std::make_unique<Loaded>();
  made->board = base;
  const std::string source = emu::applyFile(text, path, isChosen, made->board);
  made->name = std::string(made->board.name) + " by " + path + ", " +
               (source.empty() ? "source not stated" : source);
  made->board.name = made->name.c_str();
  cached = std::move(made);
  return cached->board;
}

}  // namespace

const emu::Board& emulatedBoard() {
  const char* const named = environment("QPU_BOARD");
  const emu::Board* const board =
      named == nullptr ? &emu::kDefaultBoard : emu::findBoard(named);
  if (board == nullptr)
    detail::raise<BackendError>("QPU_BOARD=" + std::string(named) +
                                " is not a board of the emulator; valid boards are pi1, zero, pi2, "
                                "pi3, zero2");
  const char* const model = environment("QPU_MODEL");
  if (model == nullptr) return *board;
  if (std::strcmp(model, "fast") == 0) return *emu::findBoard(board->name, emu::Bound::Fast);
  if (std::strcmp(model, "slow") == 0) return *emu::findBoard(board->name, emu::Bound::Slow);
  return load(*board, named != nullptr, model);
}

}  // namespace qpu::runtime
