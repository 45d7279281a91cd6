// Makes both copies of 16 x 16 blocks, which have the same codes.
#pragma once

#include "quantize_lines.cuh"

namespace gtp::cuda {

// Makes the row copy, and the transposed column copy from its codes by rearranging nibbles. A thread takes 8 rows of 4
// columns.
template <class T>
class CodesBothWays {
 public:
  static constexpr bool kMeets = true;
  bool wide;

  __device__ __forceinline__ void move_to(const QuantizeJob& job, const Place& at, const Parameters& p) {
    row_.move_to(job, at, p);
    zero_gaps(job.column, at);
    pitch_ = ceil_div(job.rows, 2);
    uint8_t* first = job.column.codes + at.matrix * job.column.codes_stride;
    codes_ = first + (at.col + quad_of() * 4) * pitch_ + at.row / 2 + octet_of() * 4;
    wide = row_.wide && pitch_ % 4 == 0 && aligned(first, 4);
    scales_pitch_ = ceil_div(job.rows, 16);
    scales_ = job.column.scales + at.matrix * job.column.scales_stride +
              (at.col / 16 + threadIdx.x % 4) * scales_pitch_ + at.row / 16 + threadIdx.x / 32;
  }

  __device__ __forceinline__ void next_part() {
    odd_ = !odd_;
    row_.next_part();
    codes_ += kTile * pitch_;
    scales_ += kTile / 16 * scales_pitch_;
  }
  __device__ __forceinline__ void next_panel() {}

  template <bool kExtras, bool kWhole>
  __device__ __forceinline__ void write(const Parameters& p, const Extent& rest, const char* stage, int part) const {
    __shared__ __align__(8) uint32_t nibbles[2][kNibbleWords];  // the row copy stores two words at a time
    uint8_t tile;
    row_.template write<kExtras, kWhole>(p, rest, stage, part, nibbles[odd_], &tile);
    __syncthreads();  // also: all are done with the previous tile, whose codes are replaced next
    transpose<kWhole>({rest.rows, rest.cols - part * kTile}, nibbles[odd_], tile);
  }

 private:
  LineCopy<T, Kind::kTiles, false> row_;
  bool odd_ = false;
  uint8_t* codes_;
  uint8_t* scales_;  // the scale of the thread's block in the row copy
  int64_t pitch_, scales_pitch_;

  __device__ __forceinline__ static int octet_of() { return threadIdx.x % 8; }
  __device__ __forceinline__ static int quad_of() { return threadIdx.x / 8; }

  template <bool kWhole>
  __device__ __forceinline__ void transpose(const Extent& rest, const uint32_t* nibbles, uint8_t tile) const {
    const int lane = threadIdx.x % 32;
    const bool there = kWhole || (lane * 16 < rest.cols && threadIdx.x / 32 * 16 < rest.rows);
    if (lane < 4 && there) store_byte_kept(scales_, tile);
    const auto* rows = reinterpret_cast<const uint16_t*>(nibbles + nibble_offset(octet_of() * 8)) + quad_of();
    uint32_t pairs[4];  // pairs of rows, four nibbles each
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = rows[32 * i] | static_cast<uint32_t>(rows[32 * i + 16]) << 16;
    const int valid_rows = kWhole ? 8 : max(0, min(8, rest.rows - octet_of() * 8));
#pragma unroll
    for (int byte = 0; byte < 2; ++byte) {
      const uint32_t pick = byte ? 0x7531 : 0x6420;
      uint32_t low[2], high[2];  // nibbles of the two columns, two rows per byte, in every second byte
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t four = __byte_perm(pairs[2 * half], pairs[2 * half + 1], pick);
        low[half] = (four & 0x0F0F0F0Fu) | (four >> 4 & 0xF0F0F0F0u);
        high[half] = (four >> 4 & 0x0F0F0F0Fu) | (four >> 8 & 0xF0F0F0F0u);
      }
      const uint32_t words[2][1] = {{__byte_perm(low[0], low[1], 0x6420)}, {__byte_perm(high[0], high[1], 0x6420)}};
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (!kWhole && (valid_rows == 0 || quad_of() * 4 + byte * 2 + c >= rest.cols)) continue;
        store<kWhole, true>(codes_ + (byte * 2 + c) * pitch_, words[c], (valid_rows + 1) / 2, wide);
      }
    }
  }
};

}  // namespace gtp::cuda
