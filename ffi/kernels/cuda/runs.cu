// Quantizes to e4m3 in runs of 128 elements along rows, along columns, or both from one read.
//
// A block handles 128 x 128 numbers: one run of each row and one of each column. A thread keeps 16 rows of four columns
// in registers; lines of the transposed codes are assembled in shared memory.
#include <cuda_runtime.h>

#include "device.cuh"
#include "gtp/cuda.h"

namespace gtp::cuda {
namespace {

constexpr int kSide = 128;
constexpr int kThreads = 256;
constexpr int kRows = 16;  // rows per thread

// Returns the codes of four numbers in a word. Those that are not finite get the code NaN.
__device__ __forceinline__ uint32_t encode_four(const float (&x)[4], const float (&scale)[4]) {
  uint32_t word = encode_fp8_x2(x[0] * scale[0], x[1] * scale[1], false) |
                  encode_fp8_x2(x[2] * scale[2], x[3] * scale[3], false) << 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if ((__float_as_uint(x[i]) & kMagnitude) >= kInfinity) word = (word & ~(0xFFu << (8 * i))) | uint32_t{kNanCode} << (8 * i);
  }
  return word;
}

template <class T>
__device__ __forceinline__ void values_of(const uint32_t (&words)[T::kBytes], float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = value_of<T>(words, i);
}

template <class T, bool kRow, bool kColumn>
__global__ void __launch_bounds__(kThreads, 2)
    quantize_runs_kernel(const __grid_constant__ RunsJob job, int across) {
  constexpr int kWords = T::kBytes;  // words of four numbers
  __shared__ uint4 lines[kColumn ? kSide * kSide / 16 : 1];
  __shared__ uint32_t tops[kSide];
  const int64_t first_row = int64_t{blockIdx.x / across} * kSide, first_col = int64_t{blockIdx.x % across} * kSide;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t words[kRows][kWords];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t at = (first_row + warp * kRows + i) * job.cols + first_col + lane * 4;
    const auto* x = static_cast<const typename T::Storage*>(job.x) + at;
    if constexpr (kWords == 2) {
      const uint2 v = __ldcs(reinterpret_cast<const uint2*>(x));
      words[i][0] = v.x;
      words[i][1] = v.y;
    } else {
      const uint4 v = __ldcs(reinterpret_cast<const uint4*>(x));
      words[i][0] = v.x;
      words[i][1] = v.y;
      words[i][2] = v.z;
      words[i][3] = v.w;
    }
  }
  if constexpr (kColumn) {
    if (threadIdx.x < kSide) tops[threadIdx.x] = 0;
    __syncthreads();
    uint32_t top[4] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float x[4];
      values_of<T>(words[i], x);
#pragma unroll
      for (int j = 0; j < 4; ++j) top[j] = max(top[j], __float_as_uint(x[j]) & kMagnitude);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) atomicMax(&tops[lane * 4 + j], top[j]);
  }
  if constexpr (kRow) {
    float mine = 0.0f;  // lane i keeps the inverse of row i's scale
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float x[4];
      values_of<T>(words[i], x);
      uint32_t top = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) top = max(top, __float_as_uint(x[j]) & kMagnitude);
      const float scale = power_of_two_scale(__reduce_max_sync(0xFFFFFFFFu, top));
      if (lane == i) mine = inverse_of_power(scale);
      const float scales[4] = {scale, scale, scale, scale};
      const int64_t at = (first_row + warp * kRows + i) * job.cols + first_col + lane * 4;
      *reinterpret_cast<uint32_t*>(job.row_codes + at) = encode_four(x, scales);
    }
    if (lane < kRows) job.row_scales[first_col / kSide * job.rows + first_row + warp * kRows + lane] = mine;
  }
  if constexpr (kColumn) {
    __syncthreads();
    float scales[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) scales[j] = power_of_two_scale(tops[lane * 4 + j]);
    uint32_t turned[4][kRows / 4];  // by column
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      uint32_t v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float x[4];
        values_of<T>(words[i + j], x);
        v[j] = encode_four(x, scales);
      }
      turn(v);
#pragma unroll
      for (int j = 0; j < 4; ++j) turned[j][i / 4] = v[j];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // the pieces of a line are permuted, because otherwise eight lanes would write to the same banks
      lines[(lane * 4 + j) * 8 + (warp ^ lane % 8)] = make_uint4(turned[j][0], turned[j][1], turned[j][2], turned[j][3]);
    }
    if (threadIdx.x < kSide) {
      const float inverse = inverse_of_power(power_of_two_scale(tops[threadIdx.x]));
      job.column_scales[first_row / kSide * job.cols + first_col + threadIdx.x] = inverse;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSide * kSide / 16 / kThreads; ++i) {
      const int piece = i * kThreads + threadIdx.x, line = piece / 8, place = piece % 8;
      *reinterpret_cast<uint4*>(job.column_codes + (first_col + line) * job.rows + first_row + place * 16) =
          lines[line * 8 + (place ^ line / 4 % 8)];
    }
  }
}

template <class T>
void launch(const RunsJob& job, unsigned blocks, int across, cudaStream_t stream) {
  if (job.row_codes == nullptr) {
    quantize_runs_kernel<T, false, true><<<blocks, kThreads, 0, stream>>>(job, across);
  } else if (job.column_codes == nullptr) {
    quantize_runs_kernel<T, true, false><<<blocks, kThreads, 0, stream>>>(job, across);
  } else {
    quantize_runs_kernel<T, true, true><<<blocks, kThreads, 0, stream>>>(job, across);
  }
}

}  // namespace

const char* quantize_runs(const RunsJob& job, Stream stream) {
  const int across = static_cast<int>(job.cols / kSide);
  const auto blocks = static_cast<unsigned>(job.rows / kSide * across);
  const auto on = static_cast<cudaStream_t>(stream);
  switch (job.dtype) {
    case DType::kF32: launch<F32>(job, blocks, across, on); break;
    case DType::kBF16: launch<BF16>(job, blocks, across, on); break;
    default: launch<F16>(job, blocks, across, on); break;
  }
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace gtp::cuda
