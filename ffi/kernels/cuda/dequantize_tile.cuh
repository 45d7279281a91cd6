// The parts that both ways of dequantizing a tile share: loading codes, a block's factor, rounding numbers.
#pragma once

#include "device.cuh"
#include "gtp/jobs.h"

namespace gtp::cuda::dequantization {

constexpr int kThreads = 128;
// The number of values in 16 bytes.
template <class T>
constexpr int kWidth = 16 / T::kBytes;

struct Parameters {
  float largest;
  bool e5m2;
};

// Returns the bytes of the codes of a number of values.
template <Kind kind, int kCount>
constexpr int kCodeBytes = kFp4<kind> ? kCount / 2 : kCount;

__device__ __forceinline__ bool finite(float x) { return (__float_as_uint(x) & kMagnitude) < kInfinity; }

// Loads only the first `bytes` bytes of a vector of codes.
template <int kBytes, bool kWhole>
__device__ __forceinline__ void load_codes(const uint8_t* codes, int bytes, bool wide,
                                           uint32_t (&words)[(kBytes + 3) / 4]) {
  if (kWhole || (wide && bytes == kBytes)) {
    if constexpr (kBytes == 2) words[0] = __ldcs(reinterpret_cast<const uint16_t*>(codes));
    if constexpr (kBytes == 4) words[0] = __ldcs(reinterpret_cast<const uint32_t*>(codes));
    if constexpr (kBytes == 8) {
      const uint2 both = __ldcs(reinterpret_cast<const uint2*>(codes));
      words[0] = both.x;
      words[1] = both.y;
    }
    if constexpr (kBytes == 16) {
      const uint4 all = __ldcs(reinterpret_cast<const uint4*>(codes));
      words[0] = all.x;
      words[1] = all.y;
      words[2] = all.z;
      words[3] = all.w;
    }
    return;
  }
#pragma unroll
  for (uint32_t& word : words) word = 0;
#pragma unroll
  for (int i = 0; i < kBytes; ++i) {
    if (i < bytes) words[i / 4] |= static_cast<uint32_t>(codes[i]) << (i % 4 * 8);
  }
}

// Returns the scale of the block at (row, col) of a copy with this number of columns.
template <Kind kind>
__device__ __forceinline__ uint32_t load_scale(const uint8_t* scales, int64_t row, int64_t col, int64_t cols) {
  if constexpr (kind == Kind::kTiles) return scales[row / 16 * ceil_div(cols, 16) + col / 16];
  if constexpr (kind == Kind::kRuns) return scales[row * ceil_div(cols, 16) + col / 16];
  if constexpr (kind == Kind::kExponents) return scales[row * ceil_div(cols, 32) + col / 32];
  return 0;
}

template <Kind kind>
__device__ __forceinline__ float factor_of(uint32_t scale, float amax, const Parameters& p) {
  if constexpr (kFp4<kind>) return e4m3_block_factor(scale, amax);
  if constexpr (kind == Kind::kExponents) return e8m0_block_factor(scale);
  return tensor_factor(p.largest, amax);
}

template <Kind kind>
__device__ __forceinline__ float amax_of(const DequantizeJob& job, int64_t matrix) {
  if constexpr (kind == Kind::kExponents) return 0.0f;
  // a 64-bit division is slow, and usually not needed
  const bool first = matrix == 0 || job.amax_stride == 0;
  return job.amax[first ? 0 : matrix / job.count_per_amax * job.amax_stride];
}

// Multiplies numbers with their factors, and tells whether any of them may be NaN.
template <Kind kind, int kCount, class Factors>
__device__ __forceinline__ bool decode(const uint32_t* words, const Factors& factors, bool e5m2, float (&x)[kCount]) {
  bool special = !factors.all_finite;
  if constexpr (kFp4<kind>) {
    decode_e2m1(words[0], x);
  } else {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      decode_fp8_x4(words[i], e5m2, x + 4 * i);
      special |= special_fp8_x4(words[i], e5m2);
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] *= factors[i];
  return special;
}

struct OneFactor {
  float factor;
  bool all_finite;

  __device__ __forceinline__ explicit OneFactor(float factor) : factor(factor), all_finite(finite(factor)) {}
  __device__ __forceinline__ float operator[](int) const { return factor; }
};

template <int kCount>
struct ManyFactors {
  float factor[kCount];
  bool all_finite = true;

  __device__ __forceinline__ float operator[](int i) const { return factor[i]; }
};

// Rounds 16 bytes of numbers to T; NaN becomes canonical.
template <class T>
__device__ __forceinline__ void round_all(const float (&x)[kWidth<T>], bool special, uint32_t (&words)[4]) {
  if constexpr (T::kBytes == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __float_as_uint(special ? canonical(x[i]) : x[i]);
  } else if (special) {  // the hardware's canonical NaN is a different one
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = narrow<T>(x[2 * i]) | static_cast<uint32_t>(narrow<T>(x[2 * i + 1])) << 16;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = narrow_x2<T>(x[2 * i], x[2 * i + 1]);
  }
}

template <class T>
__device__ __forceinline__ typename T::Storage number_of(const uint32_t (&words)[4], int i) {
  if constexpr (T::kBytes == 4) return __uint_as_float(words[i]);
  if constexpr (T::kBytes == 2) return static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
}

// Returns the matrix of a job, and the first row and column of a tile. Tiles of the given size are numbered along rows,
// or down columns.
struct Place {
  int64_t matrix, row, col;

  __device__ __forceinline__ Place(const DequantizeJob& job, uint32_t tile, int64_t rows, int64_t cols, int tall,
                                   int broad, bool downward = false) {
    const uint32_t down = static_cast<uint32_t>(ceil_div(rows, tall));
    const uint32_t across = static_cast<uint32_t>(ceil_div(cols, broad));
    const uint32_t stacked = job.count == 1 ? 0 : tile / (across * down), within = tile - stacked * across * down;
    matrix = stacked;
    row = int64_t{downward ? within % down : within / across} * tall;
    col = int64_t{downward ? within / down : within % across} * broad;
  }
};

}  // namespace gtp::cuda::dequantization
