// The panels that a thread block takes: which they are, where they are, and how they are loaded to shared memory.
#pragma once

#include "launch.cuh"
#include "quantize_panel.cuh"

namespace gtp::cuda {

using QuantizeTable = Table<QuantizeJob, capacity_for<QuantizeJob>(kFewBytes)>;

// A thread block's walk over `kTurn` panels of `kRows` x `kCols`. Panels are numbered along rows of panels, matrix by
// matrix and job by job. A walk is long enough to amortize the preparation, but short enough that all SMs finish at
// about the same time. They differ in speed: giving equal shares to as many blocks as fit at a time took 10% longer
// (H200).
template <int kRows, int kCols, uint32_t kTurn>
class Walk {
 public:
  int job;  // the number of the panel's job
  Place at;
  Extent rest;  // what remains of the matrix from the panel's first row and column on

  static int64_t count(const QuantizeJob& job) {
    return job.count * ceil_div(job.rows, kRows) * ceil_div(job.cols, kCols);
  }
  static unsigned blocks_for(unsigned count) { return static_cast<unsigned>(ceil_div(count, kTurn)); }

  __device__ __forceinline__ explicit Walk(const QuantizeTable& table)
      : next_(blockIdx.x * kTurn), end_(min(next_ + kTurn, table.first_tile[table.count])) {
    seek(table);
  }

  __device__ __forceinline__ bool done() const { return left_ == 0; }

  // Moves to the block's next panel, and returns whether it is the right-hand neighbour of the previous one.
  __device__ __forceinline__ bool next(const QuantizeTable& table) {
    if (kTurn > 1 && --left_ > 0) {
      at.col += kCols;
      rest.cols -= kCols;
      return true;
    }
    left_ = 0;
    if (kTurn > 1) seek(table);
    return false;
  }

 private:
  uint32_t next_, end_;  // panel numbers: the first after the current panels; the end of the block's panels
  uint32_t left_ = 0;    // remaining current panels, which are neighbours

  __device__ __forceinline__ void seek(const QuantizeTable& table) {
    if (kTurn > 1 && next_ >= end_) return;
    job = table.find(next_);
    const QuantizeJob& its = table.jobs[job];
    const auto across = static_cast<uint32_t>(ceil_div(its.cols, kCols));
    const auto down = static_cast<uint32_t>(ceil_div(its.rows, kRows));
    uint32_t index = next_ - table.first_tile[job];
    const uint32_t matrix = its.count == 1 ? 0 : index / (across * down);
    index -= matrix * across * down;
    const uint32_t row = index / across, col = index - row * across;
    at = {matrix, int64_t{row} * kRows, int64_t{col} * kCols};
    rest = {static_cast<int>(min(int64_t{INT32_MAX}, its.rows - at.row)),
            static_cast<int>(min(int64_t{INT32_MAX}, its.cols - at.col))};
    left_ = kTurn == 1 ? 1 : min(end_ - next_, across - col);
    next_ += left_;
  }
};

template <class T, Kind kind>
using PanelWalk = Walk<Panel<T, kind>::kRows, Panel<T, kind>::kCols, Panel<T, kind>::kTurn>;

// Loads panels to shared memory, one ahead of its use if a turn has several.
template <class T, Kind kind>
class Stages {
  using Panel = cuda::Panel<T, kind>;

 public:
  static constexpr int kBytes = Panel::kTurn * Panel::kBytes;  // bytes of shared memory

  __device__ __forceinline__ Stages(const QuantizeTable& table, const PanelWalk<T, kind>& walk, char* shared)
      : table_(table), shared_(shared), walk_(walk) {
    settle();
    fill();
  }

  // Returns the last panel filled, once this thread's loads of it have arrived. Threads must be synchronized before
  // they read what others loaded.
  __device__ __forceinline__ const char* next() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    return shared_ + (filled_ - 1) * Panel::kBytes;
  }

  // Starts loading the next panel, which has its own place.
  __device__ __forceinline__ void fill() {
    if (walk_.done()) return;
    char* stage = shared_ + filled_++ * Panel::kBytes;
    if (wide_) {
      Panel::fill(stage, x_, pitch_, walk_.rest);
    } else {
      Panel::fill_singly(stage, x_, pitch_, walk_.rest);
    }
    if (walk_.next(table_)) {
      x_ += Panel::kCols;
    } else {
      settle();
    }
  }

 private:
  const QuantizeTable& table_;
  char* shared_;
  PanelWalk<T, kind> walk_;
  int filled_ = 0;                // number of panels filled
  const typename T::Storage* x_;  // the first number that the thread loads
  int64_t pitch_;
  bool wide_;

  __device__ __forceinline__ void settle() {
    if (walk_.done()) return;
    const QuantizeJob& job = table_.jobs[walk_.job];
    const auto* data = static_cast<const typename T::Storage*>(job.x) + walk_.at.matrix * job.x_stride;
    pitch_ = job.cols;
    x_ = data + (walk_.at.row + Panel::first_row()) * pitch_ + walk_.at.col + Panel::first_col();
    wide_ = pitch_ * T::kBytes % 16 == 0 && aligned(data, 16);
  }
};

}  // namespace gtp::cuda
