// The cache of compiled kernels, keyed by their sources' content: in this process's memory, and
// on disk for later processes.
#ifndef QPU_SRC_RUNTIME_CACHE_HPP
#define QPU_SRC_RUNTIME_CACHE_HPP

#include <cstdint>
#include <memory>
#include <string>

#include "code/object.hpp"
#include "compiler/compile.hpp"
#include "lang/source.hpp"

namespace qpu::runtime {

// Serialises everything that the compiler reads from the kernel and the options.
std::string canonical(const detail::Source& source, const compiler::Options& options);

// Returns the compiler options from QPU_OPTIMISE (0..2). Throws BackendError for any other value.
compiler::Options compilerOptions();

// Returns the compiled kernel. Throws CompileError. Disk errors are ignored.
std::shared_ptr<const code::Object> compiled(const detail::Source& source,
                                             const compiler::Options& options);

// Counts where this process obtained its kernels.
struct CacheCounts {
  std::uint64_t fromMemory = 0;
  std::uint64_t fromDisk = 0;
  std::uint64_t compiled = 0;
};
CacheCounts cacheCounts();
void forgetCompiled();  // clears the in-memory cache

// The folder on disk: QPU_CACHE, by default pitorch/qpu in XDG_CACHE_HOME or ~/.cache. "" if the
// cache is disabled, or if the library was built without a build ID, which distinguishes its
// objects from those of other builds.
std::string cacheFolder();
// Maximum size of the folder in bytes.
constexpr std::uint64_t kCacheLimit = 64U << 20U;
// Deletes the least recently used files until `limit` is met, and temporary files that crashes
// left.
void pruneCache(const std::string& folder, std::uint64_t limit) noexcept;

}  // namespace qpu::runtime

#endif
