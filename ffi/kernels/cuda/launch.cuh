// Runs many jobs in one launch. A table of jobs is passed by value as the kernel's parameter; a thread block looks up
// the job of its tile in it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

namespace gtp::cuda {

// The bytes of a table, out of the 32,764 that a kernel's parameters may have. A launch with the large table takes 5 us
// longer (H200).
constexpr int kFewBytes = 4 * 1024, kManyBytes = 30 * 1024;
// The dynamic shared memory in bytes up to which a kernel need not opt in. CUDA's limit of 48 KiB includes the kernel's
// static shared memory.
constexpr int kSharedUnasked = 32 * 1024;

// `first_tile[i]` is the number of tiles before job i; `first_tile[count]` is the total number of tiles.
template <class Job, int kCapacity>
struct Table {
  int count;
  uint32_t first_tile[kCapacity + 1];
  Job jobs[kCapacity];

  // Returns the job of a tile, by bisection.
  __device__ __forceinline__ int find(uint32_t tile) const {
    int low = 0, high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_tile[middle] <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

template <class Job>
constexpr int capacity_for(int bytes) {
  return (bytes - 2 * static_cast<int>(sizeof(uint64_t))) / static_cast<int>(sizeof(Job) + sizeof(uint32_t));
}

// Allows a kernel to use this much shared memory on the current device.
template <class Kernel>
const char* allow_shared(Kernel* kernel, int bytes) {
  if (bytes <= kSharedUnasked) return nullptr;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // otherwise the next launch would report the error
  return cudaGetErrorString(error);
}

// Adds jobs to tables and launches each table when it is full. `launch(table, tiles)` receives the number of tiles.
template <class Job, int kCapacity, class Launch>
const char* launch_all(const std::vector<Job>& jobs, int64_t (*tiles_of)(const Job&), Table<Job, kCapacity>& table,
                       Launch launch) {
  table.count = 0;
  table.first_tile[0] = 0;
  int64_t tiles = 0;
  const auto flush = [&]() -> const char* {
    if (table.count == 0) return nullptr;
    launch(table, static_cast<unsigned>(tiles));
    table.count = 0;
    tiles = 0;
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
  };
  for (const Job& job : jobs) {
    const int64_t more = tiles_of(job);
    if (more == 0) continue;
    if (more > INT32_MAX) return "an array has more tiles than a CUDA grid has blocks";
    if (table.count == kCapacity || tiles + more > INT32_MAX) {
      if (const char* error = flush()) return error;
    }
    table.jobs[table.count++] = job;
    tiles += more;
    table.first_tile[table.count] = static_cast<uint32_t>(tiles);
  }
  return flush();
}

}  // namespace gtp::cuda
