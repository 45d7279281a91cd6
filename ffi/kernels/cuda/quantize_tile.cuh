// What all copies of a tile are made of: its numbers as loaded, the scale of a block, codes as stored.
#pragma once

#include "device.cuh"
#include "gtp/jobs.h"

namespace gtp::cuda {

constexpr int kThreads = 128;
constexpr int kRowsPerThread = 4;
constexpr int kScaleCodes = 128;  // of e4m3, without a sign

struct Parameters {
  const uint32_t* key;
  float largest;  // of the format, for FP8
  float inverse_max;
  bool hadamard;
  bool e5m2;
};

// A matrix of the job, and the first row and column of a strip of tiles.
struct Place {
  int64_t matrix, row, col;
};

// How much of a tile there is.
struct Extent {
  int rows, cols;
};

// ---- in and out ---------------------------------------------------------------------------------------------------

// Numbers of a row as they are stored.
template <class T, int kCount>
struct Numbers {
  static constexpr int kWords = kCount * T::kBytes / 4;
  uint32_t words[kWords];

  __device__ __forceinline__ float operator[](int i) const { return value_of<T>(words, i); }

  __device__ __forceinline__ uint32_t max() const {
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < kWords; i += 2) top = max_magnitude<T>(top, words[i], words[i + 1]);
    return fold_halves<T>(top);
  }

  // Eight of them, and their signs.
  __device__ __forceinline__ void floats(int first, float (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = (*this)[first + i];
  }

  __device__ __forceinline__ uint32_t signs(int first) const {
    const uint32_t* w = words + first * T::kBytes / 4;
    if constexpr (T::kBytes == 4) {
      const uint32_t even = __byte_perm(__byte_perm(w[0], w[2], 0x73), __byte_perm(w[4], w[6], 0x73), 0x5410);
      const uint32_t odd = __byte_perm(__byte_perm(w[1], w[3], 0x73), __byte_perm(w[5], w[7], 0x73), 0x5410);
      return nibble_signs(even, odd);
    } else {
      const uint32_t low = __byte_perm(w[0], w[1], 0x7351), high = __byte_perm(w[2], w[3], 0x7351);
      return nibble_signs(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
    }
  }
};

// A tile waits in shared memory, which loads fill ahead of use. A warp loads 16 of its rows.
template <class T>
struct Stage {
  static constexpr int kWords = kTileElements * T::kBytes / 4;

  // This thread's four rows of eight columns. 16 bytes at a time, in the background, of a tile that is whole and aligned.
  __device__ __forceinline__ static void fill(uint32_t* stage, const typename T::Storage* x, int64_t pitch) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(place(stage, i)));
      const auto* from = x + i * 4 * pitch;
#pragma unroll
      for (int k = 0; k < 8 * T::kBytes; k += 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + k), "l"(reinterpret_cast<const char*>(from) + k)
                     : "memory");
      }
    }
  }

  // The same for what there is of them; the rest is zero.
  __device__ __forceinline__ static void fill_part(uint32_t* stage, const typename T::Storage* x, int64_t pitch,
                                                   const Extent& extent) {
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16 + lane / 8;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int valid = first_row + i * 4 < extent.rows ? extent.cols - lane % 8 * 8 : 0;
      auto* to = reinterpret_cast<typename T::Storage*>(place(stage, i));
#pragma unroll
      for (int k = 0; k < 8; ++k) to[k] = k < valid ? x[i * 4 * pitch + k] : typename T::Storage{};
    }
  }

  // Numbers of a row from a column on.
  template <int kCount>
  __device__ __forceinline__ static Numbers<T, kCount> read(const uint32_t* stage, int row, int col) {
    Numbers<T, kCount> numbers;
    const auto* from = reinterpret_cast<const uint4*>(stage + tile_offset(row, col) * T::kBytes / 4);
#pragma unroll
    for (int w = 0; w < numbers.kWords / 4; ++w) {
      const uint4 words = from[w];
      numbers.words[4 * w] = words.x;
      numbers.words[4 * w + 1] = words.y;
      numbers.words[4 * w + 2] = words.z;
      numbers.words[4 * w + 3] = words.w;
    }
    return numbers;
  }

 private:
  __device__ __forceinline__ static uint32_t* place(uint32_t* stage, int i) {
    const int lane = threadIdx.x % 32;
    return stage + tile_offset(threadIdx.x / 32 * 16 + i * 4 + lane / 8, lane % 8 * 8) * T::kBytes / 4;
  }
};

// Where a row of a tile's codes of e2m1 begins, in words: the gaps let rows be read without bank conflicts.
__device__ __forceinline__ int nibble_offset(int row) { return row * 8 + row / 8 * 4; }
constexpr int kNibbleWords = kTile * 8 + kTile / 8 * 4;

// The first `bytes` of up to 16 bytes, in one store if `wide`.
template <bool kWhole, int kWords>
__device__ __forceinline__ void store(uint8_t* out, const uint32_t (&words)[kWords], int bytes, bool wide) {
  if (kWhole || (wide && bytes == 4 * kWords)) return store_words(out, words);
#pragma unroll
  for (int i = 0; i < 4 * kWords; ++i) {
    if (i < bytes) out[i] = static_cast<uint8_t>(words[i / 4] >> (i % 4 * 8));
  }
}

// ---- scales -------------------------------------------------------------------------------------------------------

// A tensor's scale, and for blocks of 16 the factor of every code that a block's scale may have, in shared memory.
struct TensorScale {
  Nvfp4Scale scale;
  const float* factors;
};

struct Scaled {
  uint8_t code;
  float factor;
  bool finite;
  bool safe;  // for e2m1: no product reaches `kE2m1Safe`
};

// One factor by each thread; the block must meet before they are used.
template <Kind kind>
__device__ __forceinline__ TensorScale tensor_scale_of(const Copy& copy, const QuantizeJob& job, int64_t matrix,
                                                       const Parameters& p, float* factors) {
  if constexpr (kind == Kind::kExponents) return {};
  // a division of 64 bits is slow, and most often not needed
  const int64_t index = matrix == 0 ? 0 : matrix / job.count_per_amax * job.amax_stride;
  const float amax = copy.amax[index];
  if constexpr (kind == Kind::kTensor) return {{tensor_scale(p.largest, amax), 0.0f}, nullptr};
  const Nvfp4Scale scale = nvfp4_scale(amax);
  if constexpr (kind == Kind::kRuns) factors[threadIdx.x] = e4m3_scale_factor(threadIdx.x, scale);
  return {scale, factors};
}

template <Kind kind>
__device__ __forceinline__ Scaled scale_of(uint32_t top_bits, const TensorScale& tensor, const Parameters& p) {
  const bool finite = top_bits < kInfinity;
  const float top = __uint_as_float(finite ? top_bits : 0u);
  if constexpr (kind == Kind::kExponents) {
    const BlockScale scale = e8m0_block_scale(top, p.inverse_max);
    return {finite ? scale.code : kNanScale8, scale.factor, finite, true};
  } else {
    const uint32_t code = e4m3_scale_code(top, tensor.scale);
    const float factor = kind == Kind::kRuns ? tensor.factors[code] : e4m3_scale_factor(code, tensor.scale);
    return {static_cast<uint8_t>(finite ? code : kNanCode), factor, finite, top * factor < kE2m1Safe};
  }
}

// ---- codes of eight numbers ---------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t block_e2m1_x8(const float (&x)[8], const Scaled& block, uint32_t signs) {
  if (!block.finite) return 0;
  return block.safe ? encode_e2m1_x8<false>(x, block.factor, signs) : encode_e2m1_x8<true>(x, block.factor, signs);
}

// Numbers `first` to `first` + 7 of a run.
__device__ __forceinline__ uint32_t stochastic_x8(const float (&x)[8], const Scaled& block, const RandomWords& random,
                                                  int first) {
  if (!block.finite) return 0;
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t code = encode_e2m1_stochastic(fabsf(x[i]) * block.factor, random.octet(first + i)) |
                          (__float_as_uint(x[i]) >> 28 & 8u);
    word |= code << (4 * i);
  }
  return word;
}

__device__ __forceinline__ uint2 block_fp8_x8(const float (&x)[8], const Scaled& block, bool e5m2) {
  return block.finite ? encode_fp8_x8(x, block.factor, e5m2) : make_uint2(0, 0);
}

// Without a block, what is not finite becomes NaN by itself.
__device__ __forceinline__ uint2 tensor_fp8_x8(const float (&x)[8], float factor, bool e5m2, bool all_finite) {
  uint2 words = encode_fp8_x8(x, factor, e5m2);
  if (all_finite) return words;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if ((__float_as_uint(x[i]) & kMagnitude) < kInfinity) continue;
    uint32_t& word = i < 4 ? words.x : words.y;
    word = (word & ~(0xFFu << (i % 4 * 8))) | static_cast<uint32_t>(kNanCode) << (i % 4 * 8);
  }
  return words;
}

}  // namespace gtp::cuda
