// What a block loads at a time: a panel, and where its numbers lie in shared memory.
#pragma once

#include <algorithm>

#include "quantize_tile.cuh"

namespace gtp::cuda {

// A panel is 256 bytes broad. A block's turn has two of 64 rows, neighbours in a row, of which the second is loaded
// while the first is worked on; or one of 256 rows, `kTall`, whose loads other blocks hide.
//
// Tall panels are for blocks of 16 that are runs of their lines. What bounded these is how many pieces of lines of 128
// bytes stores consist of (see `kept`): so a store takes all 128 bytes of codes of a column's line, and 16 of its
// scales; of a row's, as broad as the panel is, half of that or, for float32, a quarter. Three blocks take 200 KB of a
// processor's shared memory: GPUs with 100 KB have one at a time.
template <class T, Kind kind>
struct Panel {
  static constexpr bool kTall = kind == Kind::kRuns;
  static constexpr int kTurn = kTall ? 1 : 2;  // panels
  static constexpr int kThreads = kTall ? 256 : 128;
  static constexpr int kRowBytes = 256;
  static constexpr int kRows = kTall ? 4 * kTile : kTile, kCols = kRowBytes / T::kBytes;
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kParts = kRows * kCols / (kThreads * 2 * kRun);  // a thread makes two runs at a time

  // How many lanes take a line: all numbers of it where that makes stores broader, else 64.
  static constexpr int kMostLanes = kind == Kind::kRuns || kind == Kind::kExponents ? 16 : 4;
  static constexpr int kRowLanes = std::min(kCols / kRun, kMostLanes);
  static constexpr int kColumnLanes = std::min(kRows / kRun, kMostLanes);

  // Where a number lies. Chunks of 16 bytes change places within their row so that runs of rows, and of columns, are
  // read without bank conflicts, but for the 16 runs of columns of tall panels, which meet in pairs; gaps would do so
  // too, but lines that are copied into memory across a multiple of 128 bytes are fetched in parts. Every bit is an
  // exclusive or of bits of the row and of the column: the place of a sum of numbers that have no bit in common is the
  // exclusive or of their places.
  __device__ __forceinline__ static int place(int row, int col) {
    const int chunk = col / kChunk;
    return row * kRowBytes + ((chunk ^ chunk >> 3) << 4 ^ crossed(row)) + col % kChunk * T::kBytes;
  }

  // What of that is the row's part.
  __device__ __forceinline__ static int crossed(int row) {
    // by fours, lanes read two pairs of rows at a time
    const int pair = kRowLanes == 4 ? (row >> 1 & 1) << (T::kBytes / 4) : 0;
    return ((row >> 4 & 3) << 1 ^ row >> 6 ^ pair) << 4;
  }

  // The first chunk that a thread loads. A warp loads the rows that it has in the row copy: halves of four at a time,
  // which are whole lines of memory. Lanes that skip every second chunk have L2 send all of them twice.
  __device__ __forceinline__ static int first_row() { return threadIdx.x / 32 * kWarpRows + threadIdx.x % 32 / 8; }
  __device__ __forceinline__ static int first_col() { return threadIdx.x % 8 * kChunk; }

  // A thread's chunks, `x` being its first number, in the background; for lines that begin at multiples of 16 bytes.
  // `rest`: of the matrix, from the panel on; what is not there is zero.
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

  // The same, number by number, for any lines.
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
  static constexpr int kChunk = 16 / T::kBytes;  // numbers
  static constexpr int kWarpRows = kRows / (kThreads / 32);
};

}  // namespace gtp::cuda
