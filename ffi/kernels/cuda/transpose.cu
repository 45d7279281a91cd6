// Transposes matrices of bytes in tiles of 128 rows at arbitrary positions. This can also move the rows of groups
// apart, or join shards.
//
// A thread transposes 16 rows of four columns; lines of 128 bytes are assembled in shared memory.
#include <cuda_runtime.h>

#include "device.cuh"
#include "gtp/cuda.h"

namespace gtp::cuda {
namespace {

constexpr int kSide = 128;  // side of a tile
constexpr int kThreads = 256;
constexpr int kRun = 16;  // rows per thread

__global__ void __launch_bounds__(kThreads) transpose_kernel(const __grid_constant__ TransposeJob job, int across) {
  __shared__ uint4 lines[kSide * kSide / 16];
  const int tile = blockIdx.x / across, first = blockIdx.x % across * kSide;
  const int64_t start = job.starts[tile];
  const int count = job.stops[tile] - static_cast<int>(start);
  const int word = threadIdx.x % 32, run = threadIdx.x / 32;
  const int column = first + word * 4;
  uint32_t turned[4][kRun / 4];  // by column
#pragma unroll
  for (int i = 0; i < kRun; i += 4) {
    uint32_t v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = run * kRun + i + j;
      int64_t source = start + row;
      bool real = row < count && column < job.cols;
      if (job.index != nullptr && real) {
        source = job.index[source];
        real = source >= 0 && source < job.height;
      }
      v[j] = real ? *reinterpret_cast<const uint32_t*>(job.rows + source * job.cols + column) : 0u;
    }
    turn(v);
#pragma unroll
    for (int j = 0; j < 4; ++j) turned[j][i / 4] = v[j];
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    // the pieces of a line are permuted, because otherwise eight lanes would write to the same banks
    lines[(word * 4 + j) * 8 + (run ^ word % 8)] = make_uint4(turned[j][0], turned[j][1], turned[j][2], turned[j][3]);
  }
  __syncthreads();
  const int64_t width = int64_t{job.tiles_each} * kSide;
  uint8_t* out = job.out + tile / job.tiles_each * job.cols * width + int64_t{tile % job.tiles_each} * kSide;
#pragma unroll
  for (int i = 0; i < kSide * kSide / 16 / kThreads; ++i) {
    const int piece = i * kThreads + threadIdx.x, line = piece / 8, place = piece % 8;
    if (first + line < job.cols) {
      *reinterpret_cast<uint4*>(out + (first + line) * width + place * 16) = lines[line * 8 + (place ^ line / 4 % 8)];
    }
  }
}

}  // namespace

const char* transpose(const TransposeJob& job, Stream stream) {
  const int across = static_cast<int>((job.cols + kSide - 1) / kSide);
  transpose_kernel<<<static_cast<unsigned>(job.tiles) * across, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(job, across);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace gtp::cuda
