// Dequantizes: loads codes and the factors of their blocks, multiplies, and rounds.
#include "dequantize_flat.cuh"
#include "dequantize_transposed.cuh"
#include "gtp/cuda.h"
#include "launch.cuh"

namespace gtp::cuda {
namespace {

using namespace dequantization;

constexpr int kJobs = capacity_for<DequantizeJob>(kFewBytes);

template <class T, Kind kind, bool kTransposed>
constexpr int kThreadsOf = kTransposed ? TransposedPanel<T, kind>::kThreads : kThreads;

// `kTransposed`: the values of all jobs are transposed; otherwise, none are.
template <class T, Kind kind, bool kTransposed>
__global__ void __launch_bounds__(kThreadsOf<T, kind, kTransposed>)
    dequantize_kernel(const __grid_constant__ Table<DequantizeJob, kJobs> table, const Parameters p) {
  extern __shared__ __align__(16) char shared[];
  const int index = table.find(blockIdx.x);
  const DequantizeJob& job = table.jobs[index];
  const uint32_t tile = blockIdx.x - table.first_tile[index];
  if constexpr (kTransposed) {
    using Panel = TransposedPanel<T, kind>;
    Panel(job, tile).write(p, shared);
  } else if constexpr (kind == Kind::kExponents) {
    if (job.layout == Layout::kColumns) {
      flat_tile<T, kind, true>(job, p, tile);
    } else {
      flat_tile<T, kind, false>(job, p, tile);
    }
  } else {
    flat_tile<T, kind, false>(job, p, tile);
  }
}

template <class T, Kind kind>
int64_t tiles_of(const DequantizeJob& job) {
  if (job.layout == Layout::kColumnsTransposed) {
    using Panel = TransposedPanel<T, kind>;
    return job.count * ceil_div(job.rows, Panel::kRows) * ceil_div(job.cols, Panel::kCols);
  }
  const bool columns = job.layout == Layout::kColumns;
  const int64_t rows = columns ? job.cols : job.rows, cols = columns ? job.rows : job.cols;
  return job.count * ceil_div(rows, kFlatRows) * ceil_div(cols, 32 * kWidth<T>);
}

template <class T, Kind kind, bool kTransposed>
const char* launch(const std::vector<DequantizeJob>& jobs, const Parameters& p, cudaStream_t stream) {
  std::vector<DequantizeJob> chosen;
  for (const DequantizeJob& job : jobs) {
    if (job.dtype == T::kDType && (job.layout == Layout::kColumnsTransposed) == kTransposed) chosen.push_back(job);
  }
  if (chosen.empty()) return nullptr;
  constexpr int kShared = kTransposed ? TransposedPanel<T, kind>::kSharedBytes : 0;
  if (const char* error = allow_shared(&dequantize_kernel<T, kind, kTransposed>, kShared)) return error;
  Table<DequantizeJob, kJobs> table;
  return launch_all(chosen, &tiles_of<T, kind>, table, [&](const Table<DequantizeJob, kJobs>& full, unsigned blocks) {
    dequantize_kernel<T, kind, kTransposed><<<blocks, kThreadsOf<T, kind, kTransposed>, kShared, stream>>>(full, p);
  });
}

// Needs only one launch per table of jobs if all jobs have the same dtype, and either all or none are transposed.
template <Kind kind>
const char* launch(const std::vector<DequantizeJob>& jobs, const Parameters& p, cudaStream_t stream) {
  using Launch = const char* (*)(const std::vector<DequantizeJob>&, const Parameters&, cudaStream_t);
  constexpr Launch kLaunches[] = {&launch<F32, kind, false>, &launch<F32, kind, true>,   &launch<BF16, kind, false>,
                                  &launch<BF16, kind, true>, &launch<F16, kind, false>, &launch<F16, kind, true>};
  for (const Launch one : kLaunches) {
    if (const char* error = one(jobs, p, stream)) return error;
  }
  return nullptr;
}

}  // namespace

const char* dequantize(const std::vector<DequantizeJob>& jobs, int code, Stream opaque) {
  const auto stream = static_cast<cudaStream_t>(opaque);
  const Format& format = kFormats[code];
  const Parameters p{format.largest(), format.element == Element::kE5M2};
  if (format.scale == ScaleType::kE8M0) return launch<Kind::kExponents>(jobs, p, stream);
  if (format.scale == ScaleType::kNone) return launch<Kind::kTensor>(jobs, p, stream);
  return format.block_rows == 1 ? launch<Kind::kRuns>(jobs, p, stream) : launch<Kind::kTiles>(jobs, p, stream);
}

}  // namespace gtp::cuda
