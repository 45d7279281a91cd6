// Which tiles a block takes, where they lie, and their way into shared memory.
#pragma once

#include "launch.cuh"
#include "quantize_panel.cuh"

namespace gtp::cuda {

using QuantizeTable = Table<QuantizeJob, capacity_for<QuantizeJob>(kFewBytes)>;

// A block's way along two panels of `kRows` x `kCols`, which are counted along rows of panels, matrix by matrix and job
// by job; or down a stack of two, counted likewise. Long enough that what is prepared once costs little, short enough
// that all processors end at about the same time: they differ in speed, so that equal shares for as many blocks as fit
// at a time lost 10% (H200).
template <int kRows, int kCols, bool kStacked>
class Walk {
  static constexpr uint32_t kTurn = kStacked ? 1 : 2;
  static constexpr int kDown = kStacked ? 2 * kRows : kRows;  // of what is counted
  static constexpr Extent kStep = kStacked ? Extent{kRows, 0} : Extent{0, kCols};

 public:
  int job;  // the number of the panel's job
  Place at;
  Extent rest;  // of the matrix, from the panel's first row and column on

  static int64_t count(const QuantizeJob& job) {
    return job.count * ceil_div(job.rows, kDown) * ceil_div(job.cols, kCols);
  }
  static unsigned blocks_for(unsigned count) { return static_cast<unsigned>(ceil_div(count, kTurn)); }

  __device__ __forceinline__ explicit Walk(const QuantizeTable& table)
      : next_(blockIdx.x * kTurn), end_(min(next_ + kTurn, table.first_tile[table.count])) {
    seek(table);
  }

  __device__ __forceinline__ bool done() const { return left_ == 0; }

  // To the block's next panel. Whether it is the neighbour of this.
  __device__ __forceinline__ bool next(const QuantizeTable& table) {
    if (--left_ > 0) {
      at.row += kStep.rows;
      at.col += kStep.cols;
      rest.rows -= kStep.rows;
      rest.cols -= kStep.cols;
      return true;
    }
    if constexpr (!kStacked) seek(table);  // of stacks there is one
    return false;
  }

 private:
  uint32_t next_, end_;  // of what is counted: after the panels at hand; after the block's last
  uint32_t left_;        // of the panels at hand, which are neighbours

  __device__ __forceinline__ void seek(const QuantizeTable& table) {
    left_ = 0;
    if (next_ >= end_) return;
    job = table.find(next_);
    const QuantizeJob& its = table.jobs[job];
    const auto across = static_cast<uint32_t>(ceil_div(its.cols, kCols));
    const auto down = static_cast<uint32_t>(ceil_div(its.rows, kDown));
    uint32_t index = next_ - table.first_tile[job];
    const uint32_t matrix = its.count == 1 ? 0 : index / (across * down);
    index -= matrix * across * down;
    const uint32_t row = index / across, col = index - row * across;
    at = {matrix, int64_t{row} * kDown, int64_t{col} * kCols};
    rest = {static_cast<int>(min(int64_t{INT32_MAX}, its.rows - at.row)),
            static_cast<int>(min(int64_t{INT32_MAX}, its.cols - at.col))};
    left_ = kStacked ? (rest.rows > kRows ? 2 : 1) : min(end_ - next_, across - col);
    next_ += kStacked ? 1 : left_;
  }
};

template <class T, Kind kind>
using PanelWalk = Walk<kTile, Panel<T, kind>::kCols, Panel<T, kind>::kStacked>;

// Panels come through shared memory, one ahead of its use.
template <class T, Kind kind>
class Stages {
  using Panel = cuda::Panel<T, kind>;

 public:
  static constexpr int kBytes = 2 * Panel::kBytes;  // of shared memory

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
    for (int i = 0; i < Panel::kTiles; ++i) {
      if (wide_ && (!Panel::kStacked || walk_.rest.rows >= kTile) && walk_.rest.cols >= Panel::kCols) {
        Stage<T>::fill(stage + i * Stage<T>::kBytes, x_ + i * kTile, pitch_, Panel::odd(i));
      } else {
        const Extent rest{walk_.rest.rows, walk_.rest.cols - i * kTile};
        Stage<T>::fill_part(stage + i * Stage<T>::kBytes, x_ + i * kTile, pitch_, rest, Panel::odd(i));
      }
    }
    if (walk_.next(table_)) {
      x_ += Panel::kStacked ? kTile * pitch_ : Panel::kCols;
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
