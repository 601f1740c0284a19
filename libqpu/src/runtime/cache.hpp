// Compiled kernels by the content of their source: in this process, and on disk
// for the next ones.
#ifndef QPU_SRC_RUNTIME_CACHE_HPP
#define QPU_SRC_RUNTIME_CACHE_HPP

#include <cstdint>
#include <memory>
#include <string>

#include "code/object.hpp"
#include "compiler/compile.hpp"
#include "lang/source.hpp"

namespace qpu::runtime {

// Everything of the kernel and the options that the compiler looks at, as bytes.
std::string canonical(const detail::Source& source, const compiler::Options& options);

// By QPU_OPTIMISE, 0..2. Throws BackendError for another value.
compiler::Options compilerOptions();

// Throws CompileError. Failures of the disk are no errors.
std::shared_ptr<const code::Object> compiled(const detail::Source& source,
                                             const compiler::Options& options);

// How kernels were come by in this process.
struct CacheCounts {
  std::uint64_t fromMemory = 0;
  std::uint64_t fromDisk = 0;
  std::uint64_t compiled = 0;
};
CacheCounts cacheCounts();
void forgetCompiled();  // those in memory

// The folder on disk: QPU_CACHE, else pitorch/qpu in XDG_CACHE_HOME or ~/.cache;
// "" when it is switched off, or this build of the library has no identity by
// which to tell its objects from those of another build.
std::string cacheFolder();
// Bytes that the folder may hold.
constexpr std::uint64_t kCacheLimit = 64U << 20U;
// Deletes the longest unused until `limit` is kept, and leftovers of crashes.
void pruneCache(const std::string& folder, std::uint64_t limit) noexcept;

}  // namespace qpu::runtime

#endif
