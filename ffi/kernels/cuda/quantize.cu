// Quantization, tile by tile: one pass over the input for the row copy, the column copy, or both.
//
// A block of 128 threads walks along a strip of 64 rows and a few tiles of 64 columns, which come through shared memory,
// one or two tiles ahead of their use. For the row copy a thread takes a run of 16 columns of two rows; for the
// transposed column copy 16 rows of two columns. A tile that lies wholly inside an aligned matrix has code of its own,
// free of conditions.
#include <type_traits>

#include "gtp/cuda.h"
#include "launch.cuh"
#include "quantize_codes.cuh"
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

// ---- a strip, and the kernel --------------------------------------------------------------------------------------

// Long enough that its beginning costs little and a row's scales fill half a sector, short enough that there are many.
constexpr int kStrip = 4 * kTile;
constexpr int kJobs = capacity_for<QuantizeJob>(kFewBytes);

// How many of a strip's tiles are in shared memory at a time.
template <class T>
constexpr int kStages = T::kBytes == 4 ? 2 : 3;

template <class T, bool kExtras, bool kWhole, bool kRow, bool kColumn, class Row, class Column>
__device__ __forceinline__ void write_tile(const Parameters& p, const Extent& extent, const uint32_t* stage, const Row& row,
                                           const Column& column) {
  if constexpr (std::is_same_v<Column, TransposedCodes>) {
    Scaled tile;
    row.template write<T, kExtras, kWhole>(p, extent, stage, tile, column.nibbles);
    __syncthreads();
    column.template write<kWhole>(extent, tile);
  } else {
    if constexpr (kRow) row.template write<T, kExtras, kWhole>(p, extent, stage);
    if constexpr (kColumn) column.template write<T, kExtras, kWhole>(p, extent, stage);
  }
}

template <class T, Kind kind, bool kExtras, bool kRow, bool kColumn, class Column>
__device__ __forceinline__ void quantize_strip(const QuantizeJob& job, const Parameters& p, const Place& at,
                                               uint32_t* stages) {
  __shared__ float factors[kind == Kind::kRuns ? 2 : 1][kScaleCodes];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto* data = static_cast<const typename T::Storage*>(job.x) + at.matrix * job.rows * job.cols;
  const auto* x = data + (at.row + warp * 16 + lane / 8) * job.cols + at.col + lane % 8 * 8;
  const int rows = static_cast<int>(min(int64_t{kTile}, job.rows - at.row));
  const int cols = static_cast<int>(min(int64_t{kStrip}, job.cols - at.col));
  const bool wide = rows == kTile && job.cols * T::kBytes % 16 == 0 && aligned(data, 16);
  const auto* ahead = x;
  int left = cols, next = 0;  // columns that no stage was filled with; the stage to fill
  const auto fill = [&] {
    uint32_t* stage = stages + next * Stage<T>::kWords;
    if (wide && left >= kTile) {
      Stage<T>::fill(stage, ahead, job.cols);
    } else if (left > 0) {
      Stage<T>::fill_part(stage, ahead, job.cols, {rows, left});
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    ahead += kTile;
    left -= kTile;
    next = next == kStages<T> - 1 ? 0 : next + 1;
  };
#pragma unroll
  for (int tile = 0; tile < kStages<T> - 1; ++tile) fill();

  TensorScale for_row{}, for_column{};
  if constexpr (kRow) {
    zero_gaps(job.row, at);
    for_row = tensor_scale_of<kind>(job.row, job, at.matrix, p, factors[0]);
  }
  if constexpr (kColumn) {
    zero_gaps(job.column, at);
    for_column = tensor_scale_of<kind>(job.column, job, at.matrix, p, factors[kind == Kind::kRuns]);
  }
  RowCopy<kind> row(job, for_row, at);
  Column column(job, for_column, at, kExtras && p.hadamard);
  const bool all_wide = wide && (!kRow || row.wide) && (!kColumn || column.wide);
  int now = 0;
#pragma unroll 1
  for (int rest = cols; rest > 0; rest -= kTile) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages<T> - 2) : "memory");
    // the tile is there, the tile before it is done with, and the factors are there; rows stay within their warp
    if (kColumn || (kind == Kind::kRuns && rest == cols)) {
      __syncthreads();
    } else {
      __syncwarp();
    }
    fill();
    const uint32_t* stage = stages + now * Stage<T>::kWords;
    now = now == kStages<T> - 1 ? 0 : now + 1;
    const Extent extent{rows, min(kTile, rest)};
    if (all_wide && rest >= kTile) {
      write_tile<T, kExtras, true, kRow, kColumn>(p, extent, stage, row, column);
    } else {
      write_tile<T, kExtras, false, kRow, kColumn>(p, extent, stage, row, column);
    }
    row.next_tile();
    column.next_tile();
  }
}

template <class T, Kind kind, bool kExtras, bool kRow, bool kColumn>
__device__ __forceinline__ void quantize_strip(const QuantizeJob& job, const Parameters& p, const Place& at,
                                               uint32_t* stages) {
  if constexpr (kColumn && kind == Kind::kExponents) {
    if (!job.column_transposed) {
      return quantize_strip<T, kind, kExtras, kRow, kColumn, ColumnCopyInPlace>(job, p, at, stages);
    }
  }
  if constexpr (kRow && kColumn && kind == Kind::kTiles) {
    return quantize_strip<T, kind, kExtras, kRow, kColumn, TransposedCodes>(job, p, at, stages);
  }
  quantize_strip<T, kind, kExtras, kRow, kColumn, ColumnCopyTransposed<kind>>(job, p, at, stages);
}

// `kBoth`: every job wants both copies; otherwise each wants one.
template <class T, Kind kind, bool kExtras, bool kBoth>
__global__ void __launch_bounds__(kThreads, kBoth ? 4 : 5)
    quantize_kernel(const __grid_constant__ Table<QuantizeJob, kJobs> table, const Parameters p) {
  extern __shared__ __align__(16) uint32_t stages[];
  const int index = table.find(blockIdx.x);
  const QuantizeJob& job = table.jobs[index];
  const uint32_t down = static_cast<uint32_t>(ceil_div(job.rows, kTile));
  const uint32_t across = static_cast<uint32_t>(ceil_div(job.cols, kStrip));
  const uint32_t strip = blockIdx.x - table.first_tile[index], matrix = job.count == 1 ? 0 : strip / (across * down);
  const uint32_t within = strip - matrix * across * down;
  const Place at{matrix, int64_t{within / across} * kTile, int64_t{within % across} * kStrip};
  if constexpr (kBoth) {
    quantize_strip<T, kind, kExtras, true, true>(job, p, at, stages);
  } else if (job.row.codes) {
    quantize_strip<T, kind, kExtras, true, false>(job, p, at, stages);
  } else {
    quantize_strip<T, kind, kExtras, false, true>(job, p, at, stages);
  }
}

int64_t strips_of(const QuantizeJob& job) {
  return job.count * ceil_div(job.rows, kTile) * ceil_div(job.cols, kStrip);
}

template <class T, Kind kind, bool kExtras, bool kBoth>
const char* launch(const std::vector<QuantizeJob>& jobs, const Parameters& p, cudaStream_t stream) {
  std::vector<QuantizeJob> chosen;
  for (const QuantizeJob& job : jobs) {
    if (job.dtype != T::kDType || (job.row.codes && job.column.codes) != kBoth) continue;
    chosen.push_back(job);
  }
  constexpr int kShared = kStages<T> * Stage<T>::kWords * 4;
  Table<QuantizeJob, kJobs> table;
  return launch_all(chosen, &strips_of, table, [&](const Table<QuantizeJob, kJobs>& full, unsigned blocks) {
    quantize_kernel<T, kind, kExtras, kBoth><<<blocks, kThreads, kShared, stream>>>(full, p);
  });
}

// Both copies of 16 x 16 blocks are made of the same codes, unless they are rounded at random.
template <Kind kind, bool kExtras>
constexpr bool kBothTogether = kind != Kind::kTiles || !kExtras;

template <class T, Kind kind, bool kExtras>
const char* launch_dtype(const std::vector<QuantizeJob>& jobs, const Parameters& p, cudaStream_t stream) {
  if (const char* error = launch<T, kind, kExtras, false>(jobs, p, stream)) return error;
  if constexpr (kBothTogether<kind, kExtras>) return launch<T, kind, kExtras, true>(jobs, p, stream);
  return nullptr;
}

// One launch if all jobs have one dtype, and all both copies or all one.
template <Kind kind, bool kExtras>
const char* launch(const std::vector<QuantizeJob>& all, const Parameters& p, cudaStream_t stream) {
  std::vector<QuantizeJob> jobs;
  for (const QuantizeJob& job : all) {
    const bool scaled_apart = kind == Kind::kTiles && job.row.amax != job.column.amax;
    const bool apart = !kBothTogether<kind, kExtras> || scaled_apart;
    if (job.row.codes && job.column.codes && apart) {
      QuantizeJob row = job, column = job;
      row.column = {};
      column.row = {};
      jobs.insert(jobs.end(), {row, column});
    } else {
      jobs.push_back(job);
    }
  }
  const char* errors[] = {launch_dtype<F32, kind, kExtras>(jobs, p, stream),
                          launch_dtype<BF16, kind, kExtras>(jobs, p, stream),
                          launch_dtype<F16, kind, kExtras>(jobs, p, stream)};
  for (const char* error : errors) {
    if (error) return error;
  }
  return nullptr;
}

}  // namespace

const char* quantize(const std::vector<QuantizeJob>& jobs, const QuantizeOptions& options, Stream opaque) {
  const auto stream = static_cast<cudaStream_t>(opaque);
  const Format& format = kFormats[options.format];
  const Parameters p{options.key, format.largest(), 1.0f / format.element_max, options.hadamard,
                     format.element == Element::kE5M2};
  const bool extras = options.hadamard || options.key;
  if (format.scale == ScaleType::kE8M0) return launch<Kind::kExponents, false>(jobs, p, stream);
  if (format.scale == ScaleType::kNone) return launch<Kind::kTensor, false>(jobs, p, stream);
  if (format.block_rows == 1) {
    return extras ? launch<Kind::kRuns, true>(jobs, p, stream) : launch<Kind::kRuns, false>(jobs, p, stream);
  }
  return extras ? launch<Kind::kTiles, true>(jobs, p, stream) : launch<Kind::kTiles, false>(jobs, p, stream);
}

}  // namespace gtp::cuda
