// Quantization, tile by tile: one pass over the input for the row copy, the column copy, or both.
//
// A block of 128 threads takes a tile of 64 rows x 64 columns. A warp loads 16 of its rows, a thread 8 columns of 4 of
// them, which stay in registers for the row copy. The column copy reads the tile again from shared memory, so that a
// thread holds 16 rows of two columns; only the column copy that is not transposed (MXFP8) is made from the registers
// too.
#include <algorithm>

#include "gtp/cuda.h"
#include "launch.cuh"
#include "quantize_columns.cuh"
#include "quantize_rows.cuh"

namespace gtp::cuda {
namespace {

// By the first tile of a matrix.
__device__ __forceinline__ void zero_gaps(const Copy& copy, const Place& at) {
  if (at.row + at.col > 0) return;
  const int i = static_cast<int>(threadIdx.x);
  if (i < copy.codes_gap) copy.codes[at.matrix * copy.codes_stride + copy.codes_bytes + i] = 0;
  if (i < copy.scales_gap) copy.scales[at.matrix * copy.scales_stride + copy.scales_bytes + i] = 0;
}

// ---- a tile, and the kernel ---------------------------------------------------------------------------------------

template <class T, Kind kind, bool kExtras>
__device__ __forceinline__ void quantize_tile(const QuantizeJob& job, const Parameters& p, const Place& at,
                                              uint32_t* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane % 8;
  const auto* data = static_cast<const typename T::Storage*>(job.x) + at.matrix * job.rows * job.cols;
  const bool wide = job.cols * T::kBytes % 16 == 0 && aligned(data, 16);
  const int64_t col = at.col + group * 8;
  const int64_t left = max(static_cast<int64_t>(0), min(static_cast<int64_t>(8), job.cols - col));

  Eight<T> x[kRowsPerThread];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int64_t row = at.row + warp * 16 + i * 4 + lane / 8;
    x[i] = load_eight<T>(data + row * job.cols + col, row < job.rows ? static_cast<int>(left) : 0, wide);
  }
  if (job.row.codes) {
    zero_gaps(job.row, at);
    if (kExtras && p.key) {
      row_copy<T, kind, kExtras>(job, p, at, x);
    } else {
      row_copy<T, kind, false>(job, p, at, x);
    }
  }
  if (!job.column.codes) return;
  zero_gaps(job.column, at);
  if constexpr (kind == Kind::kExponents) {
    if (!job.column_transposed) return column_copy_in_place<T>(job, p, at, x, shared);
  }
  store_tile<T>(x, shared);
  __syncthreads();
  column_copy_transposed<T, kind, kExtras>(job, p, at, shared);
}

template <Kind kind, bool kExtras, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const __grid_constant__ Table<QuantizeJob, kCapacity> table, const Parameters p) {
  extern __shared__ __align__(16) uint32_t shared[];
  const int index = table.find(blockIdx.x);
  const QuantizeJob& job = table.jobs[index];
  const uint32_t down = static_cast<uint32_t>(ceil_div(job.rows, kTile));
  const uint32_t across = static_cast<uint32_t>(ceil_div(job.cols, kTile));
  const uint32_t tile = blockIdx.x - table.first_tile[index];
  const Place at{tile / across / down, static_cast<int64_t>(tile / across % down) * kTile,
                 static_cast<int64_t>(tile % across) * kTile};
  switch (job.dtype) {
    case DType::kF32:
      return quantize_tile<F32, kind, kExtras>(job, p, at, shared);
    case DType::kBF16:
      return quantize_tile<BF16, kind, kExtras>(job, p, at, shared);
    case DType::kF16:
      return quantize_tile<F16, kind, kExtras>(job, p, at, shared);
  }
}

template <Kind kind, bool kExtras, int kCapacity>
const char* launch(const std::vector<QuantizeJob>& jobs, const Parameters& p, cudaStream_t stream) {
  // the in-place column copy needs less than a float32 tile
  int shared = 0;
  for (const QuantizeJob& job : jobs) {
    if (job.column.codes) shared = std::max(shared, kTileElements * (job.dtype == DType::kF32 ? 4 : 2));
  }
  Table<QuantizeJob, kCapacity> table;
  return launch_all(
      jobs.data(), static_cast<int64_t>(jobs.size()), kCapacity,
      +[](const QuantizeJob& job) { return job.count * ceil_div(job.rows, kTile) * ceil_div(job.cols, kTile); }, table,
      [&](const Table<QuantizeJob, kCapacity>& full, unsigned blocks) {
        quantize_kernel<kind, kExtras, kCapacity><<<blocks, kThreads, shared, stream>>>(full, p);
      });
}

// A table for few jobs, and one for as many as fit.
template <Kind kind, bool kExtras>
const char* launch_by_count(const std::vector<QuantizeJob>& jobs, const Parameters& p, cudaStream_t stream) {
  constexpr int kFew = 10, kMany = capacity_for<QuantizeJob>(kParameterBytes);
  if (jobs.size() <= kFew) return launch<kind, kExtras, kFew>(jobs, p, stream);
  if constexpr (kExtras) {
    return "options of one array, but several arrays";
  } else {
    return launch<kind, kExtras, kMany>(jobs, p, stream);
  }
}

}  // namespace

const char* quantize(const std::vector<QuantizeJob>& jobs, const QuantizeOptions& options, Stream opaque) {
  const auto stream = static_cast<cudaStream_t>(opaque);
  const Format& format = kFormats[options.format];
  const Parameters p{options.key, format.largest(), 1.0f / format.element_max, options.hadamard,
                     format.element == Element::kE5M2};
  const bool extras = options.hadamard || options.key;
  if (format.scale == ScaleType::kE8M0) return launch_by_count<Kind::kExponents, false>(jobs, p, stream);
  if (format.scale == ScaleType::kNone) return launch_by_count<Kind::kTensor, false>(jobs, p, stream);
  if (format.block_rows == 1) {
    return extras ? launch_by_count<Kind::kRuns, true>(jobs, p, stream)
                  : launch_by_count<Kind::kRuns, false>(jobs, p, stream);
  }
  return extras ? launch_by_count<Kind::kTiles, true>(jobs, p, stream)
                : launch_by_count<Kind::kTiles, false>(jobs, p, stream);
}

}  // namespace gtp::cuda
