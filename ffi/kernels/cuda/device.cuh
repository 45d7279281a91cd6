// Small device helpers: wide loads and stores, packed magnitudes, hardware conversions.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "gtp/numerics.h"

namespace gtp::cuda {

struct F32 {
  static constexpr DType kDType = DType::kF32;
  using Storage = float;
  static constexpr int kBytes = 4, kBits = 24;  // kBits: bits of the significand
};
struct BF16 {
  static constexpr DType kDType = DType::kBF16;
  using Storage = uint16_t;
  static constexpr int kBytes = 2, kBits = 8;
};
struct F16 {
  static constexpr DType kDType = DType::kF16;
  using Storage = uint16_t;
  static constexpr int kBytes = 2, kBits = 11;
};

enum class Kind { kTiles, kRuns, kExponents, kTensor };  // NVFP4, NVFP4_1D, MXFP8, FP8

template <Kind kind>
constexpr bool kFp4 = kind == Kind::kTiles || kind == Kind::kRuns;

// The side of a tile, a square of numbers; a panel consists of one or more tiles.
constexpr int kTile = 64;

__device__ __forceinline__ bool aligned(const void* pointer, uint32_t bytes) {
  return (reinterpret_cast<uintptr_t>(pointer) & (bytes - 1)) == 0;
}

// The cache policy for stores that L2 should keep for a while: parts of 128-byte lines that other thread blocks
// complete later, above all block scales, and lines of columns, which are far apart. Without this policy, they slow
// down other reads and writes: both copies of bfloat16 took 3% longer (H200).
__device__ __forceinline__ uint64_t kept() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void store_byte_kept(uint8_t* out, uint8_t byte) {
  asm volatile("st.global.L2::cache_hint.u8 [%0], %1, %2;" ::"l"(out), "r"(uint32_t{byte}), "l"(kept()) : "memory");
}

// Stores 4, 8 or 16 bytes in one instruction. The compiler would split the assignment of a vector whose parts come from
// different branches.
template <bool kKept = false, int kWords>
__device__ __forceinline__ void store_words(void* out, const uint32_t (&words)[kWords]) {
  if constexpr (kWords == 1) {
    static_assert(kKept);
    asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(out), "r"(words[0]), "l"(kept()) : "memory");
  } else if constexpr (kWords == 2) {
    if constexpr (kKept) {
      asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;" ::"l"(out), "r"(words[0]), "r"(words[1]),
                   "l"(kept())
                   : "memory");
    } else {
      __stwb(static_cast<uint2*>(out), make_uint2(words[0], words[1]));
    }
  } else {
    static_assert(kWords == 4);
    if constexpr (kKept) {
      asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(out), "r"(words[0]),
                   "r"(words[1]), "r"(words[2]), "r"(words[3]), "l"(kept())
                   : "memory");
    } else {
      __stwb(static_cast<uint4*>(out), make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
}

// ---- values -------------------------------------------------------------------------------------------------------

// A word holds two 16-bit numbers, the first in the low half, or one float32.
template <class T>
__device__ __forceinline__ float value_of(const uint32_t* words, int i) {
  if constexpr (T::kBytes == 4) {
    return __uint_as_float(words[i]);
  } else if constexpr (sizeof(T) && __is_same(T, BF16)) {
    return __uint_as_float(i % 2 ? words[i / 2] & 0xFFFF0000u : words[i / 2] << 16);
  } else {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16))));
  }
}

// Returns the larger magnitudes of two words; NaN counts as the largest. The signs are meaningless until `magnitudes`
// clears them.
template <class T>
__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 860
  uint32_t out;
  if constexpr (T::kBytes == 4) {
    asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  } else if constexpr (__is_same(T, BF16)) {
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  }
  return out;
#else
  // as unsigned integers, magnitudes have the same order as the numbers
  if constexpr (T::kBytes == 4) return max(a & kMagnitude, b & kMagnitude);
  return __vmaxu2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
#endif
}

template <class T>
__device__ __forceinline__ uint32_t magnitudes(uint32_t word) {
  return word & (T::kBytes == 4 ? kMagnitude : 0x7FFF7FFFu);
}

// Returns the larger of a word's two halves; a float32 pattern is already a single number.
template <class T>
__device__ __forceinline__ uint32_t fold_halves(uint32_t top) {
  if constexpr (T::kBytes == 4) return top;
  return max(top & 0xFFFFu, top >> 16);
}

// Returns a stored magnitude as float32 bits; non-finite numbers stay at or above infinity.
template <class T>
__device__ __forceinline__ uint32_t widen_magnitude(uint32_t pattern) {
  if constexpr (T::kBytes == 4) return pattern;
  if constexpr (__is_same(T, BF16)) return pattern << 16;
  return __float_as_uint(__half2float(__ushort_as_half(static_cast<uint16_t>(pattern))));
}

__device__ __forceinline__ uint32_t shuffle_max(uint32_t top, int lanes) {
  return max(top, __shfl_xor_sync(0xFFFFFFFFu, top, lanes));
}

// Transposes 4 x 4 bytes: word i of the result holds byte i of each word.
__device__ __forceinline__ void turn(uint32_t (&v)[4]) {
  const uint32_t a = __byte_perm(v[0], v[1], 0x5140), b = __byte_perm(v[2], v[3], 0x5140);
  const uint32_t c = __byte_perm(v[0], v[1], 0x7362), d = __byte_perm(v[2], v[3], 0x7362);
  v[0] = __byte_perm(a, b, 0x5410);
  v[1] = __byte_perm(a, b, 0x7632);
  v[2] = __byte_perm(c, d, 0x5410);
  v[3] = __byte_perm(c, d, 0x7632);
}

// ---- encoding -----------------------------------------------------------------------------------------------------

// Products below this are never rounded beyond e2m1's largest code. [Note: e2m1 by bytes]
constexpr float kE2m1Safe = 7.0f;

// [Note: e2m1 by bytes] Take a product times 2**-14 as a float16, rounded toward zero. The last two bits of its
// exponent and the first bit of its fraction are e2m1's code, also for subnormals. The next bit tells whether to round
// up. All of these bits and the sign are in the upper byte, so one addition rounds four products. It rounds ties up,
// but e2m1 rounds them to even: 1/4, 5/4, 5/2 and 5 down; 3/4, 7/4 and 7/2, whose fractions are 1/2 and 3/4, up. So if
// ties are possible (`kTies`), products whose fraction is above 3/8 are first raised by one in the last place, and then
// all products are lowered by one.
constexpr float kRaise = 0x1.745d18p-25f;         // 0.5 / 1.375 of the last place per unit of the significand
constexpr float kLowerAndScale = 0x1.fffffep-15f;  // (1 - 2**-24) * 2**-14
constexpr float kScale = 0x1p-14f;

// Returns whether a number with `kBits` significant bits times the factor may be a tie that rounds down, or whether the
// factor times `kScale` may be inexact. Among numbers with so few bits only one, up to powers of two, is near such a
// tie.
template <int kBits>
__device__ __forceinline__ bool may_tie(float factor) {
  const float unit = __uint_as_float((__float_as_uint(factor) & 0x7FFFFFu) | 0x3F800000u);
  bool may = !(factor >= 0x1p-112f);
#pragma unroll
  for (int tie = 1; tie <= 5; tie += 4) {
    const uint32_t quotient = __float_as_uint(__fdividef(static_cast<float>(tie), unit));
    const float nearest = __uint_as_float((quotient + (1u << (23 - kBits))) & ~((1u << (24 - kBits)) - 1));
    may |= nearest * unit == static_cast<float>(tie);
  }
  return may;
}

// Returns the e2m1 codes of eight numbers, the first in the lowest nibble. `kSaturate` may be false if all products are
// below `kE2m1Safe`, and `kTies` if `may_tie` is false for the factor.
template <bool kSaturate, bool kTies>
__device__ __forceinline__ uint32_t encode_e2m1_x8(const float (&x)[8], float factor) {
#if defined(__CUDA_ARCH_FEAT_SM100_ALL)
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    uint32_t pair;
    asm("{.reg .b8 b; cvt.rn.satfinite.e2m1x2.f32 b, %1, %2; cvt.u32.u8 %0, b;}"
        : "=r"(pair)
        : "f"(x[i + 1] * factor), "f"(x[i] * factor));
    word |= pair << (4 * i);
  }
  return word;
#else
  const auto product = [&](int i) {
    if (!kTies) return x[i] * (factor * kScale);
    const float exact = x[i] * factor;
    return __fmaf_rn(exact, kRaise, exact) * kLowerAndScale;
  };
  // collect the upper bytes of four products, every second of the eight
  const auto bytes = [&](int first) {
    uint32_t pairs[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = first + 4 * i;
      asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(pairs[i]) : "f"(product(at + 2)), "f"(product(at)));
      if (kSaturate) {
        const __half2 largest = __half2half2(__ushort_as_half(7 << 9));
        const __half2 pair = *reinterpret_cast<const __half2*>(&pairs[i]);
        const __half2 kept = __hmin2(__hmax2(pair, __hneg2(largest)), largest);
        pairs[i] = *reinterpret_cast<const uint32_t*>(&kept);
      }
    }
    return __byte_perm(pairs[0], pairs[1], 0x7531);
  };
  // takes `bits` from the first and the rest from the second; the compiler's code for the formula has more instructions
  const auto choose = [](uint32_t bits, uint32_t first, uint32_t second) {
    uint32_t out;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(out) : "r"(bits), "r"(first), "r"(second));
    return out;
  };
  constexpr uint32_t kOnes = 0x01010101u;
  // codes in the upper nibbles
  const auto rounded = [&](uint32_t four) { return choose(0x70 * kOnes, four * 8 + kOnes * 8, four); };
  return choose(0x0F * kOnes, rounded(bytes(0)) >> 4, rounded(bytes(1)));
#endif
}

__device__ __forceinline__ uint32_t encode_fp8_x2(float low, float high, bool e5m2) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  if (e5m2) {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  }
  return pair;
#else
  const auto encode = [e5m2](float x) {
    const uint32_t code = e5m2 ? encode_e5m2(fabsf(x)) : encode_e4m3(fabsf(x));
    return code | (__float_as_uint(x) >> 24 & 0x80u);
  };
  return encode(low) | encode(high) << 8;
#endif
}

__device__ __forceinline__ uint2 encode_fp8_x8(const float (&x)[8], float factor, bool e5m2) {
  uint32_t pairs[4];
  if (e5m2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = encode_fp8_x2(x[2 * i] * factor, x[2 * i + 1] * factor, true);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = encode_fp8_x2(x[2 * i] * factor, x[2 * i + 1] * factor, false);
  }
  return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// The two steps of e4m3_block_scale in numerics.h, with the hardware's conversions: the code of a block's scale, and
// the factor that belongs to a code. Codes, including those of non-finite numbers, are below `kScaleCodes`.
constexpr int kScaleCodes = 128;

__device__ __forceinline__ uint32_t e4m3_scale_code(float amax, const Nvfp4Scale& tensor) {
  return encode_fp8_x2(amax * tensor.per_step, 0.0f, false);
}

__device__ __forceinline__ float e4m3_scale_factor(uint32_t code, const Nvfp4Scale& tensor) {
#if __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(code)));
  const float decoded = __half2float(__ushort_as_half(static_cast<uint16_t>(halves)));
#else
  const float decoded = decode_e4m3(code);
#endif
  return fminf(__frcp_rn(decoded * tensor.inverse), kFloatMax);
}

// ---- decoding -----------------------------------------------------------------------------------------------------

// Decodes two e2m1 codes, nibble i of each half of a word, to float32.
__device__ __forceinline__ void decode_e2m1_x2(uint32_t word, int i, float& low, float& high) {
  const __half2 lift = __half2half2(__ushort_as_half(0x7400));  // 2**14: aligns float16's exponents with e2m1's
  // place the codes in the high bits of two halves; this is correct for subnormals too
  const uint32_t magnitudes = (i < 3 ? word << (9 - 4 * i) : word >> (4 * i - 9)) & 0x0E000E00u;
  const uint32_t signs = word << (12 - 4 * i) & 0x80008000u;
  uint32_t halves = magnitudes | signs;
  const __half2 pair = __hmul2(*reinterpret_cast<__half2*>(&halves), lift);
  low = __low2float(pair);
  high = __high2float(pair);
}

// Decodes the eight e2m1 codes of a word.
__device__ __forceinline__ void decode_e2m1(uint32_t word, float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) decode_e2m1_x2(word, i, x[i], x[i + 4]);
}

// Decodes the four e2m1 codes in the lower half of a word.
__device__ __forceinline__ void decode_e2m1(uint32_t word, float (&x)[4]) {
  const uint32_t spread = (word & 0xFFu) | (word & 0xFF00u) << 8;
#pragma unroll
  for (int i = 0; i < 2; ++i) decode_e2m1_x2(spread, i, x[i], x[i + 2]);
}

// Decodes the four 8-bit codes of a word. NaN and Inf become an arbitrary NaN or Inf.
__device__ __forceinline__ void decode_fp8_x4(uint32_t word, bool e5m2, float* x) {
#if __CUDA_ARCH__ >= 890
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint16_t pair = static_cast<uint16_t>(word >> (16 * i));
    uint32_t halves;
    if (e5m2) {
      asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
    } else {
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    }
    const __half2 both = *reinterpret_cast<__half2*>(&halves);
    x[2 * i] = __low2float(both);
    x[2 * i + 1] = __high2float(both);
  }
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t code = word >> (8 * i) & 0xFFu;
    x[i] = e5m2 ? decode_e5m2(code) : decode_e4m3(code);
  }
#endif
}

// Returns whether any of a word's four codes is NaN or Inf.
__device__ __forceinline__ bool special_fp8_x4(uint32_t word, bool e5m2) {
  return (((word & 0x7F7F7F7Fu) + (e5m2 ? 0x04040404u : 0x01010101u)) & 0x80808080u) != 0;
}

// ---- rounding to the output ---------------------------------------------------------------------------------------

// Rounds a pair of numbers to one word. NaN must have been made canonical before.
template <class T>
__device__ __forceinline__ uint32_t narrow_x2(float low, float high) {
  uint32_t word;
  if constexpr (__is_same(T, BF16)) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
  return word;
}

template <class T>
__device__ __forceinline__ typename T::Storage narrow(float x) {
  if constexpr (__is_same(T, F32)) return canonical(x);
  if constexpr (__is_same(T, BF16)) return to_bf16(x);
  if constexpr (__is_same(T, F16)) return to_f16(x);
}

}  // namespace gtp::cuda
