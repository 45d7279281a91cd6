// Makes the column copy that is not transposed, with blocks of 32 rows of a column.
#pragma once

#include "quantize_panel.cuh"

namespace gtp::cuda {

// Two warps process the rows of a block. A thread has eight columns of four rows.
template <class T>
struct ColumnCopyInPlace {
  static constexpr bool kMeets = true;
  static constexpr int kBlock = 32, kRowsPerThread = 4;
  using Panel = cuda::Panel<T, Kind::kExponents>;

  uint8_t* codes;   // codes of the thread's first number
  uint8_t* scales;  // scale of the one block whose scale the thread writes
  int64_t pitch;
  bool wide;

  __device__ __forceinline__ void move_to(const QuantizeJob& job, const Place& at, const Parameters&,
                                          bool = false, TensorScale = {}) {
    zero_gaps(job.column, at);
    pitch = job.cols;
    const int lane = threadIdx.x % 32;
    uint8_t* first = job.column.codes + at.matrix * job.column.codes_stride;
    codes = first + (at.row + threadIdx.x / 32 * 16 + lane / 8) * pitch + at.col + lane % 8 * 8;
    wide = pitch % 8 == 0 && aligned(first, 8);
    scales = job.column.scales + at.matrix * job.column.scales_stride +
             (at.row / kBlock + threadIdx.x / kTile) * pitch + at.col + threadIdx.x % kTile;
  }

  __device__ __forceinline__ void next_part() {
    codes += kTile;
    scales += kTile;
  }
  __device__ __forceinline__ void next_panel() {}

  template <bool kExtras, bool kWhole>
  __device__ __forceinline__ void write(const Parameters& p, const Extent& rest, const char* stage, int part) const {
    __shared__ uint32_t tops[Panel::kThreads / 32][kTile];  // maxima over a warp's rows
    __shared__ float factors[2][kTile];                     // NaN if not finite
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane % 8, cols = rest.cols - part * kTile;
    Numbers<T, 8> x[kRowsPerThread];
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      x[r].load(stage, Panel::place(warp * 16 + r * 4 + lane / 8, part * kTile + group * 8));
    }

    uint32_t words[Numbers<T, 8>::kWords];
#pragma unroll
    for (int i = 0; i < Numbers<T, 8>::kWords; ++i) {
      uint32_t top = x[0].words[i];
#pragma unroll
      for (int r = 1; r < kRowsPerThread; ++r) top = larger_magnitudes<T>(top, x[r].words[i]);
      top = larger_magnitudes<T>(top, __shfl_xor_sync(0xFFFFFFFFu, top, 8));
      words[i] = magnitudes<T>(larger_magnitudes<T>(top, __shfl_xor_sync(0xFFFFFFFFu, top, 16)));
    }
    if (lane < 8) {
#pragma unroll
      for (int i = 0; i < 8; ++i) tops[warp][group * 8 + i] = __float_as_uint(value_of<T>(words, i));
    }
    __syncthreads();
    {
      const int block = threadIdx.x / kTile, k = threadIdx.x % kTile;
      const Scaled scale = scale_of<Kind::kExponents>(max(tops[2 * block][k], tops[2 * block + 1][k]), {}, p);
      factors[block][k] = scale.plain ? scale.factor : __uint_as_float(kNan);
      if (kWhole || (block * kBlock < rest.rows && k < cols)) {
        *scales = scale_code<Kind::kExponents>(scale, scale.plain);
      }
    }
    __syncthreads();
    const int valid = kWhole ? 8 : min(8, cols - group * 8);
    float factor[8];
    uint2 keep = make_uint2(0xFFFFFFFFu, 0xFFFFFFFFu);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      factor[i] = factors[warp / 2][group * 8 + i];
      if (isnan(factor[i])) (i < 4 ? keep.x : keep.y) &= ~(0xFFu << (i % 4 * 8));
    }
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      if (!kWhole && (valid <= 0 || warp * 16 + r * 4 + lane / 8 >= rest.rows)) continue;
      float scaled[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) scaled[i] = x[r][i] * factor[i];
      const uint2 both = encode_fp8_x8(scaled, 1.0f, p.e5m2);
      const uint32_t out[2] = {both.x & keep.x, both.y & keep.y};
      store<kWhole, false>(codes + r * 4 * pitch, out, valid, wide);
    }
  }
};

}  // namespace gtp::cuda
