// The cache of compiled kernels. The key is a hash of this library's build ID, the kernel's source
// and the compiler options. The cache is in this process's memory and also on disk, where later
// processes can use it.
#ifndef QPU_SRC_RUNTIME_CACHE_HPP
#define QPU_SRC_RUNTIME_CACHE_HPP

#include <cstdint>
#include <memory>
#include <string>

#include "code/object.hpp"
#include "compiler/compile.hpp"
#include "lang/source.hpp"

namespace qpu::runtime {

// Serialises everything that the compiler reads from the kernel's source and from the options.
std::string canonical(const detail::Source& source, const compiler::Options& options);

// Returns the compiler options that QPU_OPTIMISE (0..2) selects. Throws BackendError for any
// other value.
compiler::Options compilerOptions();

// Returns the compiled kernel. Throws CompileError if the kernel cannot be compiled. Disk errors
// are ignored.
std::shared_ptr<const code::Object> compiled(const detail::Source& source,
                                             const compiler::Options& options);

// The number of kernels that this process obtained from each source.
struct CacheCounts {
  std::uint64_t fromMemory = 0;
  std::uint64_t fromDisk = 0;
  std::uint64_t compiled = 0;
};
CacheCounts cacheCounts();
void forgetCompiled();  // clears the in-memory cache

// Returns the cache's folder on disk. The folder is QPU_CACHE or, by default, pitorch/qpu in
// XDG_CACHE_HOME or ~/.cache. Returns "" if the cache is disabled or if the library was built
// without a build ID. The build ID is necessary to distinguish this library's objects from the
// objects of other builds.
std::string cacheFolder();
// The maximum size of the folder in bytes.
constexpr std::uint64_t kCacheLimit = 64U << 20U;
// Deletes the least recently used files until the folder has at most `limit` bytes. Also deletes
// temporary files that remain after crashes.
void pruneCache(const std::string& folder, std::uint64_t limit) noexcept;

}  // namespace qpu::runtime

#endif
