#include "runtime/sha256.hpp"

#include <array>
#include <cstdint>

namespace qpu::runtime {
namespace {

using Hash = std::array<std::uint32_t, 8>;

constexpr std::array<std::uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t rotated(std::uint32_t x, unsigned n) { return x >> n | x << (32 - n); }

void absorb(Hash& hash, const unsigned char* block) {
  std::array<std::uint32_t, 64> w{};
  for (std::size_t i = 0; i < 16; ++i)
    w[i] = static_cast<std::uint32_t>(block[4 * i]) << 24U |
           static_cast<std::uint32_t>(block[4 * i + 1]) << 16U |
           static_cast<std::uint32_t>(block[4 * i + 2]) << 8U | block[4 * i + 3];
  for (std::size_t i = 16; i < 64; ++i) {
    const std::uint32_t a = w[i - 15];
    const std::uint32_t b = w[i - 2];
    w[i] = w[i - 16] + (rotated(a, 7) ^ rotated(a, 18) ^ a >> 3U) + w[i - 7] +
           (rotated(b, 17) ^ rotated(b, 19) ^ b >> 10U);
  }
  Hash h = hash;
  for (std::size_t i = 0; i < 64; ++i) {
    const std::uint32_t t1 = h[7] + (rotated(h[4], 6) ^ rotated(h[4], 11) ^ rotated(h[4], 25)) +
                             ((h[4] & h[5]) ^ (~h[4] & h[6])) + kRound[i] + w[i];
    const std::uint32_t t2 = (rotated(h[0], 2) ^ rotated(h[0], 13) ^ rotated(h[0], 22)) +
                             ((h[0] & h[1]) ^ (h[0] & h[2]) ^ (h[1] & h[2]));
    h = {t1 + t2, h[0], h[1], h[2], h[3] + t1, h[4], h[5], h[6]};
  }
  for (std::size_t i = 0; i < 8; ++i) hash[i] += h[i];
}

}  // namespace

std::string sha256(std::string_view data) {
  Hash hash = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
               0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const auto* const bytes = reinterpret_cast<const unsigned char*>(data.data());
  std::size_t at = 0;
  for (; data.size() - at >= 64; at += 64) absorb(hash, bytes + at);
  std::array<unsigned char, 128> last{};
  const std::size_t rest = data.size() - at;
  for (std::size_t i = 0; i < rest; ++i) last[i] = bytes[at + i];
  last[rest] = 0x80;
  const std::size_t end = rest < 56 ? 64 : 128;
  const std::uint64_t bits = 8 * static_cast<std::uint64_t>(data.size());
  for (std::size_t i = 0; i < 8; ++i)
    last[end - 1 - i] = static_cast<unsigned char>(bits >> (8 * i) & 0xffU);
  absorb(hash, last.data());
  if (end == 128) absorb(hash, last.data() + 64);

  std::string text;
  for (const std::uint32_t word : hash)
    for (unsigned shift = 32; shift > 0;) {
      shift -= 4;
      text += "0123456789abcdef"[word >> shift & 0xfU];
    }
  return text;
}

}  // namespace qpu::runtime
