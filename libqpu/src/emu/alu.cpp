#include "emu/alu.hpp"

#include <array>

namespace qpu::emu {
namespace {

using interp::asSigned;
using interp::map;
using isa::AddOp;
using isa::MulOp;

// The slow but exact path for float operations. The function is not inlined, so that the compiler
// cannot move a float operation across a change of the rounding mode.
using Exact = void (*)(Vector&, const Vector&, const Vector&);
[[gnu::noinline]] void exactly(Exact f, Vector& r, const Vector& a, const Vector& b) {
  [[maybe_unused]] const HostRounding host;
  f(r, a, b);
}

void exactFtoi(Vector& r, const Vector& a, const Vector& /*b*/) { map(r, a, interp::ftoi); }

#ifdef QPU_EMU_SSE2

constexpr bool kHostFloats = interp::kFmulTruncates;
constexpr std::size_t kQuad = 4;

__m128 loadFloats(const Vector& v, std::size_t at) {
  return _mm_load_ps(reinterpret_cast<const float*>(v.e.data() + at));
}
__m128i loadWords(const Vector& v, std::size_t at) {
  return _mm_load_si128(reinterpret_cast<const __m128i*>(v.e.data() + at));
}
void storeFloats(Vector& v, std::size_t at, __m128 x) {
  _mm_store_ps(reinterpret_cast<float*>(v.e.data() + at), x);
}
void storeWords(Vector& v, std::size_t at, __m128i x) {
  _mm_store_si128(reinterpret_cast<__m128i*>(v.e.data() + at), x);
}

// The fast path uses the host's float instructions with rounding toward zero. An overflow then
// produces the greatest finite float, and operands that are Inf or NaN produce Inf or NaN. The
// exact path handles these cases, and also the few results that are exactly the greatest finite
// float. Adding +0 turns -0 into +0.
template <typename F>
inline void hostFloats(Vector& r, const Vector& a, const Vector& b, Exact rare, F f) {
  const __m128 magnitude = _mm_castsi128_ps(_mm_set1_epi32(0x7fffffff));
  const __m128 most = _mm_castsi128_ps(_mm_set1_epi32(0x7f7fffff));
  __m128 odd = _mm_setzero_ps();
  for (std::size_t i = 0; i < kElements; i += kQuad) {
    const __m128 x = _mm_add_ps(f(loadFloats(a, i), loadFloats(b, i)), _mm_setzero_ps());
    odd = _mm_or_ps(odd, _mm_cmpnlt_ps(_mm_and_ps(x, magnitude), most));
    storeFloats(r, i, x);
  }
  if (_mm_movemask_ps(odd) != 0) exactly(rare, r, a, b);
}

void fadd(Vector& r, const Vector& a, const Vector& b) {
  hostFloats(r, a, b, interp::vectorFadd, [](__m128 x, __m128 y) { return _mm_add_ps(x, y); });
}
void fsub(Vector& r, const Vector& a, const Vector& b) {
  hostFloats(r, a, b, interp::vectorFsub, [](__m128 x, __m128 y) { return _mm_sub_ps(x, y); });
}
void fmul(Vector& r, const Vector& a, const Vector& b) {
  if constexpr (kHostFloats)
    hostFloats(r, a, b, interp::vectorFmul, [](__m128 x, __m128 y) { return _mm_mul_ps(x, y); });
  else
    exactly(interp::vectorFmul, r, a, b);
}
void itof(Vector& r, const Vector& a) {
  for (std::size_t i = 0; i < kElements; i += kQuad)
    storeFloats(r, i, _mm_cvtepi32_ps(loadWords(a, i)));
}
// The host's conversion returns 0x80000000 for values that are out of range.
void ftoi(Vector& r, const Vector& a) {
  const __m128i indefinite = _mm_set1_epi32(INT32_MIN);
  __m128i odd = _mm_setzero_si128();
  for (std::size_t i = 0; i < kElements; i += kQuad) {
    const __m128i x = _mm_cvttps_epi32(loadFloats(a, i));
    odd = _mm_or_si128(odd, _mm_cmpeq_epi32(x, indefinite));
    storeWords(r, i, x);
  }
  if (_mm_movemask_epi8(odd) != 0) exactly(exactFtoi, r, a, a);
}

// Returns a mask in which bit i is the sign bit of element i. f(i) returns four elements,
// starting with element i.
template <typename F>
inline Mask signs(F f) {
  const __m128i low = _mm_packs_epi32(f(0), f(kQuad));
  const __m128i high = _mm_packs_epi32(f(2 * kQuad), f(3 * kQuad));
  return static_cast<Mask>(_mm_movemask_epi8(_mm_packs_epi16(low, high)));
}

// Compares a and b as unsigned numbers. The sign bit of each result element is set if a < b.
inline __m128i below(__m128i a, __m128i b) {
  const __m128i bias = _mm_set1_epi32(INT32_MIN);
  return _mm_cmplt_epi32(_mm_xor_si128(a, bias), _mm_xor_si128(b, bias));
}

struct alignas(16) QuadMask {
  std::array<std::uint32_t, kQuad> e;
};
constexpr std::array<QuadMask, 16> quadMasks() {
  std::array<QuadMask, 16> all{};
  for (unsigned bits = 0; bits < 16; ++bits)
    for (unsigned i = 0; i < kQuad; ++i)
      all[bits].e[i] = (bits >> i & 1U) != 0 ? UINT32_MAX : 0U;
  return all;
}
constexpr std::array<QuadMask, 16> kQuadMasks = quadMasks();

#else

void fadd(Vector& r, const Vector& a, const Vector& b) {
  exactly(interp::vectorFadd, r, a, b);
}
void fsub(Vector& r, const Vector& a, const Vector& b) {
  exactly(interp::vectorFsub, r, a, b);
}
void fmul(Vector& r, const Vector& a, const Vector& b) {
  exactly(interp::vectorFmul, r, a, b);
}
void itof(Vector& r, const Vector& a) { map(r, a, interp::itof); }
void ftoi(Vector& r, const Vector& a) { exactly(exactFtoi, r, a, a); }

#endif

template <typename F>
inline Mask where(F f) {
  Mask m = 0;
  for (std::size_t i = 0; i < kElements; ++i) m |= (f(i) ? Mask{1} : Mask{0}) << i;
  return m;
}

// Shifts all 16 elements by the same constant amount.
template <typename F>
inline void shift(Vector& r, const Vector& a, const Vector& b, F f) {
  const std::uint32_t n = b.e[0] & 31U;
  map(r, a, [n, f](std::uint32_t x) { return f(x, n); });
}

}  // namespace

void add(std::uint8_t op, const Vector& a, const Vector& b, Vector& r) {
  switch (op) {
    case kShrBy: shift(r, a, b, [](auto x, auto n) { return x >> n; }); return;
    case kAsrBy:
      shift(r, a, b, [](auto x, auto n) { return static_cast<std::uint32_t>(asSigned(x) >> n); });
      return;
    case kShlBy: shift(r, a, b, [](auto x, auto n) { return x << n; }); return;
    default: break;
  }
  switch (static_cast<AddOp>(op)) {
    case AddOp::FAdd: fadd(r, a, b); return;
    case AddOp::FSub: fsub(r, a, b); return;
    case AddOp::FMin: map(r, a, b, interp::fmin); return;
    case AddOp::FMax: map(r, a, b, interp::fmax); return;
    case AddOp::FMinAbs: map(r, a, b, interp::fminabs); return;
    case AddOp::FMaxAbs: map(r, a, b, interp::fmaxabs); return;
    case AddOp::FtoI: ftoi(r, a); return;
    case AddOp::ItoF: itof(r, a); return;
    case AddOp::Add: map(r, a, b, [](auto x, auto y) { return x + y; }); return;
    case AddOp::Sub: map(r, a, b, [](auto x, auto y) { return x - y; }); return;
    case AddOp::Shr: map(r, a, b, interp::shr); return;
    case AddOp::Asr: map(r, a, b, interp::asr); return;
    case AddOp::Ror: map(r, a, b, interp::ror); return;
    case AddOp::Shl: map(r, a, b, interp::shl); return;
    case AddOp::Min:
      map(r, a, b, [](auto x, auto y) { return asSigned(x) > asSigned(y) ? y : x; });
      return;
    case AddOp::Max:
      map(r, a, b, [](auto x, auto y) { return asSigned(x) > asSigned(y) ? x : y; });
      return;
    case AddOp::And: map(r, a, b, [](auto x, auto y) { return x & y; }); return;
    case AddOp::Or: map(r, a, b, [](auto x, auto y) { return x | y; }); return;
    case AddOp::Xor: map(r, a, b, [](auto x, auto y) { return x ^ y; }); return;
    case AddOp::Not: map(r, a, [](auto x) { return ~x; }); return;
    case AddOp::Clz: map(r, a, interp::clz); return;
    case AddOp::V8AddS: map(r, a, b, interp::v8adds); return;
    case AddOp::V8SubS: map(r, a, b, interp::v8subs); return;
    default: return;
  }
}

void multiply(isa::MulOp op, const Vector& a, const Vector& b, Vector& r) {
  switch (op) {
    case MulOp::FMul: fmul(r, a, b); return;
    case MulOp::Mul24: map(r, a, b, interp::mul24); return;
    case MulOp::V8MulD: map(r, a, b, interp::v8muld); return;
    case MulOp::V8Min:
      if (&a == &b)
        r = a;
      else
        map(r, a, b, interp::v8min);
      return;
    case MulOp::V8Max: map(r, a, b, interp::v8max); return;
    case MulOp::V8AddS: map(r, a, b, interp::v8adds); return;
    case MulOp::V8SubS: map(r, a, b, interp::v8subs); return;
    default: return;
  }
}

void special(std::uint8_t address, const Vector& a, Vector& r) {
  exactly(
      address == isa::address::kSfuRecip
          ? [](Vector& t, const Vector& x, const Vector&) { map(t, x, interp::recip); }
      : address == isa::address::kSfuRecipSqrt
          ? [](Vector& t, const Vector& x, const Vector&) { map(t, x, interp::recipSqrt); }
      : address == isa::address::kSfuExp
          ? [](Vector& t, const Vector& x, const Vector&) { map(t, x, interp::exp2); }
          : [](Vector& t, const Vector& x, const Vector&) { map(t, x, interp::log2); },
      r, a, a);
}

void rotate(Vector& v, unsigned n, bool full) {
  if (full) {
    interp::rotateUp(v, v, n);
    return;
  }
  Vector r;
  for (std::size_t i = 0; i < kElements; ++i) r.e[i] = v.e[(i & ~3U) | ((i - n) & 3U)];
  v = r;
}

#ifdef QPU_EMU_SSE2

Mask negative(const Vector& v) {
  return signs([&](std::size_t i) { return loadWords(v, i); });
}
Mask zero(const Vector& v) {
  return signs(
      [&](std::size_t i) { return _mm_cmpeq_epi32(loadWords(v, i), _mm_setzero_si128()); });
}
void write(Vector& target, const Vector& value, Mask where) {
  for (std::size_t i = 0; i < kElements; i += kQuad) {
    const __m128i m =
        _mm_load_si128(reinterpret_cast<const __m128i*>(kQuadMasks[where >> i & 15U].e.data()));
    storeWords(target, i,
               _mm_or_si128(_mm_and_si128(m, loadWords(value, i)),
                            _mm_andnot_si128(m, loadWords(target, i))));
  }
}

#else

Mask negative(const Vector& v) {
  return where([&](std::size_t i) { return interp::isNegative(v.e[i]); });
}
Mask zero(const Vector& v) {
  return where([&](std::size_t i) { return v.e[i] == 0; });
}
void write(Vector& target, const Vector& value, Mask where) {
  for (std::size_t i = 0; i < kElements; ++i) {
    const std::uint32_t m = interp::mask((where >> i & 1U) != 0);
    target.e[i] = (value.e[i] & m) | (target.e[i] & ~m);
  }
}

#endif

Mask carry(AddOp op, const Vector& a, const Vector& b, const Vector& r) {
  const auto bitShiftedOut = [&](bool left) {
    return where([&](std::size_t i) {
      const std::uint32_t n = b.e[i] & 31U;
      return n != 0 && (a.e[i] >> (left ? 32 - n : n - 1) & 1U) != 0;
    });
  };
  switch (op) {
    case AddOp::FAdd:
    case AddOp::FSub:
    case AddOp::ItoF: return ~(negative(r) | zero(r)) & kAllElements;
    case AddOp::FMin:
    case AddOp::FMax:
      return where([&](std::size_t i) { return interp::order(a.e[i]) > interp::order(b.e[i]); });
    case AddOp::FMinAbs:
    case AddOp::FMaxAbs:
      return where([&](std::size_t i) {
        return (a.e[i] & interp::kMagnitude) > (b.e[i] & interp::kMagnitude);
      });
#ifdef QPU_EMU_SSE2
    case AddOp::Add:
      return signs([&](std::size_t i) { return below(loadWords(r, i), loadWords(a, i)); });
    case AddOp::Sub:
      return signs([&](std::size_t i) { return below(loadWords(a, i), loadWords(b, i)); });
    case AddOp::Min:
    case AddOp::Max:
      return signs(
          [&](std::size_t i) { return _mm_cmpgt_epi32(loadWords(a, i), loadWords(b, i)); });
#else
    case AddOp::Add: return where([&](std::size_t i) { return r.e[i] < a.e[i]; });
    case AddOp::Sub: return where([&](std::size_t i) { return a.e[i] < b.e[i]; });
    case AddOp::Min:
    case AddOp::Max:
      return where([&](std::size_t i) { return asSigned(a.e[i]) > asSigned(b.e[i]); });
#endif
    case AddOp::Shr:
    case AddOp::Asr: return bitShiftedOut(false);
    case AddOp::Shl: return bitShiftedOut(true);
    default: return 0;
  }
}

Mask carry(MulOp op, const Vector& a, const Vector& b) {
  if (op != MulOp::Mul24) return 0;
  return where([&](std::size_t i) {
    const std::uint64_t product =
        std::uint64_t{a.e[i] & 0xffffffU} * std::uint64_t{b.e[i] & 0xffffffU};
    return product > interp::kMul24CarryAbove;
  });
}

namespace {

// Packs a byte into a word. Modes 4..7 and 12..15 replace one byte of `old`. Modes 3 and 11
// replace all bytes.
std::uint32_t placeByte(unsigned mode, std::uint32_t byte, std::uint32_t old) {
  if ((mode & 7U) == 3) return byte * 0x01010101U;
  const unsigned at = 8 * (mode & 3U);
  return (old & ~(0xffU << at)) | (byte << at);
}
std::uint32_t placeHalf(unsigned mode, std::uint32_t half, std::uint32_t old) {
  return (mode & 1U) != 0 ? (old & 0xffff0000U) | half : (old & 0xffffU) | (half << 16U);
}

std::uint32_t clamped(std::uint32_t value, std::int32_t least, std::int32_t most) {
  const std::int32_t x = asSigned(value);
  return static_cast<std::uint32_t>(x < least ? least : x > most ? most : x);
}

bool isHalfMode(unsigned mode) { return (mode & 7U) == 1 || (mode & 7U) == 2; }

// If `overflow` is true, the operation has overflowed, and the sign of its operand b selects the
// upper or the lower limit.
std::uint32_t packInteger(unsigned mode, std::uint32_t value, std::uint32_t old, bool overflow,
                          bool negativeB) {
  const bool clamps = mode >= 9;
  if (mode == 8) return !overflow ? value : negativeB ? 0x80000000U : 0x7fffffffU;
  if (isHalfMode(mode)) {
    const std::uint32_t limit = negativeB ? 0x8000U : 0x7fffU;
    const std::uint32_t half =
        (clamps ? clamped(value, INT16_MIN, INT16_MAX) : value) & 0xffffU;
    return placeHalf(mode, !overflow ? half : clamps ? limit & half : limit, old);
  }
  const std::uint32_t limit = negativeB ? 0U : 0xffU;
  const std::uint32_t byte = (clamps ? clamped(value, 0, UINT8_MAX) : value) & 0xffU;
  return placeByte(mode, !overflow ? byte : clamps ? limit & byte : limit, old);
}

}  // namespace

Vector packA(unsigned mode, const Vector& value, const Vector& old, const PackSource& source) {
  Vector r;
  const bool adds = source.op == AddOp::Add;
  const bool canOverflow = adds || source.op == AddOp::Sub;
  for (std::size_t i = 0; i < kElements; ++i) {
    const std::uint32_t x = value.e[i];
    if (source.isFloat && isHalfMode(mode)) {
      r.e[i] = placeHalf(mode, interp::toHalf(x), old.e[i]);
      continue;
    }
    bool overflow = false;
    bool negativeB = false;
    if (canOverflow) {
      const std::uint32_t a = source.a->e[i];
      const std::uint32_t b = source.b->e[i];
      const std::uint32_t changed = adds ? ~(a ^ b) & (a ^ x) : (a ^ b) & (a ^ x);
      overflow = interp::isNegative(changed);
      negativeB = interp::isNegative(b);
    }
    r.e[i] = packInteger(mode, x, old.e[i], overflow, negativeB);
  }
  return r;
}

Vector packColour(unsigned mode, const Vector& value, const Vector& old) {
  Vector r;
  for (std::size_t i = 0; i < kElements; ++i)
    r.e[i] = placeByte(mode, interp::toColour(value.e[i]), old.e[i]);
  return r;
}

Vector unpack(unsigned mode, const Vector& value, bool asFloat) {
  Vector r;
  for (std::size_t i = 0; i < kElements; ++i) {
    const std::uint32_t x = value.e[i];
    if (mode == 1 || mode == 2) {
      const std::uint32_t half = (mode == 1 ? x : x >> 16U) & 0xffffU;
      const std::uint32_t extended = (half ^ 0x8000U) - 0x8000U;
      r.e[i] = asFloat ? interp::fromHalf(half) : extended;
    } else if (mode == 3) {
      r.e[i] = (x >> 24U) * 0x01010101U;
    } else {
      const std::uint32_t byte = x >> (8 * (mode & 3U)) & 0xffU;
      r.e[i] = asFloat ? interp::byteToFloat(byte) : byte;
    }
  }
  return r;
}

}  // namespace qpu::emu
