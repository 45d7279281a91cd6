// Copies rows from arbitrary positions.
//
// A warp copies 16-byte pieces of one row, with several in flight at once. Rows that are read more than once stay in
// the cache, because writes are marked to be evicted first.
#include <cuda_runtime.h>

#include <algorithm>

#include "gtp/cuda.h"

namespace gtp::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kAtOnce = 8;  // pieces per lane in flight

__global__ void __launch_bounds__(kThreads) take_kernel(const __grid_constant__ TakeJob job) {
  const int64_t place = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (place >= job.count) return;
  const int64_t row = job.index[place];
  const bool real = row >= 0 && row < job.height;
  const uint4* from = static_cast<const uint4*>(job.rows) + (real ? row : 0) * job.pieces;
  uint4* to = static_cast<uint4*>(job.out) + place * job.pieces;
  for (int first = threadIdx.x % 32; first < job.pieces; first += 32 * kAtOnce) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int piece = first + i * 32;
      v[i] = real && piece < job.pieces ? from[piece] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int piece = first + i * 32;
      if (piece < job.pieces) __stcs(to + piece, v[i]);
    }
  }
}

}  // namespace

const char* take(const TakeJob& job, Stream stream) {
  const auto blocks = static_cast<unsigned>((job.count + kWarps - 1) / kWarps);
  take_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(job);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace gtp::cuda
