// Fuzzes the reader of saved kernels with arbitrary data, both as a complete file and as the
// content of a file with a valid checksum. Every accepted object must be consistent and must have a
// listing. Saving an accepted object must produce the bytes from which the object was read.
#include <cstdint>
#include <string>
#include <string_view>

#include "code/listing.hpp"
#include "code/serialise.hpp"
#include "fuzz/check.hpp"

namespace {

void tryLoading(std::string_view file) {
  const auto object = qpu::code::load(file);
  if (!object) return;
  check(object->siteOf.size() == object->words.size());
  for (const std::uint32_t site : object->siteOf)
    check(site == qpu::code::Object::kNoSite || site < object->sites.size());
  check(qpu::code::save(*object) == file);
  check(!qpu::code::listing(*object).empty());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string bytes(data, data + size);
  tryLoading(bytes);
  tryLoading(qpu::code::seal(bytes));
  return 0;
}
