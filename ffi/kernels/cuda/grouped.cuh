// What grouped matmuls on Hopper have in common: tiles, copies of panels to shared memory, and the results.
//
// A block computes tiles of 128 x 256. One warp copies panels of the contraction to shared memory, 128 codes or 64
// values deep and four ahead; two warpgroups multiply 64 x 256 each. Blocks are persistent, and the copies of a block's
// next tile begin while the current tile is written.
//
// Codes lie along the contraction, as FP8 `wgmma` requires. Values are read in place, even if they lie across the
// contraction, that is, if the contraction is not their last dimension.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <numeric>

#include "gtp/cuda.h"
#include "hopper.cuh"

namespace gtp::cuda {

constexpr int kRows = 128, kColumns = 256;
constexpr int kPart = 64;         // rows per warpgroup
constexpr int kColumnBox = 64;    // columns of a box across the contraction, and depth of a panel of values
constexpr int kStages = 4;
constexpr int kLeftBytes = kRows * kLineBytes, kRightBytes = kColumns * kLineBytes, kStageBytes = kLeftBytes + kRightBytes;
constexpr int kAlignment = 1024;  // alignment of swizzled memory
constexpr int kGroupThreads = 128;
constexpr int kThreads = 3 * kGroupThreads;
constexpr int kConsumerWarps = 8;
constexpr int kMostLines = 4;  // boxes of the right operand whose locations are kept in registers
constexpr int kStretch = 8;    // row tiles that blocks process per column, so that operands stay in L2

// The dtypes of the operands, and whether each lies along or across the contraction.
template <Factor kLeftFactor, Factor kRightFactor, bool kLeftLiesAcross, bool kRightLiesAcross>
struct Operands {
  static constexpr Factor kLeft = kLeftFactor, kRight = kRightFactor;
  static constexpr bool kLeftAcross = kLeftLiesAcross, kRightAcross = kRightLiesAcross;
  static constexpr bool kValues = kLeft == Factor::kBF16 || kLeft == Factor::kF16;
  static constexpr int kDepth = kValues ? 64 : 128;  // depth of a panel
  static_assert(kDepth == kColumnBox || !kRightAcross);
};

// A tile, as read from memory.
struct Tile {
  int row, column;
  int group, start, stop;
};

struct Work {
  int row, column;    // position in the result; in a group's matrix if `outer`
  int first, limit;   // range of the contraction
  int panels;
  int group;
  int rows, columns;  // the part of the tile that is written
};

// The right operand is (slabs, part, width): one matrix for each shard and group, or a single matrix.
struct Arguments {
  GroupedJob job;
  int across;  // number of column tiles
  int works;
  int part;    // lines per slab of the right operand
  int box;     // lines of the right operand that are copied at once
  int boxes;   // boxes per tile
};

__device__ __forceinline__ Tile read_tile(const Arguments& arguments, int number) {
  const GroupedJob& job = arguments.job;
  const int across = arguments.across;
  Tile tile{};
  if (number >= arguments.works) return tile;
  if (job.outer) {
    const int high = (job.rows + kRows - 1) / kRows;
    const int within = number % (high * across);
    tile.group = number / (high * across);
    tile.row = within / across * kRows;
    tile.column = within % across * kColumns;
    tile.start = job.starts[tile.group];
    tile.stop = job.stops[tile.group];
  } else {
    const int stretch = number / (kStretch * across), first = stretch * kStretch;
    const int high = min(job.tiles - first, kStretch), within = number - first * across;
    const int index = first + within % high;
    tile.column = within / high * kColumns;
    tile.group = job.tile_groups[index];
    tile.start = job.starts[index];
    tile.stop = job.stops[index];
  }
  return tile;
}

// Finds the work of a tile and returns whether there is any.
__device__ __forceinline__ bool find_work(const Arguments& arguments, int panel_depth, const Tile& tile, Work& work) {
  const GroupedJob& job = arguments.job;
  work.group = tile.group;
  work.column = tile.column;
  if (job.outer) {
    work.row = tile.row;
    work.first = tile.start;
    work.limit = tile.stop;
    work.rows = min(kRows, job.rows - tile.row);
  } else {
    work.row = tile.start;
    work.first = 0;
    work.limit = tile.group < job.groups ? job.depth : 0;  // rows without a group get zeros
    work.rows = min(kRows, tile.stop - tile.start);
  }
  work.panels = (work.limit - work.first + panel_depth - 1) / panel_depth;
  work.columns = min(kColumns, job.columns - work.column);
  return work.rows > 0;
}

// The location of a line of the right operand, counted through the parts of all shards. Lines after the last are zeros.
struct Line {
  int own, slab;
};

__device__ __forceinline__ Line locate(const Arguments& arguments, int line, int limit, int group) {
  if (arguments.job.outer) return {line, 0};
  if (line >= limit) return {arguments.part, 0};
  if (arguments.job.shards == 1) return {line, group};  // the division below takes as long as issuing a copy
  const int shard = line / arguments.part;
  return {line - shard * arguments.part, shard * arguments.job.groups + group};
}

// Issues the copies of a tile's panels.
template <class Kinds>
struct Producer {
  const CUtensorMap* left;
  const CUtensorMap* right;
  const Arguments& arguments;
  const Work& work;
  Line lines[kMostLines];  // the same in every panel if the operand lies along the contraction

  __device__ __forceinline__ Producer(const CUtensorMap* left, const CUtensorMap* right, const Arguments& arguments,
                                      const Work& work)
      : left(left), right(right), arguments(arguments), work(work) {
    if constexpr (!Kinds::kRightAcross) {
#pragma unroll
      for (int i = 0; i < kMostLines; ++i) lines[i] = line_of(i);
    }
  }

  __device__ __forceinline__ Line line_of(int number) const {
    return locate(arguments, work.column + number * arguments.box, arguments.job.columns, work.group);
  }

  __device__ __forceinline__ void copy(uint32_t panel, int number, uint32_t barrier) const {
    const int depth = work.first + number * Kinds::kDepth, box = arguments.box;
    if constexpr (Kinds::kLeftAcross) {
#pragma unroll
      for (int i = 0; i < kRows / kColumnBox; ++i) {
        copy_box(panel + i * kColumnBoxBytes, left, work.row + i * kColumnBox, depth, 0, barrier);
      }
    } else {
      copy_box(panel, left, depth, work.row, 0, barrier);
    }
    const uint32_t target = panel + kLeftBytes;
    if constexpr (Kinds::kRightAcross) {
      for (int first = 0; first < Kinds::kDepth; first += box) {
        const Line line = locate(arguments, depth + first, arguments.job.depth, work.group);
#pragma unroll
        for (int i = 0; i < kColumns / kColumnBox; ++i) {
          copy_box(target + i * kColumnBoxBytes + first * kLineBytes, right, work.column + i * kColumnBox, line.own, line.slab,
                   barrier);
        }
      }
    } else {
      const int count = arguments.boxes;
#pragma unroll
      for (int i = 0; i < kMostLines; ++i) {
        if (i < count) copy_box(target + i * box * kLineBytes, right, depth, lines[i].own, lines[i].slab, barrier);
      }
      for (int i = kMostLines; i < count; ++i) {
        const Line line = line_of(i);
        copy_box(target + i * box * kLineBytes, right, depth, line.own, line.slab, barrier);
      }
    }
  }
};

// Transposes words among four neighbouring lanes: each lane receives all words of one of four blocks, in the order of
// the lanes that held them.
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

template <Factor kFactor>
__device__ __forceinline__ uint32_t as_pair(float low, float high) {
  if constexpr (kFactor == Factor::kF16) {
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
  } else {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
}

// Returns the offset in the result at which a row of a tile begins.
__device__ __forceinline__ int64_t place_of(const GroupedJob& job, const Work& work, int row) {
  if (!job.outer) return int64_t{work.row + row} * job.columns;
  const int part = job.rows / job.shards, line = work.row + row, shard = line / part;
  return ((int64_t{shard} * job.groups + work.group) * part + line - shard * part) * job.columns;
}

// Writes a warpgroup's 64 rows of a tile. Each thread holds two of every eight columns, in two rows.
template <Factor kFactor, bool kWide>
__device__ __forceinline__ void write_tile(const GroupedJob& job, const Work& work, const float (&d)[128], int part) {
  const int thread = threadIdx.x % kGroupThreads, lane = thread % 32, quarter = lane % 4;
  const float scale = job.scales != nullptr && work.group < job.groups ? job.scales[work.group] : 1.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = part * kPart + thread / 32 * 16 + half * 8 + lane / 4;
    const bool real = row < work.rows;
    const int64_t at = real ? place_of(job, work, row) + work.column : 0;
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
          words[i] = as_pair<kFactor>(pair[0] * scale, pair[1] * scale);
        }
        transpose_quad(words, lane);
        const int column = (block + quarter) * 8;
        if (real && column < work.columns) {
          *reinterpret_cast<uint4*>(static_cast<uint16_t*>(job.out) + at + column) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }
}

// Returns the offset of a stage's scales, which follow all panels. Copies write to multiples of 128 bytes.
template <int kScaleBytes>
constexpr __host__ __device__ int scales_at(int stage) {
  return kStages * kStageBytes + stage * ((kScaleBytes + 127) / 128 * 128);
}

// The panels in shared memory, and the barriers by which the warp that copies and those that multiply pass them on.
struct Ring {
  uint8_t* memory;  // kStages panels, followed by kStages places for scales
  uint32_t panels;  // the address of `memory`
  uint32_t full, empty;
  int stage = 0;
  uint32_t parity = 0;

  // Called by all threads of a block, which then synchronize.
  __device__ __forceinline__ Ring(uint8_t* shared, uint64_t (&barriers)[2 * kStages]) {
    const uint32_t skipped = (kAlignment - shared_address(shared) % kAlignment) % kAlignment;
    memory = shared + skipped;
    panels = shared_address(shared) + skipped;
    full = shared_address(barriers);
    empty = full + kStages * 8;
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        init_barrier(full + i * 8, 1);
        init_barrier(empty + i * 8, kConsumerWarps);
      }
      publish_barriers();
    }
  }

  __device__ __forceinline__ uint32_t panel() const { return panels + stage * kStageBytes; }

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Computes all tiles. A method adds up a warpgroup's part of a tile, and says how many bytes of scales it needs with each
// panel and where they come from.
template <class Method, bool kWide>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_matmul_kernel(const __grid_constant__ typename Method::Maps maps, const __grid_constant__ Arguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Kinds = typename Method::Kinds;
  extern __shared__ uint8_t shared[];
  __shared__ alignas(8) uint64_t barriers[2 * kStages];
  Ring ring(shared, barriers);
  __syncthreads();

  const int role = threadIdx.x / kGroupThreads;
  Work work;
  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      fetch_map(&maps.left);
      fetch_map(&maps.right);
      for (int number = blockIdx.x; number < arguments.works; number += gridDim.x) {
        if (!find_work(arguments, Kinds::kDepth, read_tile(arguments, number), work)) continue;
        const Producer<Kinds> producer(&maps.left, &maps.right, arguments, work);
        for (int i = 0; i < work.panels; ++i) {
          wait(ring.empty + ring.stage * 8, ring.parity ^ 1);
          const uint32_t barrier = ring.full + ring.stage * 8;
          arrive_expecting(barrier, kStageBytes + Method::kScaleBytes);
          producer.copy(ring.panel(), i, barrier);
          if constexpr (Method::kScaleBytes > 0) {
            Method::copy_scales(maps, work, i, ring.panels + scales_at<Method::kScaleBytes>(ring.stage), barrier);
          }
          ring.advance();
        }
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int part = role - 1;
  Tile next = read_tile(arguments, blockIdx.x);
  for (int number = blockIdx.x; number < arguments.works; number += gridDim.x) {
    const bool has_work = find_work(arguments, Kinds::kDepth, next, work);
    next = read_tile(arguments, number + gridDim.x);  // read in advance, so that no tile waits for it
    if (!has_work) continue;
    const bool has_rows = part * kPart < work.rows;  // if not, the other warpgroup has the tensor cores to itself
    float d[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) d[i] = 0.0f;
    Method::add_up(arguments.job, work, ring, part, has_rows, d);
    if (has_rows) write_tile<Kinds::kLeft, kWide>(arguments.job, work, d, part);
  }
#endif
}

using Encode = decltype(&cuTensorMapEncodeTiled);

// Returns the driver's function, found at run time so that nothing needs to be linked with the driver.
inline Encode encoder() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  return found;
}

// Describes matrices to copy in boxes of `lines` lines.
inline bool encode(CUtensorMap& map, const void* data, CUtensorMapDataType type, int bytes, int64_t slabs, int64_t height,
                   int64_t width, int columns, int lines, CUtensorMapSwizzle swizzle) {
  const auto sized = [](int64_t size) { return static_cast<cuuint64_t>(size); };
  const cuuint64_t sizes[3] = {sized(width), sized(height), sized(slabs)};
  const cuuint64_t strides[2] = {sized(width * bytes), sized(height * width * bytes)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(columns), static_cast<cuuint32_t>(lines), 1}, steps[3] = {1, 1, 1};
  return encoder()(&map, type, 3, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Describes matrices of codes or 16-bit values, to copy in boxes of swizzled lines of 128 bytes.
inline bool encode_operand(CUtensorMap& map, const void* data, int bytes, int64_t slabs, int64_t height, int64_t width,
                           int lines) {
  const auto type = bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  return encode(map, data, type, bytes, slabs, height, width, kLineBytes / bytes, lines, CU_TENSOR_MAP_SWIZZLE_128B);
}

// Describes a matrix of float32 scales, to copy in boxes of one line.
inline bool encode_scales(CUtensorMap& map, const float* data, int64_t height, int64_t width, int columns) {
  return encode(map, data, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, 1, height, width, columns, 1, CU_TENSOR_MAP_SWIZZLE_NONE);
}

struct Launch {
  Arguments arguments;
  int blocks;
  cudaStream_t stream;
};

template <class Method, bool kWide>
const char* launch(const Launch& what, const typename Method::Maps& maps) {
  constexpr int kSharedBytes = kAlignment + scales_at<Method::kScaleBytes>(kStages);
  const auto kernel = grouped_matmul_kernel<Method, kWide>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error == cudaSuccess) kernel<<<what.blocks, kThreads, kSharedBytes, what.stream>>>(maps, what.arguments);
  error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <class Method>
const char* launch_either(const Launch& what, const typename Method::Maps& maps) {
  return what.arguments.job.wide ? launch<Method, true>(what, maps) : launch<Method, false>(what, maps);
}

// Finds the arguments of a launch, and describes the operands of the job.
inline const char* prepare(const GroupedJob& job, Stream stream, Launch& what, CUtensorMap& left, CUtensorMap& right) {
  int device = 0, major = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  if (major != 9) return "the grouped matmul runs only on Hopper (compute capability 9.0)";
  if (encoder() == nullptr) return "the driver has no cuTensorMapEncodeTiled; it must support CUDA 12.0 or later";
  const bool values = job.left_factor == Factor::kBF16 || job.left_factor == Factor::kF16;
  const bool left_across = values && job.outer, right_across = values && (job.outer || job.backward);
  const int bytes = values ? 2 : 1;
  // lines of the right operand are columns of the result if it lies along the contraction, otherwise steps of the
  // contraction
  const int lines = right_across ? job.depth : job.columns, most = right_across ? kColumnBox : kRows;
  const int shards = job.outer ? 1 : job.shards, slabs = job.outer ? 1 : job.shards * job.groups;
  Arguments& arguments = what.arguments;
  arguments.job = job;
  arguments.part = lines / shards;
  arguments.box = shards == 1 ? most : std::gcd(arguments.part, most);
  arguments.boxes = kColumns / arguments.box;
  arguments.across = (job.columns + kColumns - 1) / kColumns;
  arguments.works = (job.outer ? job.groups * ((job.rows + kRows - 1) / kRows) : job.tiles) * arguments.across;
  const int left_height = left_across ? job.depth : job.outer ? job.rows : job.left_rows;
  const int left_width = left_across ? job.rows : job.depth, right_width = right_across ? job.columns : job.depth;
  if (!encode_operand(left, job.left, bytes, 1, left_height, left_width, left_across ? kColumnBox : kRows) ||
      !encode_operand(right, job.right, bytes, slabs, arguments.part, right_width, arguments.box)) {
    return "cuTensorMapEncodeTiled rejected an operand";
  }
  what.blocks = std::min(arguments.works, processors);
  what.stream = static_cast<cudaStream_t>(stream);
  return nullptr;
}

}  // namespace gtp::cuda
