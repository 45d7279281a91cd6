// What all copies of a tile are made of: its numbers as loaded, the scale of a block, codes as stored.
#pragma once

#include "device.cuh"
#include "gtp/jobs.h"

namespace gtp::cuda {

constexpr int kThreads = 128;
constexpr int kRowsPerThread = 4;

struct Parameters {
  const uint32_t* key;
  float largest;  // of the format, for FP8
  float inverse_max;
  bool hadamard;
  bool e5m2;
};

// A matrix of the job, and the tile's first row and column.
struct Place {
  int64_t matrix, row, col;
};

// ---- in and out ---------------------------------------------------------------------------------------------------

// Eight numbers of a row as they are stored.
template <class T>
struct Eight {
  static constexpr int kWords = 8 * T::kBytes / 4;
  uint32_t words[kWords];

  __device__ __forceinline__ float operator[](int i) const { return value_of<T>(words, i); }

  __device__ __forceinline__ uint32_t max() const {
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) top = max_magnitude<T>(top, words[i]);
    return fold_halves<T>(top);
  }

  __device__ __forceinline__ void floats(float (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = (*this)[i];
  }
};

// `valid` of them; the rest is zero.
template <class T>
__device__ __forceinline__ Eight<T> load_eight(const typename T::Storage* x, int valid, bool wide) {
  Eight<T> eight;
  if (wide) {
#pragma unroll
    for (int i = 0; i < Eight<T>::kWords / 4; ++i) {
      const uint4 words = valid > 0 ? __ldcs(reinterpret_cast<const uint4*>(x) + i) : make_uint4(0, 0, 0, 0);
      eight.words[4 * i] = words.x;
      eight.words[4 * i + 1] = words.y;
      eight.words[4 * i + 2] = words.z;
      eight.words[4 * i + 3] = words.w;
    }
    return eight;
  }
#pragma unroll
  for (int i = 0; i < Eight<T>::kWords; ++i) {
    if constexpr (T::kBytes == 4) {
      eight.words[i] = i < valid ? __float_as_uint(x[i]) : 0u;
    } else {
      const uint32_t low = 2 * i < valid ? x[2 * i] : 0u, high = 2 * i + 1 < valid ? x[2 * i + 1] : 0u;
      eight.words[i] = low | high << 16;
    }
  }
  return eight;
}

// The first `bytes` of up to 16 bytes, in one store if `wide`.
template <int kWords>
__device__ __forceinline__ void store(uint8_t* out, const uint32_t (&words)[kWords], int bytes, bool wide) {
  if (wide && bytes == 4 * kWords) {
    if constexpr (kWords == 1) *reinterpret_cast<uint32_t*>(out) = words[0];
    if constexpr (kWords == 2) *reinterpret_cast<uint2*>(out) = make_uint2(words[0], words[1]);
    if constexpr (kWords == 4) *reinterpret_cast<uint4*>(out) = make_uint4(words[0], words[1], words[2], words[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4 * kWords; ++i) {
    if (i < bytes) out[i] = static_cast<uint8_t>(words[i / 4] >> (i % 4 * 8));
  }
}

// ---- a block's scale, and codes of eight numbers ------------------------------------------------------------------

struct Scaled {
  uint8_t code;
  float factor;
  bool finite;
};

template <Kind kind>
__device__ __forceinline__ Scaled scale_of(uint32_t top_bits, const Nvfp4Scale& tensor, const Parameters& p) {
  const bool finite = top_bits < kInfinity;
  const float top = __uint_as_float(finite ? top_bits : 0u);
  if constexpr (kind == Kind::kExponents) {
    const BlockScale scale = e8m0_block_scale(top, p.inverse_max);
    return {finite ? scale.code : kNanScale8, scale.factor, finite};
  } else {
    const BlockScale scale = fast_e4m3_block_scale(top, tensor);
    return {finite ? scale.code : kNanCode, scale.factor, finite};
  }
}

__device__ __forceinline__ uint32_t stochastic_x8(const float (&x)[8], float factor, const RandomWords& random,
                                                  int first) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    // the index of an octet must be known when compiling, or the words go to local memory
    const uint32_t octet = first == 0 ? random.octet(i) : random.octet(8 + i);
    const uint32_t code = encode_e2m1_stochastic(fabsf(x[i]) * factor, octet) | (__float_as_uint(x[i]) >> 28 & 8u);
    word |= code << (4 * i);
  }
  return word;
}

// FP8 codes of eight numbers without a block: what is not finite becomes NaN by itself.
__device__ __forceinline__ uint2 tensor_x8(const float (&x)[8], float factor, bool e5m2) {
  uint2 words = encode_fp8_x8(x, factor, e5m2);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if ((__float_as_uint(x[i]) & kMagnitude) < kInfinity) continue;
    uint32_t& word = i < 4 ? words.x : words.y;
    word = (word & ~(0xFFu << (i % 4 * 8))) | static_cast<uint32_t>(kNanCode) << (i % 4 * 8);
  }
  return words;
}

__device__ __forceinline__ Nvfp4Scale tensor_of(const Copy& copy, const QuantizeJob& job, int64_t matrix, Kind kind,
                                                const Parameters& p) {
  if (kind == Kind::kExponents) return {};
  const float amax = copy.amax[matrix / job.count_per_amax * job.amax_stride];
  if (kind == Kind::kTensor) return {tensor_scale(p.largest, amax), 0.0f};
  return nvfp4_scale(amax);
}

}  // namespace gtp::cuda
