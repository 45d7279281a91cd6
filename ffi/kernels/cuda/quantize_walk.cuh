// Which tiles a block takes, where they lie, and their way into shared memory.
#pragma once

#include "launch.cuh"
#include "quantize_tile.cuh"

namespace gtp::cuda {

using QuantizeTable = Table<QuantizeJob, capacity_for<QuantizeJob>(kFewBytes)>;

// A block's way along panels of `kRows` x `kCols`, which are counted along rows of panels, matrix by matrix and job by
// job. Long enough that what is prepared once costs little, short enough that all processors end at about the same
// time: they differ in speed, so that equal shares for as many blocks as fit at a time lost 10% (H200).
template <int kRows, int kCols, uint32_t kTurn>
class Walk {
 public:
  int job;  // the number of the panel's job
  Place at;
  Extent rest;  // of the matrix, from the panel's first row and column on

  static unsigned blocks_for(unsigned panels) { return static_cast<unsigned>(ceil_div(panels, kTurn)); }

  __device__ __forceinline__ explicit Walk(const QuantizeTable& table)
      : panel_(blockIdx.x * kTurn), end_(min(panel_ + kTurn, table.first_tile[table.count])) {
    seek(table);
  }

  __device__ __forceinline__ bool done() const { return left_ == 0; }

  // To the block's next panel. Whether it follows in the row of panels.
  __device__ __forceinline__ bool next(const QuantizeTable& table) {
    if (--left_ > 0) {
      at.col += kCols;
      rest.cols -= kCols;
      return true;
    }
    seek(table);
    return false;
  }

 private:
  uint32_t panel_, end_;  // after those at hand; after the block's last
  uint32_t left_;         // of those at hand, which are neighbours

  __device__ __forceinline__ void seek(const QuantizeTable& table) {
    left_ = 0;
    if (panel_ >= end_) return;
    job = table.find(panel_);
    const QuantizeJob& its = table.jobs[job];
    const auto across = static_cast<uint32_t>(ceil_div(its.cols, kCols));
    const auto down = static_cast<uint32_t>(ceil_div(its.rows, kRows));
    uint32_t panel = panel_ - table.first_tile[job];
    const uint32_t matrix = its.count == 1 ? 0 : panel / (across * down);
    panel -= matrix * across * down;
    const uint32_t row = panel / across, col = panel - row * across;
    at = {matrix, int64_t{row} * kRows, int64_t{col} * kCols};
    rest = {static_cast<int>(min(int64_t{INT32_MAX}, its.rows - at.row)),
            static_cast<int>(min(int64_t{INT32_MAX}, its.cols - at.col))};
    left_ = min(end_ - panel_, across - col);
    panel_ += left_;
  }
};

// Tiles are loaded so many at a time, neighbours in a row.
template <class T>
constexpr int kPanelTiles = 4 / T::kBytes;

// Codes that cost more to make are made in longer turns.
template <class T, Kind kind>
using PanelWalk = Walk<kTile, kPanelTiles<T> * kTile, kind == Kind::kRuns && T::kBytes == 2 ? 4 : 2>;

// Panels come through shared memory, one ahead of its use.
template <class T, Kind kind>
class Stages {
 public:
  static constexpr int kBytes = 2 * kPanelTiles<T> * Stage<T>::kBytes;  // of shared memory

  __device__ __forceinline__ Stages(const QuantizeTable& table, const PanelWalk<T, kind>& walk, char* shared)
      : table_(table), shared_(shared), walk_(walk), fill_(0) {
    settle();
    fill();
  }

  // The next panel's first tile, when what this thread loads of it is there; whoever reads other parts must meet their
  // threads first.
  __device__ __forceinline__ const char* next() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    return shared_ + (fill_ ^ 1) * kBytes / 2;
  }

  // Begins to load one more, where the panel before the next one was.
  __device__ __forceinline__ void fill() {
    char* stage = shared_ + fill_ * kBytes / 2;
    fill_ ^= 1;
    if (walk_.done()) return;
#pragma unroll
    for (int i = 0; i < kPanelTiles<T>; ++i) {
      if (wide_ && walk_.rest.cols >= kPanelTiles<T> * kTile) {
        Stage<T>::fill(stage + i * Stage<T>::kBytes, x_ + i * kTile, pitch_);
      } else {
        const Extent rest{walk_.rest.rows, walk_.rest.cols - i * kTile};
        Stage<T>::fill_part(stage + i * Stage<T>::kBytes, x_ + i * kTile, pitch_, rest);
      }
    }
    if (walk_.next(table_)) {
      x_ += kPanelTiles<T> * kTile;
    } else {
      settle();
    }
  }

 private:
  const QuantizeTable& table_;
  char* shared_;
  PanelWalk<T, kind> walk_;
  int fill_;                      // which of two is filled next
  const typename T::Storage* x_;  // of the first number that the thread loads
  int64_t pitch_;
  bool wide_;

  __device__ __forceinline__ void settle() {
    if (walk_.done()) return;
    const QuantizeJob& job = table_.jobs[walk_.job];
    const auto* data = static_cast<const typename T::Storage*>(job.x) + walk_.at.matrix * job.rows * job.cols;
    pitch_ = job.cols;
    x_ = data + (walk_.at.row + Stage<T>::first_row()) * pitch_ + walk_.at.col + Stage<T>::first_col();
    wide_ = walk_.rest.rows >= kTile && pitch_ * T::kBytes % 16 == 0 && aligned(data, 16);
  }
};

}  // namespace gtp::cuda
