// The arithmetic of gtp_jax/formats/README.md on single numbers, for both host and device.
//
// Everything is IEEE 754 float32, rounded to nearest even, including subnormals. This requires that the compiler does
// not contract (-ffp-contract=off, -fmad=false) and that subnormals are not flushed: the CPU kernels clear FTZ and DAZ
// while they run.
#pragma once

#include <cstdint>
#include <cstring>

#include "gtp/formats.h"

#ifdef __CUDA_ARCH__
#define GTP_UNROLL _Pragma("unroll")
#else
#define GTP_UNROLL
#endif

namespace gtp {

constexpr uint32_t kSignBit = 0x80000000u;
constexpr uint32_t kMagnitude = 0x7FFFFFFFu;
constexpr uint32_t kInfinity = 0x7F800000u;
constexpr uint32_t kNan = 0x7FC00000u;
constexpr float kFloatMax = 3.40282347e+38f;
constexpr uint8_t kNanCode = 0x7F;    // for e4m3 and e5m2
constexpr uint8_t kNanScale8 = 0xFF;  // for e8m0

GTP_HD uint32_t bits_of(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
#endif
}

GTP_HD float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  memcpy(&x, &bits, 4);
  return x;
#endif
}

template <class T>
GTP_HD T smaller(T a, T b) {
  return a < b ? a : b;
}

// ---- 16-bit floats ------------------------------------------------------------------------------------------------

GTP_HD float from_bf16(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }

GTP_HD float from_f16(uint16_t x) {
  const uint32_t magnitude = x & 0x7FFFu;
  // multiplying by 2**112 shifts the exponent, and turns a subnormal into a normal number
  const float finite = float_of(magnitude << 13) * 0x1p112f;
  const uint32_t bits = magnitude >= 0x7C00u ? kInfinity | magnitude << 13 : bits_of(finite);
  return float_of(bits | (static_cast<uint32_t>(x) & 0x8000u) << 16);
}

// Every NaN becomes the canonical NaN.
GTP_HD uint16_t to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>((bits & kMagnitude) > kInfinity ? 0x7FC0u : rounded);
}

GTP_HD uint16_t to_f16(float x) {
  const uint32_t bits = bits_of(x), magnitude = bits & kMagnitude;
  const uint32_t normal = ((magnitude + 0xFFFu + (magnitude >> 13 & 1u)) >> 13) - (112u << 10);
  // adding 0.5, whose last place equals the step of the subnormals, rounds to that step
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  uint32_t rounded = magnitude < 113u << 23 ? subnormal : normal;
  rounded = magnitude >= 0x47800000u ? 0x7C00u : smaller(rounded, 0x7C00u);
  rounded |= bits >> 16 & 0x8000u;
  return static_cast<uint16_t>(magnitude > kInfinity ? 0x7E00u : rounded);
}

GTP_HD float canonical(float x) { return (bits_of(x) & kMagnitude) > kInfinity ? float_of(kNan) : x; }

// ---- elements -----------------------------------------------------------------------------------------------------

// Returns the e2m1 code of a magnitude, without the sign. Saturates.
//
// [Note: e2m1 by minima] The values 0, .5, 1, 1.5, 2, 3, 4, 6 have the codes 0 to 7, so the code is the concave
// function min(2x, x + 2, x/2 + 4) of x. Adding 1.5 * 2**23 rounds each branch to an integer, once and to nearest even.
// Rounding is monotone, so it may happen before the minimum is taken, and the code has the same parity as its branch's
// integer.
GTP_HD uint32_t encode_e2m1(float magnitude) {
  constexpr float kRound = 12582912.0f;
  const float branches = smaller(smaller(magnitude * 2.0f + kRound, magnitude + (kRound + 2.0f)),
                                 magnitude * 0.5f + (kRound + 4.0f));
  return bits_of(smaller(branches, kRound + 7.0f)) & 7u;
}

// Returns the code of a magnitude in an 8-bit float format, without the sign. Saturates.
template <int kMantissa, int kMinExponent, uint32_t kMaxCode>
GTP_HD uint32_t encode_minifloat(float magnitude) {
  constexpr int kCut = 23 - kMantissa;
  const uint32_t bits = bits_of(magnitude);
  const uint32_t rebias = static_cast<uint32_t>(126 + kMinExponent) << kMantissa;
  const uint32_t normal = ((bits + (1u << (kCut - 1)) - 1u + (bits >> kCut & 1u)) >> kCut) - rebias;
  // for smaller numbers, adding a power of two whose last place equals the step of the subnormals rounds to that step
  const uint32_t base = static_cast<uint32_t>(127 + 23 + kMinExponent - kMantissa) << 23;
  const uint32_t subnormal = bits_of(magnitude + float_of(base)) - base;
  const uint32_t code = bits < static_cast<uint32_t>(127 + kMinExponent) << 23 ? subnormal : normal;
  return smaller(code, kMaxCode);
}

GTP_HD uint32_t encode_e4m3(float magnitude) { return encode_minifloat<3, -6, 0x7E>(magnitude); }
GTP_HD uint32_t encode_e5m2(float magnitude) { return encode_minifloat<2, -14, 0x7B>(magnitude); }

// Returns the value of a code. Subnormals are computed from their integer, because arithmetic on subnormal float32
// numbers is slow.
template <int kMantissa, int kMinExponent>
GTP_HD float decode_minifloat(uint32_t magnitude) {
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) *
                          float_of(static_cast<uint32_t>(127 + kMinExponent - kMantissa) << 23);
  const float normal = float_of((magnitude << (23 - kMantissa)) + (static_cast<uint32_t>(126 + kMinExponent) << 23));
  return magnitude < 1u << kMantissa ? subnormal : normal;
}

GTP_HD float decode_e2m1(uint32_t code) {
  return float_of(bits_of(decode_minifloat<1, 0>(code & 7u)) | (code & 8u) << 28);
}

GTP_HD float decode_e4m3(uint32_t code) {
  const uint32_t magnitude = code & 0x7Fu;
  const uint32_t bits = magnitude == 0x7Fu ? kNan : bits_of(decode_minifloat<3, -6>(magnitude));
  return float_of(bits | (code & 0x80u) << 24);
}

GTP_HD float decode_e5m2(uint32_t code) {
  const uint32_t magnitude = code & 0x7Fu;
  const uint32_t special = kInfinity | (magnitude & 3u) << 21;
  const uint32_t bits = magnitude >= 0x7Cu ? special : bits_of(decode_minifloat<2, -14>(magnitude));
  return float_of(bits | (code & 0x80u) << 24);
}

// Rounds stochastically to e2m1: adds a random fraction of a step, then rounds down.
GTP_HD uint32_t encode_e2m1_stochastic(float magnitude, uint32_t octet) {
  const float m = smaller(magnitude, 6.0f);
  const float steps_per_unit = m < 2.0f ? 2.0f : m < 4.0f ? 1.0f : 0.5f;
  const float shifted = m * steps_per_unit + (static_cast<float>(octet) + 0.5f) * 0.00390625f;
  return static_cast<uint32_t>(shifted) + (m < 2.0f ? 0u : m < 4.0f ? 2u : 4u);
}

// ---- scales -------------------------------------------------------------------------------------------------------

GTP_HD float tensor_scale(float largest, float amax) {
  const bool usable = amax > 0.0f && bits_of(amax) < kInfinity;
  return usable ? smaller(largest / amax, kFloatMax) : 1.0f;
}

// The tensor's scale in the form that the blocks of an NVFP4 tensor use.
struct Nvfp4Scale {
  float per_step;  // S * (1/6), in this order, which affects the last bit
  float inverse;   // 1 / S
};

GTP_HD Nvfp4Scale nvfp4_scale(float amax) {
  const float scale = tensor_scale(2688.0f, amax);
  return {scale * (1.0f / 6.0f), 1.0f / scale};
}

// A block's scale: the stored byte, and the factor of the block's elements.
struct BlockScale {
  uint8_t code;
  float factor;
};

GTP_HD BlockScale e4m3_block_scale(float amax, Nvfp4Scale tensor) {
  const uint32_t code = encode_e4m3(smaller(amax * tensor.per_step, kFloatMax));
  const float decoded = decode_e4m3(code) * tensor.inverse;
  return {static_cast<uint8_t>(code), smaller(1.0f / decoded, kFloatMax)};
}

GTP_HD BlockScale e8m0_block_scale(float amax, float inverse_element_max) {
  const uint32_t bits = bits_of(amax * inverse_element_max);
  const uint32_t field = bits >> 23, fraction = bits & 0x7FFFFFu;
  const uint32_t up = field == 0 ? fraction > 0x400000u : fraction > 0;
  const uint32_t exponent = smaller(field + up, 254u);
  // 2**(127 - E) is subnormal for E = 254
  return {static_cast<uint8_t>(exponent), float_of(exponent == 254u ? 0x00400000u : (254u - exponent) << 23)};
}

// Returns the factor of a block's decoded elements.
GTP_HD float e4m3_block_factor(uint32_t code, float amax) { return decode_e4m3(code) * amax * (1.0f / 2688.0f); }

GTP_HD float e8m0_block_factor(uint32_t code) {
  return float_of(code == kNanScale8 ? kNan : code == 0 ? 0x00400000u : code << 23);
}

// Returns the scale of a run or tile whose largest magnitude has these bits: 448 / amax, rounded down to a power of two,
// and at most 2**127; 1 if the amax is 0, Inf or NaN.
GTP_HD float power_of_two_scale(uint32_t amax) {
  if (amax == 0 || amax >= kInfinity) return 1.0f;
  // 448 is 1.75 * 2**8
  const uint32_t field = 262u - (amax >> 23) - ((amax & 0x7FFFFFu) > 0x600000u);
  return float_of(smaller(field, 254u) << 23);
}

// Returns 1 / scale, which is subnormal for 2**127.
GTP_HD float inverse_of_power(float scale) {
  const uint32_t field = 254u - (bits_of(scale) >> 23);
  return float_of(field == 0 ? 0x00400000u : field << 23);
}

GTP_HD float tensor_factor(float largest, float amax) { return 1.0f / tensor_scale(largest, amax); }

// ---- random Hadamard transform and random numbers -----------------------------------------------------------------

// The rows whose signs are flipped: bit i is set for row i of 16. These are TransformerEngine's signs.
constexpr uint32_t kHadamardSigns = 0xD7E8u;

// Computes y = H (d * x) in place, with H orthogonal, and rounds each result to bfloat16.
GTP_HD void hadamard_run(float (&x)[kRun]) {
  GTP_UNROLL
  for (int i = 0; i < kRun; ++i) x[i] = float_of(bits_of(x[i]) ^ (kHadamardSigns >> i & 1u) << 31);
  GTP_UNROLL
  for (int stride = 1; stride < kRun; stride *= 2) {
  GTP_UNROLL
    for (int i = 0; i < kRun; ++i) {
      if (i & stride) continue;
      const float first = x[i], second = x[i + stride];
      x[i] = first + second;
      x[i + stride] = first - second;
    }
  }
  GTP_UNROLL
  for (int i = 0; i < kRun; ++i) x[i] = from_bf16(to_bf16(x[i] * 0.25f));
}

struct RandomWords {
  uint32_t word[4];

  // Returns the random byte of element i of a run of 16.
  GTP_HD uint32_t octet(int i) const { return word[i / 4] >> (i % 4 * 8) & 0xFFu; }
};

// Philox4x32-10 (Salmon et al., SC11) on the counter (run, run >> 32, copy, 0).
GTP_HD RandomWords random_words(uint64_t run, uint32_t copy, uint32_t key0, uint32_t key1) {
  uint32_t a = static_cast<uint32_t>(run), b = static_cast<uint32_t>(run >> 32), c = copy, d = 0;
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = static_cast<uint64_t>(a) * 0xD2511F53u, second = static_cast<uint64_t>(c) * 0xCD9E8D57u;
    a = static_cast<uint32_t>(second >> 32) ^ b ^ key0;
    b = static_cast<uint32_t>(second);
    c = static_cast<uint32_t>(first >> 32) ^ d ^ key1;
    d = static_cast<uint32_t>(first);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{a, b, c, d}};
}

}  // namespace gtp
