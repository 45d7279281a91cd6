// The row copy of a tile.
#pragma once

#include "quantize_tile.cuh"

namespace gtp::cuda {

// The row copy as a thread sees it, which takes a run of 16 columns of two rows, of those that its warp loaded. It moves
// along a strip.
template <Kind kind>
struct RowCopy {
  static constexpr int kBlock = kind == Kind::kExponents ? 32 : 16;
  static constexpr int kBytes = kFp4<kind> ? 8 : 16;  // of the codes of a run

  uint8_t* codes;  // of the thread's first number
  uint8_t* scales;
  int64_t pitch, scales_pitch;  // from a row of codes to the next; from a row of scales
  TensorScale tensor;
  uint64_t run;  // of the thread's first number, and from a row to the next
  uint64_t run_pitch;
  bool wide;

  __device__ __forceinline__ static int run_of() { return threadIdx.x % 4; }
  __device__ __forceinline__ static int row_of() { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4; }  // and 8 on

  __device__ __forceinline__ RowCopy(const QuantizeJob& job, const TensorScale& tensor, const Place& at) : tensor(tensor) {
    const int64_t row = at.row + row_of(), col = at.col + run_of() * kRun;
    pitch = kFp4<kind> ? ceil_div(job.cols, 2) : job.cols;
    uint8_t* first = job.row.codes + at.matrix * job.row.codes_stride;
    codes = first + row * pitch + (kFp4<kind> ? col / 2 : col);
    wide = pitch % kBytes == 0 && aligned(first, kBytes);
    scales_pitch = ceil_div(job.cols, kBlock);
    scales = job.row.scales + at.matrix * job.row.scales_stride + (kind == Kind::kTiles ? row / 16 : row) * scales_pitch +
             col / kBlock;
    run_pitch = ceil_div(job.cols, kRun);
    run = (at.matrix * job.rows + row) * run_pitch + col / kRun;
  }

  __device__ __forceinline__ void next_tile() {
    codes += kFp4<kind> ? kTile / 2 : kTile;
    scales += kTile / kBlock;
    run += kTile / kRun;
  }

  template <class T, bool kExtras, bool kWhole>
  __device__ __forceinline__ void write(const Parameters& p, const Extent& extent, const uint32_t* stage) const {
    Scaled tile;
    write<T, kExtras, kWhole>(p, extent, stage, tile, nullptr);
  }

  // Also tells the scale of the thread's 16 x 16 block, and keeps all codes of e2m1, as `nibble_offset` says.
  template <class T, bool kExtras, bool kWhole>
  __device__ __forceinline__ void write(const Parameters& p, const Extent& extent, const uint32_t* stage, Scaled& tile,
                                        uint32_t* nibbles) const {
    const int valid = kWhole ? kRun : min(kRun, extent.cols - run_of() * kRun);
    Numbers<T, kRun> x[2];
    uint32_t tops[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      x[i] = Stage<T>::template read<kRun>(stage, row_of() + 8 * i, run_of() * kRun);
      tops[i] = x[i].max();
    }
    if constexpr (kind == Kind::kTiles) {
      const uint32_t top = shuffle_max(shuffle_max(shuffle_max(max(tops[0], tops[1]), 4), 8), 16);
      tile = scale_of<kind>(widen_magnitude<T>(top), tensor, p);
      if (threadIdx.x % 32 < 4 && (kWhole || (valid > 0 && row_of() < extent.rows))) *scales = tile.code;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row_of() + 8 * i;
      const bool there = kWhole || (valid > 0 && row < extent.rows);
      Scaled block = tile;
      if constexpr (kind == Kind::kRuns || kind == Kind::kExponents) {
        const uint32_t top = kind == Kind::kExponents ? shuffle_max(tops[i], 1) : tops[i];
        block = scale_of<kind>(widen_magnitude<T>(top), tensor, p);
        if (run_of() % (kBlock / kRun) == 0 && there) scales[i * 8 * scales_pitch] = block.code;
      }
      if (!there && !nibbles) continue;
      uint8_t* out = codes + i * 8 * pitch;
      float first[8], second[8];
      x[i].floats(0, first);
      x[i].floats(8, second);
      if constexpr (kFp4<kind>) {
        uint32_t words[2];
        if (kExtras && p.key) {
          const RandomWords random = random_words(run + i * 8 * run_pitch, 0, p.key[0], p.key[1]);
          words[0] = stochastic_x8(first, block, random, 0);
          words[1] = stochastic_x8(second, block, random, 8);
        } else {
          words[0] = block_e2m1_x8(first, block, x[i].signs(0));
          words[1] = block_e2m1_x8(second, block, x[i].signs(8));
        }
        if (nibbles) {
          *reinterpret_cast<uint2*>(nibbles + nibble_offset(row) + run_of() * 2) = make_uint2(words[0], words[1]);
        }
        if (there) store<kWhole>(out, words, (valid + 1) / 2, wide);
      } else {
        uint2 low, high;
        if constexpr (kind == Kind::kTensor) {
          const bool finite = widen_magnitude<T>(tops[i]) < kInfinity;
          low = tensor_fp8_x8(first, tensor.scale.per_step, p.e5m2, finite);
          high = tensor_fp8_x8(second, tensor.scale.per_step, p.e5m2, finite);
        } else {
          low = block_fp8_x8(first, block, p.e5m2);
          high = block_fp8_x8(second, block, p.e5m2);
        }
        const uint32_t words[4] = {low.x, low.y, high.x, high.y};
        store<kWhole>(out, words, valid, wide);
      }
    }
  }
};

}  // namespace gtp::cuda
