// Finds the largest finite magnitudes of many arrays in one launch.
//
// A block takes one chunk of one array. The blocks of an array combine their results with an atomic maximum.
#include <algorithm>

#include "finite_max.cuh"
#include "gtp/cuda.h"
#include "launch.cuh"

namespace gtp::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLoads = 8;  // loads of 16 bytes per thread, all in flight at once
constexpr int64_t kChunkBytes = int64_t{kThreads} * kLoads * 16;

struct AmaxJob {
  const void* data;
  uint64_t size_and_dtype;  // the dtype is in the lowest two bits
  uint32_t slot;

  __host__ __device__ int64_t size() const { return static_cast<int64_t>(size_and_dtype >> 2); }
  __host__ __device__ DType dtype() const { return static_cast<DType>(size_and_dtype & 3); }
};

template <int kCapacity>
using AmaxTable = Table<AmaxJob, kCapacity>;

constexpr int kFew = capacity_for<AmaxJob>(kFewBytes), kMany = capacity_for<AmaxJob>(kManyBytes);

template <class T>
__device__ uint32_t chunk_max(const AmaxJob& job, int64_t begin, int64_t end) {
  const char* data = static_cast<const char*>(job.data) + begin * T::kBytes;
  const int64_t bytes = (end - begin) * T::kBytes;
  FiniteMax<T> top;
  int64_t done = 0;
  if (aligned(data, 16)) {
    uint4 words[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t at = (int64_t{i} * kThreads + threadIdx.x) * 16;
      words[i] = at + 16 <= bytes ? __ldcs(reinterpret_cast<const uint4*>(data + at)) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      top.add(words[i].x);
      top.add(words[i].y);
      top.add(words[i].z);
      top.add(words[i].w);
    }
    done = bytes / 16 * 16;
  }
  for (int64_t at = done + int64_t{threadIdx.x} * T::kBytes; at < bytes; at += kThreads * T::kBytes) {
    if constexpr (T::kBytes == 4) {
      top.add(*reinterpret_cast<const uint32_t*>(data + at));
    } else {
      top.add(*reinterpret_cast<const uint16_t*>(data + at));
    }
  }
  return top.bits();
}

template <int kCapacity>
__global__ void __launch_bounds__(kThreads) multi_amax_kernel(const __grid_constant__ AmaxTable<kCapacity> table,
                                                              uint32_t* amax) {
  const int index = table.find(blockIdx.x);
  const AmaxJob& job = table.jobs[index];
  const int64_t per_chunk = kChunkBytes / dtype_bytes(job.dtype());
  const int64_t begin = (blockIdx.x - table.first_tile[index]) * per_chunk;
  const int64_t end = min(begin + per_chunk, job.size());
  const uint32_t top = job.dtype() == DType::kF32    ? chunk_max<F32>(job, begin, end)
                       : job.dtype() == DType::kBF16 ? chunk_max<BF16>(job, begin, end)
                                                     : chunk_max<F16>(job, begin, end);
  raise_block<kThreads>(top, amax + job.slot);
}

template <class T>
__global__ void __launch_bounds__(kThreads) hadamard_amax_kernel(const typename T::Storage* x, int64_t units,
                                                                 int64_t runs, int64_t rows, int64_t cols,
                                                                 uint32_t* amax) {
  uint32_t top = 0;
  // a thread processes 16 rows of one column at a time
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t unit = int64_t{blockIdx.x} * kThreads + threadIdx.x; unit < units; unit += step) {
    const int64_t col = unit % cols, first_row = unit / cols % runs * kRun, matrix = unit / cols / runs;
    const auto* data = x + (matrix * rows + first_row) * cols + col;
    float y[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      uint32_t word = 0;
      if (first_row + i < rows) {
        if constexpr (T::kBytes == 4) {
          word = __float_as_uint(data[i * cols]);
        } else {
          word = data[i * cols];
        }
      }
      y[i] = value_of<T>(&word, 0);
    }
    hadamard_run(y);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const uint32_t magnitude = __float_as_uint(y[i]) & kMagnitude;
      top = max(top, magnitude < kInfinity ? magnitude : 0u);
    }
  }
  raise_block<kThreads>(top, amax);
}

template <int kCapacity>
const char* launch(const std::vector<AmaxJob>& jobs, float* amax, cudaStream_t stream) {
  AmaxTable<kCapacity> table;
  return launch_all(
      jobs,
      +[](const AmaxJob& job) { return ceil_div(job.size() * dtype_bytes(job.dtype()), kChunkBytes); }, table,
      [&](const AmaxTable<kCapacity>& full, unsigned blocks) {
        multi_amax_kernel<kCapacity><<<blocks, kThreads, 0, stream>>>(full, reinterpret_cast<uint32_t*>(amax));
      });
}

}  // namespace

const char* multi_amax(const std::vector<Array>& arrays, float* amax, Stream opaque) {
  const auto stream = static_cast<cudaStream_t>(opaque);
  if (arrays.empty()) return nullptr;
  const cudaError_t error = cudaMemsetAsync(amax, 0, arrays.size() * sizeof(float), stream);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  std::vector<AmaxJob> jobs;
  for (const Array& array : arrays) {
    jobs.push_back({array.data, static_cast<uint64_t>(array.size) << 2 | static_cast<uint64_t>(array.dtype),
                    static_cast<uint32_t>(jobs.size())});
  }
  return jobs.size() <= kFew ? launch<kFew>(jobs, amax, stream) : launch<kMany>(jobs, amax, stream);
}

const char* hadamard_amax(const Array& x, int64_t count, int64_t rows, int64_t cols, float* amax, Stream opaque) {
  const auto stream = static_cast<cudaStream_t>(opaque);
  cudaError_t error = cudaMemsetAsync(amax, 0, sizeof(float), stream);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const int64_t runs = ceil_div(rows, kRun), units = count * runs * cols;
  if (units == 0) return nullptr;
  const unsigned blocks = static_cast<unsigned>(std::min<int64_t>(ceil_div(units, kThreads), 1 << 16));
  auto* slot = reinterpret_cast<uint32_t*>(amax);
  if (x.dtype == DType::kF32) {
    hadamard_amax_kernel<F32><<<blocks, kThreads, 0, stream>>>(static_cast<const float*>(x.data), units, runs, rows,
                                                               cols, slot);
  } else if (x.dtype == DType::kBF16) {
    hadamard_amax_kernel<BF16><<<blocks, kThreads, 0, stream>>>(static_cast<const uint16_t*>(x.data), units, runs, rows,
                                                                cols, slot);
  } else {
    hadamard_amax_kernel<F16><<<blocks, kThreads, 0, stream>>>(static_cast<const uint16_t*>(x.data), units, runs, rows,
                                                               cols, slot);
  }
  error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace gtp::cuda
