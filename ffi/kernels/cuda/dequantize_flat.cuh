// Dequantizes codes that have the same layout as the values.
#pragma once

#include "dequantize_tile.cuh"

namespace gtp::cuda::dequantization {

// A warp processes eight rows, which lie in the same 16 x 16 block, and a thread 16 bytes of each row.
constexpr int kRowsPerThread = 8;
constexpr int kFlatRows = kThreads / 32 * kRowsPerThread;

// A thread's part of a tile. `kColumns`: for an MXFP8 column copy, in which every column has its own scale.
template <class T, Kind kind, bool kColumns, bool kWhole>
__device__ __forceinline__ void flat_part(const DequantizeJob& job, const Parameters& p, const uint8_t* codes,
                                          const uint8_t* scales, typename T::Storage* out, float amax, int64_t row,
                                          int64_t col, int64_t cols, int valid, int rows, bool wide, bool wide_out) {
  constexpr int kCount = kWidth<T>, kBytes = kCodeBytes<kind, kCount>;
  const int64_t pitch = kFp4<kind> ? ceil_div(cols, 2) : cols;
  const uint8_t* from = codes + row * pitch + (kFp4<kind> ? col / 2 : col);
  auto* to = out + row * cols + col;
  uint32_t words[kRowsPerThread][(kBytes + 3) / 4];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    if (!kWhole && i >= rows) break;
    load_codes<kBytes, kWhole>(from + i * pitch, kFp4<kind> ? (valid + 1) / 2 : valid, wide, words[i]);
  }
  const auto write = [&](int i, const auto& factors) {
    float x[kCount];
    uint32_t numbers[4];
    const bool special = decode<kind>(words[i], factors, p.e5m2, x);
    round_all<T>(x, special, numbers);
    auto* place = to + i * cols;
    if (kWhole || (wide_out && valid == kCount)) {
      store_words(place, numbers);
      return;
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (k < valid) place[k] = number_of<T>(numbers, k);
    }
  };
  if constexpr (kColumns) {
    ManyFactors<kCount> factors;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      factors.factor[k] = e8m0_block_factor(kWhole || k < valid ? scales[row / 32 * cols + col + k] : 0);
      factors.all_finite &= finite(factors.factor[k]);
    }
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (!kWhole && i >= rows) break;
      write(i, factors);
    }
  } else if constexpr (kind == Kind::kTiles || kind == Kind::kTensor) {
    const OneFactor factor(factor_of<kind>(load_scale<kind>(scales, row, col, cols), amax, p));
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (!kWhole && i >= rows) break;
      write(i, factor);
    }
  } else {
    uint32_t scale[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (!kWhole && i >= rows) break;
      scale[i] = load_scale<kind>(scales, row + i, col, cols);
    }
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (!kWhole && i >= rows) break;
      write(i, OneFactor(factor_of<kind>(scale[i], amax, p)));
    }
  }
}

template <class T, Kind kind, bool kColumns>
__device__ __forceinline__ void flat_tile(const DequantizeJob& job, const Parameters& p, uint32_t tile) {
  const int64_t rows = kColumns ? job.cols : job.rows, cols = kColumns ? job.rows : job.cols;
  const Place at(job, tile, rows, cols, kFlatRows, 32 * kWidth<T>);
  const int64_t row = at.row + threadIdx.x / 32 * kRowsPerThread, col = at.col + threadIdx.x % 32 * kWidth<T>;
  const int64_t end = min(rows, kColumns ? rows : job.rows_kept - at.matrix * rows);
  if (col >= cols || row >= end) return;  // `end` may be far below 0
  const int valid = static_cast<int>(min(int64_t{kWidth<T>}, cols - col));
  const int left = static_cast<int>(min(int64_t{kRowsPerThread}, end - row));

  constexpr int kBytes = kCodeBytes<kind, kWidth<T>>;
  const uint8_t* codes = job.codes + at.matrix * job.codes_stride;
  const uint8_t* scales = job.scales + at.matrix * job.scales_stride;
  auto* out = static_cast<typename T::Storage*>(job.x) + at.matrix * job.x_stride;
  const bool wide = (kFp4<kind> ? ceil_div(cols, 2) : cols) % kBytes == 0 && aligned(codes, kBytes);
  const bool wide_out = cols * T::kBytes % 16 == 0 && aligned(out, 16);
  const float amax = amax_of<kind>(job, at.matrix);
  if (wide && wide_out && valid == kWidth<T> && left == kRowsPerThread) {
    flat_part<T, kind, kColumns, true>(job, p, codes, scales, out, amax, row, col, cols, valid, left, true, true);
  } else {
    flat_part<T, kind, kColumns, false>(job, p, codes, scales, out, amax, row, col, cols, valid, left, wide, wide_out);
  }
}

}  // namespace gtp::cuda::dequantization
