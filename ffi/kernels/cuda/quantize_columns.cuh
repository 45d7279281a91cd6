// The two column copies of a tile: the one that stays as it is, and the transposed one.
#pragma once

#include "quantize_tile.cuh"

namespace gtp::cuda {

// ---- the column copy that stays as it is --------------------------------------------------------------------------

// Blocks of 32 rows of a column, two warps each. A thread has eight columns of four rows.
struct ColumnCopyInPlace {
  static constexpr int kBlock = 32;

  uint8_t* codes;   // of the thread's first number
  uint8_t* scales;  // of the one block whose scale the thread writes
  int64_t pitch;
  bool wide;

  __device__ __forceinline__ ColumnCopyInPlace(const QuantizeJob& job, const TensorScale&, const Place& at, bool)
      : pitch(job.cols) {
    const int lane = threadIdx.x % 32;
    uint8_t* first = job.column.codes + at.matrix * job.column.codes_stride;
    codes = first + (at.row + threadIdx.x / 32 * 16 + lane / 8) * pitch + at.col + lane % 8 * 8;
    wide = pitch % 8 == 0 && aligned(first, 8);
    scales = job.column.scales + at.matrix * job.column.scales_stride +
             (at.row / kBlock + threadIdx.x / kTile) * pitch + at.col + threadIdx.x % kTile;
  }

  __device__ __forceinline__ void next_tile() {
    codes += kTile;
    scales += kTile;
  }

  template <class T, bool kExtras, bool kWhole>
  __device__ __forceinline__ void write(const Parameters& p, const Extent& extent, const uint32_t* stage) const {
    __shared__ uint32_t tops[kThreads / 32][kTile];  // of a warp's rows
    __shared__ float factors[2][kTile];              // NaN: not finite
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane % 8;
    Numbers<T, 8> x[kRowsPerThread];
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      x[r] = Stage<T>::template read<8>(stage, warp * 16 + r * 4 + lane / 8, group * 8);
    }

    uint32_t words[Numbers<T, 8>::kWords];
#pragma unroll
    for (int i = 0; i < Numbers<T, 8>::kWords; ++i) {
      uint32_t top = max_magnitude<T>(0, x[0].words[i], x[1].words[i]);
      top = max_magnitude<T>(top, x[2].words[i], x[3].words[i]);
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
      if (kWhole || (block * kBlock < extent.rows && k < extent.cols)) *scales = scale.code;
    }
    __syncthreads();
    const int valid = kWhole ? 8 : min(8, extent.cols - group * 8);
    float factor[8];
    uint2 keep = make_uint2(0xFFFFFFFFu, 0xFFFFFFFFu);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      factor[i] = factors[warp / 2][group * 8 + i];
      if (isnan(factor[i])) (i < 4 ? keep.x : keep.y) &= ~(0xFFu << (i % 4 * 8));
    }
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      if (!kWhole && (valid <= 0 || warp * 16 + r * 4 + lane / 8 >= extent.rows)) continue;
      float scaled[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) scaled[i] = x[r][i] * factor[i];
      const uint2 both = encode_fp8_x8(scaled, 1.0f, p.e5m2);
      const uint32_t out[2] = {both.x & keep.x, both.y & keep.y};
      store<kWhole>(codes + r * 4 * pitch, out, valid, wide);
    }
  }
};

// ---- the transposed column copy -----------------------------------------------------------------------------------

// Sixteen rows of two neighbouring columns as they are stored.
template <class T>
struct TwoColumns {
  static constexpr int kWords = 2 * T::kBytes / 4;  // of a row
  uint32_t words[kRun][kWords];

  __device__ __forceinline__ void load(const uint32_t* shared, int run, int pair) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const uint32_t* in = shared + tile_offset(run * kRun + i, pair * 2) * T::kBytes / 4;
      if constexpr (kWords == 2) {
        const uint2 both = *reinterpret_cast<const uint2*>(in);
        words[i][0] = both.x;
        words[i][1] = both.y;
      } else {
        words[i][0] = *in;
      }
    }
  }

  // The largest magnitude of each column, as float32 bits.
  __device__ __forceinline__ void max(uint32_t (&tops)[2]) const {
    uint32_t top[kWords] = {};
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
#pragma unroll
      for (int i = 0; i < kRun; i += 2) top[w] = max_magnitude<T>(top[w], words[i][w], words[i + 1][w]);
    }
    if constexpr (kWords == 2) {
      tops[0] = top[0];
      tops[1] = top[1];
    } else {
      tops[0] = widen_magnitude<T>(top[0] & 0xFFFFu);
      tops[1] = widen_magnitude<T>(top[0] >> 16);
    }
  }

  // Eight numbers of a column, and their signs.
  __device__ __forceinline__ void floats(int column, int first, float (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = value_of<T>(words[first + i], column);
  }

  __device__ __forceinline__ uint32_t signs(int column, int first) const {
    const auto four = [&](int from) {  // bytes with the signs of every second number
      const int w = kWords == 2 ? column : 0, pick = kWords == 2 ? 0x73 : column ? 0x73 : 0x51;
      const auto* at = words + first + from;
      return __byte_perm(__byte_perm(at[0][w], at[2][w], pick), __byte_perm(at[4][w], at[6][w], pick), 0x5410);
    };
    return nibble_signs(four(0), four(1));
  }

  __device__ __forceinline__ TwoColumns<F32> transformed() const {
    TwoColumns<F32> out;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float x[kRun];
#pragma unroll
      for (int i = 0; i < kRun; ++i) x[i] = value_of<T>(words[i], c);
      hadamard_run(x);
#pragma unroll
      for (int i = 0; i < kRun; ++i) out.words[i][c] = __float_as_uint(x[i]);
    }
    return out;
  }
};

// A thread has 16 rows of two columns; four lanes write one column's 64 codes, and a warp takes 16 columns, so that it
// holds whole 16 x 16 blocks.
template <Kind kind>
struct ColumnCopyTransposed {
  static constexpr int kBlock = kind == Kind::kExponents ? 32 : 16;

  int64_t length;   // of a row of codes
  uint8_t* codes;   // of the thread's first number
  uint8_t* scales;  // of its block
  int64_t pitch, scales_pitch;
  TensorScale tensor;
  uint64_t run;
  uint64_t run_pitch;
  int valid_rows;  // of its 16
  bool wide;

  __device__ __forceinline__ static int run_of() { return threadIdx.x % 4; }
  __device__ __forceinline__ static int pair_of() { return threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4; }

  __device__ __forceinline__ ColumnCopyTransposed(const QuantizeJob& job, const TensorScale& tensor, const Place& at,
                                                  bool hadamard)
      : tensor(tensor) {
    length = hadamard ? ceil_div(job.rows, kRun) * kRun : job.rows;
    const int64_t row = at.row + run_of() * kRun, col = at.col + pair_of() * 2;
    valid_rows = static_cast<int>(max(int64_t{0}, min(int64_t{kRun}, length - row)));
    pitch = kFp4<kind> ? ceil_div(length, 2) : length;
    uint8_t* first = job.column.codes + at.matrix * job.column.codes_stride;
    codes = first + col * pitch + (kFp4<kind> ? row / 2 : row);
    wide = pitch % (kFp4<kind> ? 8 : 16) == 0 && aligned(first, kFp4<kind> ? 8 : 16);
    scales_pitch = ceil_div(length, kBlock);
    scales = job.column.scales + at.matrix * job.column.scales_stride +
             (kind == Kind::kTiles ? col / 16 : col) * scales_pitch + row / kBlock;
    run_pitch = ceil_div(length, kRun);
    run = (at.matrix * job.cols + col) * run_pitch + row / kRun;
  }

  __device__ __forceinline__ void next_tile() {
    codes += kTile * pitch;
    scales += (kind == Kind::kTiles ? kTile / 16 : kTile) * scales_pitch;
    run += kTile * run_pitch;
  }

  template <class T, bool kExtras, bool kWhole>
  __device__ __forceinline__ void write(const Parameters& p, const Extent& extent, const uint32_t* stage) const {
    TwoColumns<T> columns;
    columns.load(stage, run_of(), pair_of());
    if constexpr (kExtras && kind == Kind::kRuns) {
      if (p.hadamard) return write<F32, kExtras, kWhole>(p, extent, columns.transformed());
    }
    write<T, kExtras, kWhole>(p, extent, columns);
  }

 private:
  template <class T, bool kExtras, bool kWhole>
  __device__ __forceinline__ void write(const Parameters& p, const Extent& extent, const TwoColumns<T>& x) const {
    const int lane = threadIdx.x % 32, col = pair_of() * 2;
    const bool rows_there = kWhole || valid_rows > 0;
    uint32_t tops[2];
    x.max(tops);
    Scaled tile{};
    if constexpr (kind == Kind::kTiles) {
      const uint32_t top = shuffle_max(shuffle_max(shuffle_max(max(tops[0], tops[1]), 4), 8), 16);
      tile = scale_of<kind>(top, tensor, p);
      if (lane < 4 && rows_there && (kWhole || col < extent.cols)) *scales = tile.code;
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const bool there = kWhole || (rows_there && col + c < extent.cols);
      Scaled block = tile;
      if constexpr (kind == Kind::kRuns || kind == Kind::kExponents) {
        const uint32_t top = kind == Kind::kExponents ? shuffle_max(tops[c], 1) : tops[c];
        block = scale_of<kind>(top, tensor, p);
        if (run_of() % (kBlock / 16) == 0 && there) scales[c * scales_pitch] = block.code;
      }
      if (!there) continue;
      uint8_t* out = codes + c * pitch;
      float first[8], second[8];
      x.floats(c, 0, first);
      x.floats(c, 8, second);
      if constexpr (kFp4<kind>) {
        uint32_t words[2];
        if (kExtras && p.key) {
          const RandomWords random = random_words(run + c * run_pitch, 1, p.key[0], p.key[1]);
          words[0] = stochastic_x8(first, block, random, 0);
          words[1] = stochastic_x8(second, block, random, 8);
        } else {
          words[0] = block_e2m1_x8(first, block, x.signs(c, 0));
          words[1] = block_e2m1_x8(second, block, x.signs(c, 8));
        }
        store<kWhole>(out, words, (valid_rows + 1) / 2, wide);
      } else {
        uint2 low, high;
        if constexpr (kind == Kind::kTensor) {
          const bool finite = tops[c] < kInfinity;
          low = tensor_fp8_x8(first, tensor.scale.per_step, p.e5m2, finite);
          high = tensor_fp8_x8(second, tensor.scale.per_step, p.e5m2, finite);
        } else {
          low = block_fp8_x8(first, block, p.e5m2);
          high = block_fp8_x8(second, block, p.e5m2);
        }
        const uint32_t words[4] = {low.x, low.y, high.x, high.y};
        store<kWhole>(out, words, valid_rows, wide);
      }
    }
  }
};

}  // namespace gtp::cuda
