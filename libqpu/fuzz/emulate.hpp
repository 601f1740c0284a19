#ifndef QPU_FUZZ_EMULATE_HPP
#define QPU_FUZZ_EMULATE_HPP

#include <cstdint>
#include <vector>

#include "code/object.hpp"
#include "emu/emulator.hpp"
#include "mem/heap.hpp"

namespace fuzz {

// Runs compiled code on the emulator. The memory is that of all arrays.
inline qpu::emu::Report emulate(const qpu::code::Object& object, int qpus,
                                const std::vector<std::uint32_t>& arguments) {
  constexpr std::uint32_t spillStart = 0xf0000000U;
  const auto table = qpu::detail::Heap::instance().table();
  std::vector<std::uint32_t> spills(static_cast<std::size_t>(qpus) * object.spillBytes / 4 + 1);
  qpu::emu::Launch launch;
  for (const auto& block : table->blocks)
    launch.memory.push_back({block->start, block->bytes, block->host});
  launch.memory.push_back({spillStart, static_cast<std::uint32_t>(4 * spills.size()),
                           reinterpret_cast<unsigned char*>(spills.data())});
  launch.words = object.words.data();
  launch.count = object.words.size();
  launch.object = &object;
  launch.limit = 5'000'000;
  for (int q = 0; q < qpus; ++q)
    launch.uniforms.push_back(qpu::code::uniformStream(
        object, q, qpus, arguments.data(),
        spillStart + static_cast<std::uint32_t>(q) * object.spillBytes));
  return qpu::emu::run(launch);
}

}  // namespace fuzz

#endif
