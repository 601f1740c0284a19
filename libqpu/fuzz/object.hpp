#ifndef QPU_FUZZ_OBJECT_HPP
#define QPU_FUZZ_OBJECT_HPP

#include <cstdint>
#include <string>
#include <vector>

#include "code/object.hpp"
#include "emu/emulator.hpp"
#include "isa/text.hpp"
#include "mem/heap.hpp"
#include "runtime/executable.hpp"

namespace fuzz {

inline std::string listing(const qpu::code::Object& object) {
  std::string text;
  for (std::size_t i = 0; i < object.words.size(); ++i)
    text += std::to_string(i) + ": " + qpu::isa::disassemble(object.words[i]) + "\n";
  return text;
}

// Runs compiled code on the emulator. The program can access all arrays and the spill areas.
inline qpu::emu::Report emulate(const qpu::code::Object& object, int qpus,
                                const std::vector<std::uint32_t>& arguments,
                                std::uint64_t instructionLimit = 5'000'000) {
  const auto table = qpu::detail::Heap::instance().table();
  std::vector<std::uint32_t> spills(static_cast<std::size_t>(qpus) * object.spillBytes / 4 + 1);
  qpu::emu::Launch launch;
  launch.memory.push_back({qpu::runtime::kEmulatedSpill, static_cast<std::uint32_t>(4 * spills.size()),
                           reinterpret_cast<unsigned char*>(spills.data())});
  for (const auto& block : table->blocks)
    launch.memory.push_back({block->start, block->bytes, block->host});
  launch.words = object.words.data();
  launch.count = object.words.size();
  launch.object = &object;
  launch.limit = instructionLimit;
  for (int q = 0; q < qpus; ++q)
    launch.uniforms.push_back(qpu::code::uniformStream(
        object, q, qpus, arguments.data(),
        qpu::runtime::kEmulatedSpill + static_cast<std::uint32_t>(q) * object.spillBytes));
  return qpu::emu::run(launch);
}

}  // namespace fuzz

#endif
