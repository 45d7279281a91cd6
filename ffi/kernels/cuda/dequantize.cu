// Dequantization: load codes and their blocks' factors, multiply, round.
#include <algorithm>

#include "device.cuh"
#include "gtp/cuda.h"
#include "launch.cuh"

namespace gtp::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kRowsPerThread = 4;
// without a transposition a warp takes 256 columns of one row at a time
constexpr int kFlatRows = kWarps * kRowsPerThread, kFlatCols = 256;

struct Parameters {
  float largest;
  bool e5m2;
};

// Bytes of codes of eight numbers.
template <Kind kind>
constexpr int kCodeBytes = kFp4<kind> ? 4 : 8;

__device__ __forceinline__ bool finite(float x) { return (__float_as_uint(x) & kMagnitude) < kInfinity; }

// `words` of codes, of which `bytes` are there.
template <int kBytes>
__device__ __forceinline__ void load_codes(const uint8_t* codes, int bytes, bool wide, uint32_t (&words)[kBytes / 4]) {
  if (wide && bytes == kBytes) {
    if constexpr (kBytes == 4) {
      words[0] = __ldcs(reinterpret_cast<const uint32_t*>(codes));
    } else {
      const uint2 both = __ldcs(reinterpret_cast<const uint2*>(codes));
      words[0] = both.x;
      words[1] = both.y;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kBytes / 4; ++i) words[i] = 0;
#pragma unroll
  for (int i = 0; i < kBytes; ++i) {
    if (i < bytes) words[i / 4] |= static_cast<uint32_t>(codes[i]) << (i % 4 * 8);
  }
}

// The scale of the block at (row, col) of a copy with so many columns.
template <Kind kind>
__device__ __forceinline__ uint32_t load_scale(const uint8_t* scales, int64_t row, int64_t col, int64_t cols) {
  if constexpr (kind == Kind::kTiles) return scales[row / 16 * ceil_div(cols, 16) + col / 16];
  if constexpr (kind == Kind::kRuns) return scales[row * ceil_div(cols, 16) + col / 16];
  if constexpr (kind == Kind::kExponents) return scales[row * ceil_div(cols, 32) + col / 32];
  return 0;
}

template <Kind kind>
__device__ __forceinline__ float factor_of(uint32_t scale, float amax, const Parameters& p) {
  if constexpr (kFp4<kind>) return e4m3_block_factor(scale, amax);
  if constexpr (kind == Kind::kExponents) return e8m0_block_factor(scale);
  return tensor_factor(p.largest, amax);
}

// Eight values times their factors; NaN is canonical.
template <Kind kind>
__device__ __forceinline__ void decode(const uint32_t* words, const float (&factors)[8], bool e5m2, float (&x)[8]) {
  bool special = false;
  if constexpr (kFp4<kind>) {
    decode_e2m1_x8(words[0], x);
  } else {
    decode_fp8_x4(words[0], e5m2, x);
    decode_fp8_x4(words[1], e5m2, x + 4);
    special = special_fp8_x4(words[0], e5m2) || special_fp8_x4(words[1], e5m2);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    special |= !finite(factors[i]);
    x[i] *= factors[i];
  }
  if (special) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = canonical(x[i]);
  }
}

// The first `valid` of eight values, rounded to T.
template <class T>
__device__ __forceinline__ void store_eight(typename T::Storage* out, const float (&x)[8], int valid, bool wide) {
  if (wide && valid == 8) {
    auto* wide_out = reinterpret_cast<uint4*>(out);
    if constexpr (T::kBytes == 4) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        wide_out[i] = make_uint4(__float_as_uint(x[4 * i]), __float_as_uint(x[4 * i + 1]),
                                 __float_as_uint(x[4 * i + 2]), __float_as_uint(x[4 * i + 3]));
      }
    } else {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // the hardware has another canonical NaN
        const bool nan = isnan(x[2 * i]) || isnan(x[2 * i + 1]);
        words[i] = nan ? narrow<T>(x[2 * i]) | static_cast<uint32_t>(narrow<T>(x[2 * i + 1])) << 16
                       : narrow_x2<T>(x[2 * i], x[2 * i + 1]);
      }
      *wide_out = make_uint4(words[0], words[1], words[2], words[3]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < valid) out[i] = narrow<T>(x[i]);
  }
}

// ---- without a transposition --------------------------------------------------------------------------------------

// `kColumns`: an MXFP8 column copy, rows x cols of which are C x R: every column has its own scale.
template <class T, Kind kind, bool kColumns>
__device__ __forceinline__ void flat_tile(const DequantizeJob& job, const Parameters& p, uint32_t tile) {
  const int64_t rows = kColumns ? job.cols : job.rows, cols = kColumns ? job.rows : job.cols;
  const uint32_t down = static_cast<uint32_t>(ceil_div(rows, kFlatRows));
  const uint32_t across = static_cast<uint32_t>(ceil_div(cols, kFlatCols));
  const int64_t matrix = tile / across / down;
  const int64_t first_row = static_cast<int64_t>(tile / across % down) * kFlatRows;
  const int64_t col = static_cast<int64_t>(tile % across) * kFlatCols + threadIdx.x % 32 * 8;
  const int valid = static_cast<int>(min(static_cast<int64_t>(8), cols - col));
  if (valid <= 0) return;
  const int64_t end = min(rows, kColumns ? rows : job.rows_kept - matrix * rows);

  constexpr int kBytes = kCodeBytes<kind>;
  const uint8_t* codes = job.codes + matrix * job.codes_stride;
  const uint8_t* scales = job.scales + matrix * job.scales_stride;
  const int64_t pitch = kFp4<kind> ? ceil_div(cols, 2) : cols;
  const bool wide = pitch % kBytes == 0 && aligned(codes, kBytes);
  const int bytes = kFp4<kind> ? (valid + 1) / 2 : valid;
  float amax = 0.0f;
  if constexpr (kind != Kind::kExponents) amax = job.amax[matrix / job.count_per_amax * job.amax_stride];

  uint32_t words[kRowsPerThread][kBytes / 4];
  uint32_t scale[kRowsPerThread];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int64_t row = first_row + i * kWarps + threadIdx.x / 32;
    if (row >= end) break;
    load_codes<kBytes>(codes + row * pitch + (kFp4<kind> ? col / 2 : col), bytes, wide, words[i]);
    if constexpr (!kColumns) scale[i] = load_scale<kind>(scales, row, col, cols);
  }
  auto* out = static_cast<typename T::Storage*>(job.x) + matrix * job.x_stride;
  const bool wide_out = cols * T::kBytes % 16 == 0 && aligned(out, 16);
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int64_t row = first_row + i * kWarps + threadIdx.x / 32;
    if (row >= end) break;
    float factors[8];
    if constexpr (kColumns) {
#pragma unroll
      for (int k = 0; k < 8; ++k) factors[k] = e8m0_block_factor(k < valid ? scales[row / 32 * cols + col + k] : 0);
    } else {
      const float factor = factor_of<kind>(scale[i], amax, p);
#pragma unroll
      for (int k = 0; k < 8; ++k) factors[k] = factor;
    }
    float x[8];
    decode<kind>(words[i], factors, p.e5m2, x);
    store_eight<T>(out + row * cols + col, x, valid, wide_out);
  }
}

// ---- with a transposition -----------------------------------------------------------------------------------------

// Codes R x C to values C x R: a thread reads 16 codes of two of the 64 rows, then writes 8 values of four rows.
template <class T, Kind kind>
__device__ __forceinline__ void turned_tile(const DequantizeJob& job, const Parameters& p, uint32_t tile,
                                            typename T::Storage* shared) {
  const uint32_t down = static_cast<uint32_t>(ceil_div(job.rows, kTile));
  const uint32_t across = static_cast<uint32_t>(ceil_div(job.cols, kTile));
  const int64_t matrix = tile / across / down;
  const int64_t first_row = static_cast<int64_t>(tile / across % down) * kTile;
  const int64_t first_col = static_cast<int64_t>(tile % across) * kTile;
  constexpr int kBytes = kCodeBytes<kind>;
  const uint8_t* codes = job.codes + matrix * job.codes_stride;
  const uint8_t* scales = job.scales + matrix * job.scales_stride;
  const int64_t pitch = kFp4<kind> ? ceil_div(job.cols, 2) : job.cols;
  const bool wide = pitch % kBytes == 0 && aligned(codes, kBytes);
  float amax = 0.0f;
  if constexpr (kind != Kind::kExponents) amax = job.amax[matrix / job.count_per_amax * job.amax_stride];

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // half a run: lanes of a group of eight read one row's 64 codes
    const int r = warp * 16 + i * 4 + lane / 8, c = lane % 8 * 8;
    const int64_t row = first_row + r, col = first_col + c;
    const int valid = row < job.rows ? static_cast<int>(min(static_cast<int64_t>(8), job.cols - col)) : 0;
    if (valid <= 0) continue;
    uint32_t words[kBytes / 4];
    load_codes<kBytes>(codes + row * pitch + (kFp4<kind> ? col / 2 : col), kFp4<kind> ? (valid + 1) / 2 : valid, wide,
                       words);
    const float factor = factor_of<kind>(load_scale<kind>(scales, row, col, job.cols), amax, p);
    const float factors[8] = {factor, factor, factor, factor, factor, factor, factor, factor};
    float x[8];
    decode<kind>(words, factors, p.e5m2, x);
#pragma unroll
    for (int k = 0; k < 8; ++k) shared[tile_offset(c + k, r)] = narrow<T>(x[k]);
  }
  __syncthreads();
  auto* out = static_cast<typename T::Storage*>(job.x) + matrix * job.x_stride;
  const bool wide_out = job.rows * T::kBytes % 16 == 0 && aligned(out, 16);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int c = warp * 16 + i * 4 + lane / 8, r = lane % 8 * 8;
    const int64_t row = first_row + r, col = first_col + c;
    const int valid = col < job.cols ? static_cast<int>(min(static_cast<int64_t>(8), job.rows - row)) : 0;
    if (valid <= 0) continue;
    const auto* in = shared + tile_offset(c, r);
    auto* to = out + col * job.rows + row;
    if (wide_out && valid == 8) {
#pragma unroll
      for (int w = 0; w < 8 * T::kBytes / 16; ++w) {
        reinterpret_cast<uint4*>(to)[w] = reinterpret_cast<const uint4*>(in)[w];
      }
    } else {
      for (int k = 0; k < valid; ++k) to[k] = in[k];
    }
  }
}

// ---- kernels ------------------------------------------------------------------------------------------------------

template <class T, Kind kind>
__device__ __forceinline__ void dequantize_tile(const DequantizeJob& job, const Parameters& p, uint32_t tile,
                                                void* shared) {
  if (job.layout == Layout::kColumnsTurned) {
    return turned_tile<T, kind>(job, p, tile, static_cast<typename T::Storage*>(shared));
  }
  if constexpr (kind == Kind::kExponents) {
    if (job.layout == Layout::kColumns) return flat_tile<T, kind, true>(job, p, tile);
  }
  flat_tile<T, kind, false>(job, p, tile);
}

template <Kind kind, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const __grid_constant__ Table<DequantizeJob, kCapacity> table, const Parameters p) {
  extern __shared__ __align__(16) uint32_t shared[];
  const int index = table.find(blockIdx.x);
  const DequantizeJob& job = table.jobs[index];
  const uint32_t tile = blockIdx.x - table.first_tile[index];
  switch (job.dtype) {
    case DType::kF32:
      return dequantize_tile<F32, kind>(job, p, tile, shared);
    case DType::kBF16:
      return dequantize_tile<BF16, kind>(job, p, tile, shared);
    case DType::kF16:
      return dequantize_tile<F16, kind>(job, p, tile, shared);
  }
}

int64_t tiles_of(const DequantizeJob& job) {
  if (job.layout == Layout::kColumnsTurned) {
    return job.count * ceil_div(job.rows, kTile) * ceil_div(job.cols, kTile);
  }
  const bool columns = job.layout == Layout::kColumns;
  const int64_t rows = columns ? job.cols : job.rows, cols = columns ? job.rows : job.cols;
  return job.count * ceil_div(rows, kFlatRows) * ceil_div(cols, kFlatCols);
}

template <Kind kind, int kCapacity>
const char* launch(const std::vector<DequantizeJob>& jobs, const Parameters& p, cudaStream_t stream) {
  int shared = 0;
  for (const DequantizeJob& job : jobs) {
    if (job.layout == Layout::kColumnsTurned) shared = std::max(shared, kTileElements * dtype_bytes(job.dtype));
  }
  Table<DequantizeJob, kCapacity> table;
  return launch_all(jobs.data(), static_cast<int64_t>(jobs.size()), kCapacity, &tiles_of, table,
                    [&](const Table<DequantizeJob, kCapacity>& full, unsigned blocks) {
                      dequantize_kernel<kind, kCapacity><<<blocks, kThreads, shared, stream>>>(full, p);
                    });
}

template <Kind kind>
const char* launch_by_count(const std::vector<DequantizeJob>& jobs, const Parameters& p, cudaStream_t stream) {
  constexpr int kFew = 16, kMany = capacity_for<DequantizeJob>(kParameterBytes);
  return jobs.size() <= kFew ? launch<kind, kFew>(jobs, p, stream) : launch<kind, kMany>(jobs, p, stream);
}

}  // namespace

const char* dequantize(const std::vector<DequantizeJob>& jobs, int code, Stream opaque) {
  const auto stream = static_cast<cudaStream_t>(opaque);
  const Format& format = kFormats[code];
  const Parameters p{format.largest(), format.element == Element::kE5M2};
  if (format.scale == ScaleType::kE8M0) return launch_by_count<Kind::kExponents>(jobs, p, stream);
  if (format.scale == ScaleType::kNone) return launch_by_count<Kind::kTensor>(jobs, p, stream);
  return format.block_rows == 1 ? launch_by_count<Kind::kRuns>(jobs, p, stream)
                                : launch_by_count<Kind::kTiles>(jobs, p, stream);
}

}  // namespace gtp::cuda
