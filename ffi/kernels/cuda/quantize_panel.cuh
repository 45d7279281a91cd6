// A panel, which is what a thread block loads at a time, and its layout in shared memory.
#pragma once

#include <algorithm>

#include "quantize_tile.cuh"

namespace gtp::cuda {

// A panel is 256 bytes wide. In a turn, a thread block processes either two panels of 64 rows, usually neighbours
// along the row, of which the second is loaded while the first is processed; or one panel of 256 rows (`kTall`), whose
// loads are hidden by other thread blocks.
//
// Tall panels are for formats whose blocks are runs of 16 along a line. These were limited by the number of partially
// written 128-byte lines (see `kept`). With tall panels, a store writes a full line of 128 bytes of a column's codes
// and 16 bytes of its scales. For rows, which are as wide as the panel, it writes half of that or, for float32, a
// quarter. Three thread blocks take 200 KB of an SM's shared memory; GPUs with 100 KB run one at a time.
template <class T, Kind kind>
struct Panel {
  static constexpr bool kTall = kind == Kind::kRuns;
  static constexpr int kTurn = kTall ? 1 : 2;  // panels per turn
  static constexpr int kThreads = kTall ? 256 : 128;
  static constexpr int kRowBytes = 256;
  static constexpr int kRows = kTall ? 4 * kTile : kTile, kCols = kRowBytes / T::kBytes;
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kParts = kRows * kCols / (kThreads * 2 * kRun);  // a thread processes two runs at a time

  // The number of lanes per line: enough for the whole line if that makes stores wider, otherwise for 64 numbers.
  static constexpr int kMostLanes = kind == Kind::kRuns || kind == Kind::kExponents ? 16 : 4;
  static constexpr int kRowLanes = std::min(kCols / kRun, kMostLanes);
  static constexpr int kColumnLanes = std::min(kRows / kRun, kMostLanes);

  // Returns the place of a number. Chunks of 16 bytes are permuted within their row so that runs of rows and of columns
  // are read without bank conflicts, except that the 16 runs of columns of tall panels conflict in pairs. Gaps would
  // avoid conflicts too, but lines copied to shared memory across a multiple of 128 bytes are fetched in parts. Every
  // bit of the place is an exclusive or of bits of the row and the column. Hence, if neither the rows nor the
  // columns of two numbers have common bits, the place of their sums is the exclusive or of their places.
  __device__ __forceinline__ static int place(int row, int col) {
    const int chunk = col / kChunk;
    return row * kRowBytes + ((chunk ^ chunk >> 3) << 4 ^ crossed(row)) + col % kChunk * T::kBytes;
  }

  // Returns the contribution of the row to the permutation.
  __device__ __forceinline__ static int crossed(int row) {
    // with four lanes per row, lanes read two pairs of rows at a time
    const int pair = kRowLanes == 4 ? (row >> 1 & 1) << (T::kBytes / 4) : 0;
    return ((row >> 4 & 3) << 1 ^ row >> 6 ^ pair) << 4;
  }

  // The row and column of the first chunk that a thread loads. A warp loads the rows that it processes in the row copy:
  // halves of four rows at a time, which are whole memory lines. If lanes skipped every second chunk, L2 would send
  // every line twice.
  __device__ __forceinline__ static int first_row() { return threadIdx.x / 32 * kWarpRows + threadIdx.x % 32 / 8; }
  __device__ __forceinline__ static int first_col() { return threadIdx.x % 8 * kChunk; }

  // Loads a thread's chunks asynchronously; lines must begin at multiples of 16 bytes. `x`: the thread's first number.
  // `rest`: the extent of the matrix from the panel on; everything beyond it becomes zero.
  __device__ __forceinline__ static void fill(char* stage, const typename T::Storage* x, int64_t pitch,
                                              const Extent& rest) {
    const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(stage));
    const uint32_t first = to + place(first_row(), first_col());
    const int rows = rest.rows - first_row(), cols = rest.cols - first_col();
#pragma unroll
    for (int row = 0; row < kWarpRows; row += 4) {
#pragma unroll
      for (int col = 0; col < kCols; col += kCols / 2) {
        const int further = place(row, col), there = row < rows && col < cols ? 16 : 0;
        const uint32_t place = (first ^ further % 128) + further / 128 * 128;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(x + col), "r"(there)
                     : "memory");
      }
      x += 4 * pitch;
    }
  }

  // Does the same number by number, for lines with any alignment.
  __device__ __forceinline__ static void fill_singly(char* stage, const typename T::Storage* x, int64_t pitch,
                                                     const Extent& rest) {
#pragma unroll 1
    for (int i = 0; i < kWarpRows / 2; ++i) {
      const int row = i / 2 * 4, col = i % 2 * (kCols / 2);
      const int valid = first_row() + row < rest.rows ? rest.cols - first_col() - col : 0;
      auto* to = reinterpret_cast<typename T::Storage*>(stage + place(first_row() + row, first_col() + col));
#pragma unroll
      for (int k = 0; k < kChunk; ++k) to[k] = k < valid ? x[row * pitch + col + k] : typename T::Storage{};
    }
  }

 private:
  static constexpr int kChunk = 16 / T::kBytes;  // numbers per chunk
  static constexpr int kWarpRows = kRows / (kThreads / 32);
};

}  // namespace gtp::cuda
