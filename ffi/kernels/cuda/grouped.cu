// Grouped matmuls of FP8 codes, for Hopper: each row with its own group's matrix, and sums over each group's rows.
//
// Both operands lie with the contraction last. A block computes tiles of 128 x 256: one warp copies panels of 128 bytes
// of the contraction to shared memory, four ahead, and two warpgroups multiply 64 x 256 each. Blocks stay, and the copies
// of a block's next tile begin while the last one is written.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "gtp/cuda.h"
#include "hopper.cuh"

namespace gtp::cuda {
namespace {

constexpr int kRows = 128, kColumns = 256, kDepth = 128;
constexpr int kBox = 128;  // rows that are copied at once
constexpr int kStages = 4;
static_assert(kRows == kBox);
constexpr int kLeftBytes = kRows * kDepth, kRightBytes = kColumns * kDepth, kStageBytes = kLeftBytes + kRightBytes;
constexpr int kAlignment = 1024;  // of what is swizzled
constexpr int kSharedBytes = kStages * kStageBytes + kAlignment;
constexpr int kGroupThreads = 128;
constexpr int kThreads = 3 * kGroupThreads;
constexpr int kConsumerWarps = 8;
constexpr int kStretch = 8;  // tiles of rows that blocks walk through for every column, so that operands stay in L2

struct Work {
  int left_row;  // of the operand
  int right_rows[kColumns / kBox];
  int first, panels;        // of the contraction
  int group;
  int rows, columns;  // of the tile that are written
  int64_t out;
};

struct Arguments {
  GroupedJob job;
  int across;  // tiles of columns
  int works;
};

__device__ __forceinline__ bool find_work(const Arguments& arguments, int number, Work& work) {
  const GroupedJob& job = arguments.job;
  const int across = arguments.across;
  if (job.outer) {
    const int high = (job.rows + kRows - 1) / kRows;
    const int within = number % (high * across);
    const int row = within / across * kRows, column = within % across * kColumns;
    const int part = job.rows / job.shards, shard = row / part;
    work.group = number / (high * across);
    work.left_row = row;
    for (int i = 0; i < kColumns / kBox; ++i) work.right_rows[i] = column + i * kBox;
    work.first = job.starts[work.group];
    work.panels = (job.stops[work.group] - work.first + kDepth - 1) / kDepth;
    work.rows = min(kRows, job.rows - row);
    work.columns = min(kColumns, job.columns - column);
    work.out = ((int64_t{shard} * job.groups + work.group) * part + row % part) * job.columns + column;
    return true;
  }
  const int stretch = number / (kStretch * across), first = stretch * kStretch;
  const int high = min(job.tiles - first, kStretch), within = number - first * across;
  const int tile = first + within % high, column = within / high * kColumns;
  const int start = job.starts[tile];
  work.group = job.tile_groups[tile];
  work.left_row = start;
  const int part = job.columns / job.shards;
  for (int i = 0; i < kColumns / kBox; ++i) {
    const int own = column + i * kBox, shard = own < job.columns ? own / part : 0;
    work.right_rows[i] = (shard * job.groups + work.group) * part + own % part;
  }
  work.first = 0;
  work.panels = work.group < job.groups ? (job.depth + kDepth - 1) / kDepth : 0;  // rows of no group
  work.rows = min(kRows, job.stops[tile] - start);
  work.columns = min(kColumns, job.columns - column);
  work.out = int64_t{start} * job.columns + column;
  return work.rows > 0;
}

// Gives each of four neighbouring lanes all words of one of four blocks, in the order of the lanes that had them.
__device__ __forceinline__ void transpose_quad(uint32_t (&v)[4], int lane) {
  const bool odd = lane & 1, high = lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, odd ? v[i] : v[i + 1], 1);
    (odd ? v[i] : v[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, high ? v[i] : v[i + 2], 2);
    (high ? v[i] : v[i + 2]) = got;
  }
}

__device__ __forceinline__ uint32_t as_bf16(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

// A warpgroup's part of a tile, 64 rows: each thread has two columns of every eight, in two rows.
template <bool kWide>
__device__ __forceinline__ void write_tile(const GroupedJob& job, const Work& work, const float (&d)[128], int part) {
  const int thread = threadIdx.x % kGroupThreads, lane = thread % 32, quarter = lane % 4;
  const float scale = work.group < job.groups ? job.scales[work.group] : 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = part * 64 + thread / 32 * 16 + half * 8 + lane / 4;
    const int64_t at = work.out + int64_t{row} * job.columns;
    const bool real = row < work.rows;
#pragma unroll
    for (int block = 0; block < 32; block += 4) {
      if constexpr (kWide) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = (block + i) * 8 + quarter * 2;
          const float* pair = d + (block + i) * 4 + half * 2;
          if (real && column < work.columns) {
            *reinterpret_cast<float2*>(static_cast<float*>(job.out) + at + column) =
                make_float2(pair[0] * scale, pair[1] * scale);
          }
        }
      } else {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = d + (block + i) * 4 + half * 2;
          words[i] = as_bf16(pair[0] * scale, pair[1] * scale);
        }
        transpose_quad(words, lane);
        const int column = (block + quarter) * 8;
        if (real && column < work.columns) {
          *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(job.out) + at + column) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }
}

template <bool kLeftE5M2, bool kRightE5M2, bool kWide>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_matmul_kernel(const __grid_constant__ CUtensorMap left, const __grid_constant__ CUtensorMap right,
                          const __grid_constant__ Arguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t shared[];
  __shared__ alignas(8) uint64_t barriers[2 * kStages];
  const uint32_t panels = (shared_address(shared) + kAlignment - 1) / kAlignment * kAlignment;
  const uint32_t full = shared_address(barriers), empty = full + kStages * 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(full + i * 8, 1);
      init_barrier(empty + i * 8, kConsumerWarps);
    }
    publish_barriers();
  }
  __syncthreads();

  const int role = threadIdx.x / kGroupThreads;
  int stage = 0;
  uint32_t parity = 0;
  const auto advance = [&] {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  };
  Work work;
  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      fetch_map(&left);
      fetch_map(&right);
      for (int number = blockIdx.x; number < arguments.works; number += gridDim.x) {
        if (!find_work(arguments, number, work)) continue;
        for (int i = 0; i < work.panels; ++i) {
          wait(empty + stage * 8, parity ^ 1);
          const uint32_t barrier = full + stage * 8, target = panels + stage * kStageBytes;
          arrive_expecting(barrier, kStageBytes);
          const int depth = work.first + i * kDepth;
          copy_box(target, &left, depth, work.left_row, barrier);
          for (int j = 0; j < kColumns / kBox; ++j) {
            copy_box(target + kLeftBytes + j * kBox * kDepth, &right, depth, work.right_rows[j], barrier);
          }
          advance();
        }
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int part = role - 1;
  const bool speaks = threadIdx.x % 32 == 0;
  for (int number = blockIdx.x; number < arguments.works; number += gridDim.x) {
    if (!find_work(arguments, number, work)) continue;
    float d[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) d[i] = 0.0f;
    int before = 0;
    for (int i = 0; i < work.panels; ++i) {
      wait(full + stage * 8, parity);
      const uint32_t panel = panels + stage * kStageBytes;
      const uint64_t a = describe_rows(panel + part * 64 * kDepth), b = describe_rows(panel + kLeftBytes);
      keep(d);
      matmul_fence();
#pragma unroll
      for (int k = 0; k < kDepth / 32; ++k) matmul_64x256x32<kLeftE5M2, kRightE5M2>(d, a + k * 2, b + k * 2);
      matmul_commit();
      matmul_wait<1>();
      if (i > 0 && speaks) arrive(empty + before * 8);
      before = stage;
      advance();
    }
    matmul_wait<0>();
    keep(d);
    if (work.panels > 0 && speaks) arrive(empty + before * 8);
    write_tile<kWide>(arguments.job, work, d, part);
  }
#endif
}

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, found at run time: nothing is linked with the driver.
Encode encoder() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  return found;
}

// Boxes of 128 x 128 bytes of a matrix of bytes, swizzled.
bool encode(CUtensorMap& map, const uint8_t* data, int64_t height, int64_t width) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(height)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(width)};
  const cuuint32_t box[2] = {kDepth, kBox}, steps[2] = {1, 1};
  return encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<uint8_t*>(data), sizes, strides, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <bool kLeftE5M2, bool kRightE5M2, bool kWide>
const char* launch(const CUtensorMap& left, const CUtensorMap& right, const Arguments& arguments, int blocks,
                   cudaStream_t stream) {
  const auto kernel = grouped_matmul_kernel<kLeftE5M2, kRightE5M2, kWide>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error == cudaSuccess) {
    kernel<<<blocks, kThreads, kSharedBytes, stream>>>(left, right, arguments);
  }
  error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <bool kLeftE5M2, bool kRightE5M2>
const char* launch(const CUtensorMap& left, const CUtensorMap& right, const Arguments& arguments, int blocks,
                   cudaStream_t stream) {
  return arguments.job.wide ? launch<kLeftE5M2, kRightE5M2, true>(left, right, arguments, blocks, stream)
                            : launch<kLeftE5M2, kRightE5M2, false>(left, right, arguments, blocks, stream);
}

}  // namespace

const char* grouped_matmul(const GroupedJob& job, Stream stream) {
  int device = 0, major = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  if (major != 9) return "the grouped matmul of codes runs on Hopper (compute capability 9.0) alone";
  if (encoder() == nullptr) return "the driver has no cuTensorMapEncodeTiled; it must be of CUDA 12.0 or later";
  const int64_t left_rows = job.outer ? job.rows : job.left_rows;
  const int64_t right_rows = job.outer ? job.columns : int64_t{job.groups} * job.columns;
  CUtensorMap left, right;
  if (!encode(left, job.left, left_rows, job.depth) || !encode(right, job.right, right_rows, job.depth)) {
    return "cuTensorMapEncodeTiled refuses an operand";
  }
  Arguments arguments{job, (job.columns + kColumns - 1) / kColumns, 0};
  const int down = job.outer ? job.groups * ((job.rows + kRows - 1) / kRows) : job.tiles;
  arguments.works = down * arguments.across;
  const int blocks = std::min(arguments.works, processors);
  const auto on = static_cast<cudaStream_t>(stream);
  if (job.left_e5m2) {
    return job.right_e5m2 ? launch<true, true>(left, right, arguments, blocks, on)
                          : launch<true, false>(left, right, arguments, blocks, on);
  }
  return job.right_e5m2 ? launch<false, true>(left, right, arguments, blocks, on)
                        : launch<false, false>(left, right, arguments, blocks, on);
}

}  // namespace gtp::cuda
