// The parts that all copies of a panel share: loading numbers, the scale of a block, storing codes.
#pragma once

#include "device.cuh"
#include "gtp/jobs.h"

namespace gtp::cuda {

struct Parameters {
  const uint32_t* key;
  float largest;  // largest number of the format, for FP8
  float inverse_max;
  bool hadamard;
  bool e5m2;
};

// A matrix of the job, and the first row and column of a panel.
struct Place {
  int64_t matrix, row, col;
};

// The size of a panel or a matrix.
struct Extent {
  int rows, cols;
};

// ---- in and out ---------------------------------------------------------------------------------------------------

// The numbers of a row, as they are stored.
template <class T, int kCount>
struct Numbers {
  static constexpr int kWords = kCount * T::kBytes / 4;
  uint32_t words[kWords];

  // Loads them from a panel, given the place of the first numbers.
  __device__ __forceinline__ void load(const char* stage, int place) {
#pragma unroll
    for (int w = 0; w < kWords; w += 4) {
      const uint4 chunk = *reinterpret_cast<const uint4*>(stage + (place ^ w * 4));
      words[w] = chunk.x;
      words[w + 1] = chunk.y;
      words[w + 2] = chunk.z;
      words[w + 3] = chunk.w;
    }
  }

  __device__ __forceinline__ float operator[](int i) const { return value_of<T>(words, i); }
};

// Returns the offset of a row of a tile's e2m1 codes, in words. Gaps avoid bank conflicts when rows are read.
__device__ __forceinline__ int nibble_offset(int row) { return row * 8 + row / 8 * 4; }
constexpr int kNibbleWords = kTile * 8 + kTile / 8 * 4;

// Stores the first `bytes` of up to 16 bytes, in one instruction if `wide`.
template <bool kWhole, bool kKept, int kWords>
__device__ __forceinline__ void store(uint8_t* out, const uint32_t (&words)[kWords], int bytes, bool wide) {
  if (kWhole || (wide && bytes == 4 * kWords)) return store_words<kKept>(out, words);
#pragma unroll
  for (int i = 0; i < 4 * kWords; ++i) {
    if (i < bytes) out[i] = static_cast<uint8_t>(words[i / 4] >> (i % 4 * 8));
  }
}

// Whether ties must be handled whatever the factor is. [Note: e2m1 by bytes]
template <class T>
constexpr bool kTies = T::kBytes == 4;

// ---- two runs of 16 numbers ---------------------------------------------------------------------------------------

// A thread's numbers: 16 numbers from each of two neighbouring rows.
template <class T>
struct RunsOfRows {
  using Number = T;
  Numbers<T, kRun> runs[2];

  // Loads them, given the place of the first in a panel.
  template <class Panel>
  __device__ __forceinline__ void load(const char* stage, int place) {
#pragma unroll
    for (int i = 0; i < 2; ++i) runs[i].load(stage + i * Panel::kRowBytes, place);
  }

  __device__ __forceinline__ float value(int run, int i) const { return runs[run][i]; }

  // Finds the largest magnitude of each run, as float32 bits; non-finite if any number is.
  __device__ __forceinline__ void max(uint32_t (&tops)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t top = runs[r].words[0];
#pragma unroll
      for (int w = 1; w < Numbers<T, kRun>::kWords; ++w) top = larger_magnitudes<T>(top, runs[r].words[w]);
      tops[r] = widen_magnitude<T>(fold_halves<T>(magnitudes<T>(top)));
    }
  }
};

// The same with rows and columns exchanged.
template <class T>
struct RunsOfColumns {
  using Number = T;
  static constexpr int kWords = 2 * T::kBytes / 4;  // words per row
  uint32_t words[kRun][kWords];

  template <class Panel>
  __device__ __forceinline__ void load(const char* stage, int place) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const char* in = stage + (place ^ Panel::crossed(i)) + i * Panel::kRowBytes;
      if constexpr (kWords == 2) {
        const uint2 both = *reinterpret_cast<const uint2*>(in);
        words[i][0] = both.x;
        words[i][1] = both.y;
      } else {
        words[i][0] = *reinterpret_cast<const uint32_t*>(in);
      }
    }
  }

  __device__ __forceinline__ float value(int run, int i) const { return value_of<T>(words[i], run); }

  __device__ __forceinline__ void max(uint32_t (&tops)[2]) const {
    uint32_t top[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      top[w] = words[0][w];
#pragma unroll
      for (int i = 1; i < kRun; ++i) top[w] = larger_magnitudes<T>(top[w], words[i][w]);
      top[w] = magnitudes<T>(top[w]);
    }
    if constexpr (kWords == 2) {
      tops[0] = top[0];
      tops[1] = top[1];
    } else {
      tops[0] = widen_magnitude<T>(top[0] & 0xFFFFu);
      tops[1] = widen_magnitude<T>(top[0] >> 16);
    }
  }

  __device__ __forceinline__ RunsOfColumns<F32> transformed() const {
    RunsOfColumns<F32> out;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float x[kRun];
#pragma unroll
      for (int i = 0; i < kRun; ++i) x[i] = value(r, i);
      hadamard_run(x);
#pragma unroll
      for (int i = 0; i < kRun; ++i) out.words[i][r] = __float_as_uint(x[i]);
    }
    return out;
  }
};

// ---- copies -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ const float* amax_of(const Copy& copy, const QuantizeJob& job, int64_t matrix) {
  // a 64-bit division is slow, and usually not needed
  return copy.amax + (matrix == 0 ? 0 : matrix / job.count_per_amax * job.amax_stride);
}

// Clears the gaps after a matrix's codes and scales; done by the matrix's first panel.
__device__ __forceinline__ void zero_gaps(const Copy& copy, const Place& at) {
  if (at.row + at.col > 0) return;
  const int i = static_cast<int>(threadIdx.x);
  if (i < copy.codes_gap) copy.codes[at.matrix * copy.codes_stride + copy.codes_bytes + i] = 0;
  if (i < copy.scales_gap) copy.scales[at.matrix * copy.scales_stride + copy.scales_bytes + i] = 0;
}

// ---- scales -------------------------------------------------------------------------------------------------------

// A tensor's scale and, for blocks of 16, a table in shared memory with the factor for every possible scale code. A
// factor is negative if its products may be ties.
struct TensorScale {
  Nvfp4Scale scale;
  const float* factors;
};

// The scale of a block. `plain`: all its numbers are finite and, for e2m1, no product saturates or is a tie that needs
// care.
struct Scaled {
  uint32_t code;
  float factor;
  bool plain;
};

// Each of the first threads of a block computes one factor. All threads must be synchronized before factors are used.
template <Kind kind, class T>
__device__ __forceinline__ TensorScale tensor_scale_of(const float* amax, const Parameters& p, float* factors) {
  if constexpr (kind == Kind::kExponents) return {};
  if constexpr (kind == Kind::kTensor) return {{tensor_scale(p.largest, *amax), 0.0f}, nullptr};
  const Nvfp4Scale scale = nvfp4_scale(*amax);
  if (threadIdx.x < kScaleCodes) {
    float factor = e4m3_scale_factor(threadIdx.x, scale);
    if constexpr (!kTies<T>) {
      if (may_tie<T::kBits>(factor)) factor = -factor;
    }
    factors[threadIdx.x] = factor;
  }
  return {scale, factors};
}

template <Kind kind>
__device__ __forceinline__ Scaled scale_of(uint32_t top_bits, const TensorScale& tensor, const Parameters& p) {
  const bool finite = top_bits < kInfinity;
  const float top = __uint_as_float(top_bits);
  if constexpr (kind == Kind::kExponents) {
    const BlockScale scale = e8m0_block_scale(top, p.inverse_max);
    return {scale.code, scale.factor, finite};
  } else if constexpr (kind == Kind::kTensor) {
    return {0, tensor.scale.per_step, finite};
  } else {
    const uint32_t code = e4m3_scale_code(top, tensor.scale);
    const float factor = tensor.factors[code];
    // as unsigned integers, NaN and negative numbers are larger
    return {code, factor, __float_as_uint(top * factor) < __float_as_uint(kE2m1Safe)};
  }
}

// Returns the scale's code as it is stored.
template <Kind kind>
__device__ __forceinline__ uint8_t scale_code(const Scaled& block, bool finite) {
  if (finite) return static_cast<uint8_t>(block.code);
  return kind == Kind::kExponents ? kNanScale8 : kNanCode;
}

// ---- codes of eight numbers ---------------------------------------------------------------------------------------

// Encodes plain blocks.
template <Kind kind, class Runs, int kWords>
__device__ __forceinline__ void plain_codes(const Runs& x, int run, const Scaled& block, const Parameters& p,
                                            uint32_t (&words)[kWords]) {
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    float eight[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) eight[i] = x.value(run, part * 8 + i);
    if constexpr (kFp4<kind>) {
      words[part] = encode_e2m1_x8<false, kTies<typename Runs::Number>>(eight, block.factor);
    } else {
      const uint2 both = encode_fp8_x8(eight, block.factor, p.e5m2);
      words[2 * part] = both.x;
      words[2 * part + 1] = both.y;
    }
  }
}

// Encodes any block, with saturation. A non-finite block gets zeros, because its scale is NaN; for formats without
// block scales, each non-finite number gets NaN.
template <Kind kind, class Runs, int kWords>
__device__ __forceinline__ void any_codes(const Runs& x, int run, const Scaled& block, bool finite, const Parameters& p,
                                          uint32_t (&words)[kWords]) {
#pragma unroll
  for (uint32_t& word : words) word = 0;
  if (kind != Kind::kTensor && !finite) return;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    float eight[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) eight[i] = x.value(run, part * 8 + i);
    if constexpr (kFp4<kind>) {
      words[part] = encode_e2m1_x8<true, true>(eight, fabsf(block.factor));
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        uint32_t code = encode_fp8_x2(eight[i] * block.factor, 0.0f, p.e5m2) & 0xFFu;
        if (kind == Kind::kTensor && (__float_as_uint(eight[i]) & kMagnitude) >= kInfinity) code = kNanCode;
        words[2 * part + i / 4] |= code << (i % 4 * 8);
      }
    }
  }
}

template <class Runs>
__device__ __forceinline__ void stochastic_codes(const Runs& x, int run, const Scaled& block, bool finite,
                                                 const RandomWords& random, uint32_t (&words)[2]) {
  words[0] = words[1] = 0;
  if (!finite) return;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const float value = x.value(run, i);
    const uint32_t code = encode_e2m1_stochastic(fabsf(value * block.factor), random.octet(i));
    words[i / 8] |= (code | (__float_as_uint(value) >> 28 & 8u)) << (i % 8 * 4);
  }
}

}  // namespace gtp::cuda
