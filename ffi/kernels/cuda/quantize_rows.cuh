// The row copy of a tile, from registers.
#pragma once

#include "quantize_tile.cuh"

namespace gtp::cuda {

template <class T, Kind kind, bool kStochastic>
__device__ __forceinline__ void row_copy(const QuantizeJob& job, const Parameters& p, const Place& at,
                                         const Eight<T> (&x)[kRowsPerThread]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane % 8;
  const Nvfp4Scale tensor = tensor_of(job.row, job, at.matrix, kind, p);
  const int64_t col = at.col + group * 8, first_row = at.row + warp * 16;
  const int valid = static_cast<int>(min(static_cast<int64_t>(8), job.cols - col));
  const int64_t pitch = kFp4<kind> ? ceil_div(job.cols, 2) : job.cols;
  uint8_t* codes = job.row.codes + at.matrix * job.row.codes_stride;
  uint8_t* scales = job.row.scales + at.matrix * job.row.scales_stride;
  const bool wide = pitch % (kFp4<kind> ? 4 : 8) == 0 && aligned(codes, kFp4<kind> ? 4 : 8);

  Scaled tile{};
  if constexpr (kind == Kind::kTiles) {
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) top = max(top, x[i].max());
    top = shuffle_max(shuffle_max(shuffle_max(top, 1), 8), 16);
    tile = scale_of<kind>(widen_magnitude<T>(top), tensor, p);
    if (lane < 8 && group % 2 == 0 && valid > 0 && first_row < job.rows) {
      scales[first_row / 16 * ceil_div(job.cols, 16) + col / 16] = tile.code;
    }
  }
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int64_t row = first_row + i * 4 + lane / 8;
    float values[8];
    x[i].floats(values);
    Scaled block = tile;
    if constexpr (kind == Kind::kRuns || kind == Kind::kExponents) {
      uint32_t top = shuffle_max(x[i].max(), 1);
      if constexpr (kind == Kind::kExponents) top = shuffle_max(top, 2);
      block = scale_of<kind>(widen_magnitude<T>(top), tensor, p);
      constexpr int kSize = kind == Kind::kRuns ? 16 : 32;
      if (group % (kSize / 8) == 0 && valid > 0 && row < job.rows) {
        scales[row * ceil_div(job.cols, kSize) + col / kSize] = block.code;
      }
    }
    if (row >= job.rows || valid <= 0) continue;
    if constexpr (kFp4<kind>) {
      uint32_t word[1];
      if constexpr (kStochastic) {
        const uint64_t run = (at.matrix * job.rows + row) * ceil_div(job.cols, 16) + col / 16;
        word[0] = stochastic_x8(values, block.factor, random_words(run, 0, p.key[0], p.key[1]), group % 2 * 8);
      } else {
        word[0] = encode_e2m1_x8(values, block.factor);
      }
      if (!block.finite) word[0] = 0;
      store(codes + row * pitch + col / 2, word, (valid + 1) / 2, wide);
    } else {
      uint2 both;
      if constexpr (kind == Kind::kTensor) {
        both = tensor_x8(values, tensor.per_step, p.e5m2);
      } else {
        both = encode_fp8_x8(values, block.factor, p.e5m2);
        if (!block.finite) both = make_uint2(0, 0);
      }
      const uint32_t words[2] = {both.x, both.y};
      store(codes + row * pitch + col, words, valid, wide);
    }
  }
}

}  // namespace gtp::cuda
