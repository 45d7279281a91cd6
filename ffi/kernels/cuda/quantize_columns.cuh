// The two column copies of a tile: the one that stays as it is, and the transposed one.
#pragma once

#include "quantize_tile.cuh"

namespace gtp::cuda {

// ---- the column copy that stays as it is --------------------------------------------------------------------------

// Blocks of 32 rows of a column: two warps each.
template <class T>
__device__ __forceinline__ void column_copy_in_place(const QuantizeJob& job, const Parameters& p, const Place& at,
                                                     const Eight<T> (&x)[kRowsPerThread], uint32_t* shared) {
  constexpr int kSize = 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane % 8;
  uint32_t(*tops)[kTile] = reinterpret_cast<uint32_t(*)[kTile]>(shared);                   // of a warp's rows
  float(*factors)[kTile] = reinterpret_cast<float(*)[kTile]>(shared + kThreads / 32 * kTile);  // NaN: not finite

  uint32_t words[Eight<T>::kWords];
#pragma unroll
  for (int i = 0; i < Eight<T>::kWords; ++i) {
    uint32_t top = 0;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) top = max_magnitude<T>(top, x[r].words[i]);
    top = max_magnitude<T>(top, __shfl_xor_sync(0xFFFFFFFFu, top, 8));
    words[i] = max_magnitude<T>(top, __shfl_xor_sync(0xFFFFFFFFu, top, 16));
  }
  if (lane < 8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) tops[warp][group * 8 + i] = __float_as_uint(value_of<T>(words, i));
  }
  __syncthreads();
  {
    const int block = threadIdx.x / kTile, k = threadIdx.x % kTile;
    const Scaled scale = scale_of<Kind::kExponents>(max(tops[2 * block][k], tops[2 * block + 1][k]), {}, p);
    factors[block][k] = scale.finite ? scale.factor : __uint_as_float(kNan);
    const int64_t row = at.row + block * kSize, col = at.col + k;
    if (row < job.rows && col < job.cols) {
      uint8_t* scales = job.column.scales + at.matrix * job.column.scales_stride;
      scales[row / kSize * job.cols + col] = scale.code;
    }
  }
  __syncthreads();
  const int64_t col = at.col + group * 8;
  const int valid = static_cast<int>(min(static_cast<int64_t>(8), job.cols - col));
  uint8_t* codes = job.column.codes + at.matrix * job.column.codes_stride;
  const bool wide = job.cols % 8 == 0 && aligned(codes, 8);
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const int64_t row = at.row + warp * 16 + r * 4 + lane / 8;
    if (row >= job.rows || valid <= 0) continue;
    uint32_t out[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float low = factors[warp / 2][group * 8 + i], high = factors[warp / 2][group * 8 + i + 1];
      uint32_t pair = encode_fp8_x2(x[r][i] * low, x[r][i + 1] * high, p.e5m2);
      if (isnan(low)) pair &= 0xFF00u;
      if (isnan(high)) pair &= 0x00FFu;
      out[i / 4] |= pair << (i % 4 * 8);
    }
    store(codes + row * job.cols + col, out, valid, wide);
  }
}

// ---- the transposed column copy -----------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ void store_tile(const Eight<T> (&x)[kRowsPerThread], uint32_t* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane % 8;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    uint32_t* out = shared + tile_offset(warp * 16 + i * 4 + lane / 8, group * 8) * T::kBytes / 4;
#pragma unroll
    for (int w = 0; w < Eight<T>::kWords; w += 4) {
      *reinterpret_cast<uint4*>(out + w) =
          make_uint4(x[i].words[w], x[i].words[w + 1], x[i].words[w + 2], x[i].words[w + 3]);
    }
  }
}

// Sixteen rows of two neighbouring columns, as floats.
template <class T>
struct TwoColumns {
  float x[2][kRun];
};

template <class T>
__device__ __forceinline__ TwoColumns<T> load_columns(const uint32_t* shared, int run, int pair) {
  TwoColumns<T> columns;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const uint32_t* in = shared + tile_offset(run * kRun + i, pair * 2) * T::kBytes / 4;
    if constexpr (T::kBytes == 4) {
      const uint2 words = *reinterpret_cast<const uint2*>(in);
      columns.x[0][i] = __uint_as_float(words.x);
      columns.x[1][i] = __uint_as_float(words.y);
    } else {
      const uint32_t word = *in;
      columns.x[0][i] = value_of<T>(&word, 0);
      columns.x[1][i] = value_of<T>(&word, 1);
    }
  }
  return columns;
}

__device__ __forceinline__ uint32_t column_max(const float (&x)[kRun]) {
  uint32_t top = 0;
#pragma unroll
  for (int i = 0; i < kRun; ++i) top = max(top, __float_as_uint(x[i]) & kMagnitude);
  return top;
}

template <class T, Kind kind, bool kExtras>
__device__ __forceinline__ void column_copy_transposed(const QuantizeJob& job, const Parameters& p, const Place& at,
                                                       const uint32_t* shared) {
  // a warp takes 16 columns, so that it holds whole 16 x 16 blocks; four lanes write one column's 64 codes
  const int lane = threadIdx.x % 32, run = lane % 4, pair = threadIdx.x / 32 * 8 + lane / 4;
  const bool hadamard = kExtras && kind == Kind::kRuns && p.hadamard;
  const int64_t length = hadamard ? ceil_div(job.rows, kRun) * kRun : job.rows;
  const int64_t row = at.row + run * kRun;
  const int valid = static_cast<int>(max(static_cast<int64_t>(0), min(static_cast<int64_t>(kRun), length - row)));
  const Nvfp4Scale tensor = tensor_of(job.column, job, at.matrix, kind, p);
  const int64_t pitch = kFp4<kind> ? ceil_div(length, 2) : length;
  uint8_t* codes = job.column.codes + at.matrix * job.column.codes_stride;
  uint8_t* scales = job.column.scales + at.matrix * job.column.scales_stride;
  const bool wide = pitch % (kFp4<kind> ? 8 : 16) == 0 && aligned(codes, kFp4<kind> ? 8 : 16);

  TwoColumns<T> columns = load_columns<T>(shared, run, pair);
  if (hadamard) {
    hadamard_run(columns.x[0]);
    hadamard_run(columns.x[1]);
  }
  Scaled tile{};
  if constexpr (kind == Kind::kTiles) {
    uint32_t top = max(column_max(columns.x[0]), column_max(columns.x[1]));
    top = shuffle_max(shuffle_max(shuffle_max(top, 4), 8), 16);
    tile = scale_of<kind>(top, tensor, p);
    if (lane < 4 && valid > 0 && at.col + pair * 2 < job.cols) {
      scales[(at.col + pair * 2) / 16 * ceil_div(length, 16) + row / 16] = tile.code;
    }
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float(&x)[kRun] = columns.x[c];
    const int64_t col = at.col + pair * 2 + c;
    Scaled block = tile;
    if constexpr (kind == Kind::kRuns || kind == Kind::kExponents) {
      constexpr int kSize = kind == Kind::kRuns ? 16 : 32;
      uint32_t top = column_max(x);
      if constexpr (kind == Kind::kExponents) top = shuffle_max(top, 1);
      block = scale_of<kind>(top, tensor, p);
      if (run % (kSize / 16) == 0 && valid > 0 && col < job.cols) {
        scales[col * ceil_div(length, kSize) + row / kSize] = block.code;
      }
    }
    if (col >= job.cols || valid == 0) continue;
    const float(&first)[8] = reinterpret_cast<const float(&)[8]>(x[0]);
    const float(&second)[8] = reinterpret_cast<const float(&)[8]>(x[8]);
    if constexpr (kFp4<kind>) {
      uint32_t words[2];
      if (kExtras && p.key) {
        const uint64_t index = (at.matrix * job.cols + col) * ceil_div(length, kRun) + row / kRun;
        const RandomWords random = random_words(index, 1, p.key[0], p.key[1]);
        words[0] = stochastic_x8(first, block.factor, random, 0);
        words[1] = stochastic_x8(second, block.factor, random, 8);
      } else {
        words[0] = encode_e2m1_x8(first, block.factor);
        words[1] = encode_e2m1_x8(second, block.factor);
      }
      if (!block.finite) words[0] = words[1] = 0;
      store(codes + col * pitch + row / 2, words, (valid + 1) / 2, wide);
    } else {
      uint2 low, high;
      if constexpr (kind == Kind::kTensor) {
        low = tensor_x8(first, tensor.per_step, p.e5m2);
        high = tensor_x8(second, tensor.per_step, p.e5m2);
      } else {
        low = encode_fp8_x8(first, block.factor, p.e5m2);
        high = encode_fp8_x8(second, block.factor, p.e5m2);
        if (!block.finite) low = high = make_uint2(0, 0);
      }
      const uint32_t words[4] = {low.x, low.y, high.x, high.y};
      store(codes + col * pitch + row, words, valid, wide);
    }
  }
}

}  // namespace gtp::cuda
