// Dequantization of codes that lie transposed.
#pragma once

#include "dequantize_tile.cuh"

namespace gtp::cuda::dequantization {

// Codes R x C to values C x R, 64 x 64 of them a block. A thread reads 8 codes of four neighbouring rows, and writes 16
// bytes of a column at a time.
template <class T, Kind kind>
struct TurnedTile {
  static constexpr int kBytes = kCodeBytes<kind, 8>;

  const uint8_t* codes;  // of the thread's first code
  const uint8_t* scales;
  int64_t pitch, scales_pitch;
  typename T::Storage* out;  // of the values of the tile's first row and column
  int64_t out_pitch;
  float amax;
  bool wide, wide_out;

  // Its codes, so many rows and columns of them, as values, into shared memory.
  template <bool kWhole>
  __device__ __forceinline__ void read(const Parameters& p, int rows, int cols, uint32_t* shared) const {
    const int lane = threadIdx.x % 32, r = threadIdx.x / 32 * 16 + lane / 8 * 4, c = lane % 8 * 8;
    const int valid = kWhole ? 8 : max(0, min(8, cols - c));
    uint32_t words[4][kBytes / 4];
    uint32_t scale[4] = {};
    constexpr bool kOneScale = kind == Kind::kTiles || kind == Kind::kTensor;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool there = kWhole || (r + i < rows && valid > 0);
      load_codes<kBytes, kWhole>(codes + i * pitch, !there ? 0 : kFp4<kind> ? (valid + 1) / 2 : valid, wide, words[i]);
      if (kind != Kind::kTensor && there && (!kOneScale || i == 0)) scale[i] = scales[kOneScale ? 0 : i * scales_pitch];
    }
    const OneFactor one(factor_of<kind>(scale[0], amax, p));
    uint32_t numbers[4][8 * T::kBytes / 4];  // of a row
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x[8];
      const bool special =
          decode<kind>(words[i], kOneScale ? one : OneFactor(factor_of<kind>(scale[i], amax, p)), p.e5m2, x);
#pragma unroll
      for (int k = 0; k < 8; k += kWidth<T>) {
        uint32_t some[4];
        round_all<T>(reinterpret_cast<const float(&)[kWidth<T>]>(x[k]), special, some);
#pragma unroll
        for (int w = 0; w < 4; ++w) numbers[i][k * T::kBytes / 4 + w] = some[w];
      }
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      uint32_t* to = shared + tile_offset(c + k, r) * T::kBytes / 4;
      if constexpr (T::kBytes == 4) {
        *reinterpret_cast<uint4*>(to) = make_uint4(numbers[0][k], numbers[1][k], numbers[2][k], numbers[3][k]);
      } else {
        const uint32_t pick = k % 2 ? 0x7632 : 0x5410;
        *reinterpret_cast<uint2*>(to) = make_uint2(__byte_perm(numbers[0][k / 2], numbers[1][k / 2], pick),
                                                   __byte_perm(numbers[2][k / 2], numbers[3][k / 2], pick));
      }
    }
  }

  template <bool kWhole>
  __device__ __forceinline__ void write(int rows, int cols, const uint32_t* shared) const {
    constexpr int kCount = kWidth<T>, kAcross = kTile / kCount, kTurns = kTile * kAcross / kThreads;
    const int r = threadIdx.x % kAcross * kCount;
    const int valid = kWhole ? kCount : min(kCount, rows - r);
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int c = i * (kTile / kTurns) + threadIdx.x / kAcross;
      if (!kWhole && (c >= cols || valid <= 0)) continue;
      const uint4 words = *reinterpret_cast<const uint4*>(shared + tile_offset(c, r) * T::kBytes / 4);
      const uint32_t numbers[4] = {words.x, words.y, words.z, words.w};
      auto* to = out + c * out_pitch + r;
      if (kWhole || (wide_out && valid == kCount)) {
        store_words(to, numbers);
      } else {
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          if (k < valid) to[k] = number_of<T>(numbers, k);
        }
      }
    }
  }
};

template <class T, Kind kind>
__device__ __forceinline__ void turned_tile(const DequantizeJob& job, const Parameters& p, uint32_t index,
                                             uint32_t* shared) {
  constexpr int kBlock = kind == Kind::kExponents ? 32 : 16;
  const Place at(job, index, job.rows, job.cols, kTile, kTile);
  const int lane = threadIdx.x % 32;
  const int64_t row = at.row + threadIdx.x / 32 * 16 + lane / 8 * 4, col = at.col + lane % 8 * 8;
  TurnedTile<T, kind> turned;
  const uint8_t* first = job.codes + at.matrix * job.codes_stride;
  turned.pitch = kFp4<kind> ? ceil_div(job.cols, 2) : job.cols;
  turned.codes = first + row * turned.pitch + (kFp4<kind> ? col / 2 : col);
  turned.wide = turned.pitch % turned.kBytes == 0 && aligned(first, turned.kBytes);
  turned.scales_pitch = ceil_div(job.cols, kBlock);
  turned.scales = job.scales + at.matrix * job.scales_stride +
                 (kind == Kind::kTiles ? row / 16 : row) * turned.scales_pitch + col / kBlock;
  auto* values = static_cast<typename T::Storage*>(job.x) + at.matrix * job.x_stride;
  turned.out_pitch = job.rows;
  turned.out = values + at.col * job.rows + at.row;
  turned.wide_out = job.rows * T::kBytes % 16 == 0 && aligned(values, 16);
  turned.amax = amax_of<kind>(job, at.matrix);

  const int rows = static_cast<int>(min(int64_t{kTile}, job.rows - at.row));
  const int cols = static_cast<int>(min(int64_t{kTile}, job.cols - at.col));
  if (turned.wide && turned.wide_out && rows == kTile && cols == kTile) {
    turned.template read<true>(p, rows, cols, shared);
    __syncthreads();
    turned.template write<true>(rows, cols, shared);
  } else {
    turned.template read<false>(p, rows, cols, shared);
    __syncthreads();
    turned.template write<false>(rows, cols, shared);
  }
}

}  // namespace gtp::cuda::dequantization
