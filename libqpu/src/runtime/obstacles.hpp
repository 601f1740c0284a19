// Obstacles that prevent kernels from running on the QPUs. Each Obstacle object also says how to
// remove the obstacle. Obstacles are found when the system is inspected, or when an operation
// fails.
#ifndef QPU_SRC_RUNTIME_OBSTACLES_HPP
#define QPU_SRC_RUNTIME_OBSTACLES_HPP

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/board.hpp"
#include "runtime/system.hpp"

namespace qpu::runtime {

struct Obstacle {
  std::string what;
  std::string fix;
};

// Returns "what; fix".
std::string text(const Obstacle& obstacle);
// Throws BackendError with the obstacle's text.
[[noreturn]] void raiseObstacle(const Obstacle& obstacle);

std::vector<Obstacle> obstacles(const Board& board, const System& system);

// `error` is a value of errno.
Obstacle cannotOpen(const std::string& path, int error);
Obstacle cannotMap(const std::string& what, int error);
Obstacle mailboxFails(std::uint32_t tag, int error);
Obstacle tagRefused(std::uint32_t tag, std::uint32_t code);
Obstacle enableRefused(const System& system);
Obstacle noV3d(std::uint32_t ident);
Obstacle v3dBusy(const std::string& registers);
Obstacle outOfGpuMemory(std::uint32_t bytes, const System& system);
Obstacle wrongMapping(std::uint32_t bus, std::uint32_t physical);

}  // namespace qpu::runtime

#endif
