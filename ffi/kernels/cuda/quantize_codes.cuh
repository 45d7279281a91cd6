// The transposed column copy of 16 x 16 blocks whose row copy is made as well.
#pragma once

#include "quantize_tile.cuh"

namespace gtp::cuda {

// The codes are those of the row copy, so that only nibbles change places. A thread takes 8 rows of 4 columns.
struct TransposedCodes {
  uint8_t* codes;
  uint8_t* scales;  // of the block that the thread has in the row copy
  int64_t pitch, scales_pitch;
  uint32_t* nibbles;
  bool wide;

  __device__ __forceinline__ static int octet_of() { return threadIdx.x % 8; }
  __device__ __forceinline__ static int quad_of() { return threadIdx.x / 8; }

  __device__ __forceinline__ TransposedCodes(const QuantizeJob& job, const TensorScale&, const Place& at, bool) {
    __shared__ __align__(8) uint32_t words[kNibbleWords];  // the row copy stores two at a time
    nibbles = words;
    pitch = ceil_div(job.rows, 2);
    uint8_t* first = job.column.codes + at.matrix * job.column.codes_stride;
    codes = first + (at.col + quad_of() * 4) * pitch + at.row / 2 + octet_of() * 4;
    wide = pitch % 4 == 0 && aligned(first, 4);
    scales_pitch = ceil_div(job.rows, 16);
    scales = job.column.scales + at.matrix * job.column.scales_stride +
             (at.col / 16 + threadIdx.x % 4) * scales_pitch + at.row / 16 + threadIdx.x / 32;
  }

  __device__ __forceinline__ void next_tile() {
    codes += kTile * pitch;
    scales += kTile / 16 * scales_pitch;
  }

  template <bool kWhole>
  __device__ __forceinline__ void write(const Extent& extent, const Scaled& tile) const {
    const int lane = threadIdx.x % 32;
    if (lane < 4 && (kWhole || (lane * 16 < extent.cols && threadIdx.x / 32 * 16 < extent.rows))) *scales = tile.code;
    const auto* rows = reinterpret_cast<const uint16_t*>(nibbles + nibble_offset(octet_of() * 8)) + quad_of();
    uint32_t pairs[4];  // of rows, four nibbles each
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = rows[32 * i] | static_cast<uint32_t>(rows[32 * i + 16]) << 16;
    const int valid_rows = kWhole ? 8 : max(0, min(8, extent.rows - octet_of() * 8));
#pragma unroll
    for (int byte = 0; byte < 2; ++byte) {
      const uint32_t pick = byte ? 0x7531 : 0x6420;
      uint32_t low[2], high[2];  // nibbles of the two columns, two rows a byte, every second byte
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t four = __byte_perm(pairs[2 * half], pairs[2 * half + 1], pick);
        low[half] = (four & 0x0F0F0F0Fu) | (four >> 4 & 0xF0F0F0F0u);
        high[half] = (four >> 4 & 0x0F0F0F0Fu) | (four >> 8 & 0xF0F0F0F0u);
      }
      const uint32_t words[2][1] = {{__byte_perm(low[0], low[1], 0x6420)}, {__byte_perm(high[0], high[1], 0x6420)}};
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (!kWhole && (valid_rows == 0 || quad_of() * 4 + byte * 2 + c >= extent.cols)) continue;
        store<kWhole>(codes + (byte * 2 + c) * pitch, words[c], (valid_rows + 1) / 2, wide);
      }
    }
  }
};

}  // namespace gtp::cuda
