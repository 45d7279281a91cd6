// Quantizes panel by panel, with one pass over the input for the row copy, the column copy, or both.
#include "gtp/cuda.h"
#include "quantize_codes.cuh"
#include "quantize_columns.cuh"
#include "quantize_lines.cuh"
#include "quantize_walk.cuh"

namespace gtp::cuda {
namespace {

// Two copies of the same panel.
template <class Row, class Column>
struct BothCopies {
  static constexpr bool kMeets = Row::kMeets || Column::kMeets;
  Row row;
  Column column;
  bool wide;

  __device__ __forceinline__ void move_to(const QuantizeJob& job, const Place& at, const Parameters& p) {
    row.move_to(job, at, p);
    column.move_to(job, at, p, job.column.amax == job.row.amax, row.tensor);
    wide = row.wide && column.wide;
  }

  __device__ __forceinline__ void next_part() {
    row.next_part();
    column.next_part();
  }

  __device__ __forceinline__ void next_panel() {
    row.next_panel();
    column.next_panel();
  }

  template <bool kExtras, bool kWhole>
  __device__ __forceinline__ void write(const Parameters& p, const Extent& rest, const char* stage, int part) const {
    row.template write<kExtras, kWhole>(p, rest, stage, part);
    column.template write<kExtras, kWhole>(p, rest, stage, part);
  }
};

// With `kWhole`, for panels that lie entirely inside a matrix with aligned copies, the code has no conditions.
template <class Copies, bool kExtras, bool kWhole, class Panel>
__device__ __forceinline__ void quantize_panel(Copies& copies, const Parameters& p, const Extent& rest,
                                               const char* stage) {
  // the code for columns is not unrolled, because twice its length would not fit in the instruction cache
#pragma unroll(Copies::kMeets ? 1 : 2)
  for (int i = 0; i < Panel::kParts; ++i) {
    copies.template write<kExtras, kWhole>(p, rest, stage, i);
    copies.next_part();
  }
}

// Quantizes the panels of the current job.
template <class Copies, bool kExtras, class T, Kind kind>
__device__ __forceinline__ void quantize_job(const QuantizeTable& table, const Parameters& p, PanelWalk<T, kind>& walk,
                                             Stages<T, kind>& stages) {
  using Panel = cuda::Panel<T, kind>;
  const int job = walk.job;
  Copies copies;
  __syncthreads();  // the warps of the previous job may not have been synchronized
  do {
    copies.move_to(table.jobs[job], walk.at, p);
    bool more;
    do {
      const char* stage = stages.next();
      if (Copies::kMeets) {
        __syncthreads();
      } else {
        __syncwarp();
      }
      stages.fill();
      const bool whole = copies.wide && walk.rest.rows >= Panel::kRows && walk.rest.cols >= Panel::kCols;
      if (whole) {
        quantize_panel<Copies, kExtras, true, Panel>(copies, p, walk.rest, stage);
      } else {
        quantize_panel<Copies, kExtras, false, Panel>(copies, p, walk.rest, stage);
      }
      more = walk.next(table);
      if (more) copies.next_panel();
    } while (more);
  } while (!walk.done() && walk.job == job);
}

// The number of threads per SM for which registers are limited, tuned on an H200.
template <Kind kind, bool kExtras, bool kBoth>
constexpr int kResident = kExtras || (kind == Kind::kExponents && kBoth) ? 512 : kind == Kind::kRuns ? 768 : 640;

// `kBoth`: every job requests both copies; otherwise, every job requests one.
template <class T, Kind kind, bool kExtras, bool kBoth>
__global__ void __launch_bounds__(Panel<T, kind>::kThreads, kResident<kind, kExtras, kBoth> / Panel<T, kind>::kThreads)
    quantize_kernel(const __grid_constant__ QuantizeTable table, const Parameters p) {
  extern __shared__ __align__(128) char shared[];
  using Row = LineCopy<T, kind, false>;
  using Column = LineCopy<T, kind, true>;
  PanelWalk<T, kind> walk(table);
  Stages<T, kind> stages(table, walk, shared);
  while (!walk.done()) {
    const QuantizeJob& job = table.jobs[walk.job];
    if constexpr (kBoth && kind == Kind::kTiles) {
      quantize_job<CodesBothWays<T>, kExtras, T, kind>(table, p, walk, stages);
    } else if constexpr (kBoth) {
      if (kind == Kind::kExponents && !job.column_transposed) {
        quantize_job<BothCopies<Row, ColumnCopyInPlace<T>>, kExtras, T, kind>(table, p, walk, stages);
      } else {
        quantize_job<BothCopies<Row, Column>, kExtras, T, kind>(table, p, walk, stages);
      }
    } else if (job.row.codes) {
      quantize_job<Row, kExtras, T, kind>(table, p, walk, stages);
    } else if (kind == Kind::kExponents && !job.column_transposed) {
      quantize_job<ColumnCopyInPlace<T>, kExtras, T, kind>(table, p, walk, stages);
    } else {
      quantize_job<Column, kExtras, T, kind>(table, p, walk, stages);
    }
  }
}

template <class T, Kind kind, bool kExtras, bool kBoth>
const char* launch(const std::vector<QuantizeJob>& jobs, const Parameters& p, cudaStream_t stream) {
  using Walk = PanelWalk<T, kind>;
  constexpr int kShared = Stages<T, kind>::kBytes;
  std::vector<QuantizeJob> chosen;
  for (const QuantizeJob& job : jobs) {
    if (job.dtype != T::kDType || (job.row.codes && job.column.codes) != kBoth) continue;
    chosen.push_back(job);
  }
  if (chosen.empty()) return nullptr;
  if (const char* error = allow_shared(&quantize_kernel<T, kind, kExtras, kBoth>, kShared)) return error;
  QuantizeTable table;
  return launch_all(chosen, &Walk::count, table, [&](const QuantizeTable& full, unsigned count) {
    quantize_kernel<T, kind, kExtras, kBoth>
        <<<Walk::blocks_for(count), Panel<T, kind>::kThreads, kShared, stream>>>(full, p);
  });
}

// Both copies of 16 x 16 blocks have the same codes, unless they are rounded stochastically.
template <Kind kind, bool kExtras>
constexpr bool kBothTogether = kind != Kind::kTiles || !kExtras;

template <class T, Kind kind, bool kExtras>
const char* launch_dtype(const std::vector<QuantizeJob>& jobs, const Parameters& p, cudaStream_t stream) {
  if (const char* error = launch<T, kind, kExtras, false>(jobs, p, stream)) return error;
  if constexpr (kBothTogether<kind, kExtras>) return launch<T, kind, kExtras, true>(jobs, p, stream);
  return nullptr;
}

// Needs only one launch per table of jobs if all jobs have the same dtype, and either all request both copies or all
// request one.
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
