// Dequantization: load codes and their blocks' factors, multiply, round.
#include "device.cuh"
#include "gtp/cuda.h"
#include "launch.cuh"

namespace gtp::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
// without a transposition a warp takes eight rows, which lie in one 16 x 16 block, and a thread 16 bytes of each
constexpr int kRowsPerThread = 8;
constexpr int kFlatRows = kWarps * kRowsPerThread;
template <class T>
constexpr int kWidth = 16 / T::kBytes;
constexpr int kJobs = capacity_for<DequantizeJob>(kFewBytes);

struct Parameters {
  float largest;
  bool e5m2;
};

// Bytes of the codes of so many numbers.
template <Kind kind, int kCount>
constexpr int kCodeBytes = kFp4<kind> ? kCount / 2 : kCount;

__device__ __forceinline__ bool finite(float x) { return (__float_as_uint(x) & kMagnitude) < kInfinity; }

// The first `bytes` of so many bytes of codes.
template <int kBytes, bool kWhole>
__device__ __forceinline__ void load_codes(const uint8_t* codes, int bytes, bool wide,
                                           uint32_t (&words)[(kBytes + 3) / 4]) {
  if (kWhole || (wide && bytes == kBytes)) {
    if constexpr (kBytes == 2) words[0] = __ldcs(reinterpret_cast<const uint16_t*>(codes));
    if constexpr (kBytes == 4) words[0] = __ldcs(reinterpret_cast<const uint32_t*>(codes));
    if constexpr (kBytes == 8) {
      const uint2 both = __ldcs(reinterpret_cast<const uint2*>(codes));
      words[0] = both.x;
      words[1] = both.y;
    }
    return;
  }
#pragma unroll
  for (uint32_t& word : words) word = 0;
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

template <Kind kind>
__device__ __forceinline__ float amax_of(const DequantizeJob& job, int64_t matrix) {
  if constexpr (kind == Kind::kExponents) return 0.0f;
  // a division of 64 bits is slow, and most often not needed
  const bool first = matrix == 0 || job.amax_stride == 0;
  return job.amax[first ? 0 : matrix / job.count_per_amax * job.amax_stride];
}

// Numbers times their factors, and whether one of them may be NaN.
template <Kind kind, int kCount, class Factors>
__device__ __forceinline__ bool decode(const uint32_t* words, const Factors& factors, bool e5m2, float (&x)[kCount]) {
  bool special = !factors.all_finite;
  if constexpr (kFp4<kind>) {
    decode_e2m1(words[0], x);
  } else {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      decode_fp8_x4(words[i], e5m2, x + 4 * i);
      special |= special_fp8_x4(words[i], e5m2);
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] *= factors[i];
  return special;
}

struct OneFactor {
  float factor;
  bool all_finite;

  __device__ __forceinline__ explicit OneFactor(float factor) : factor(factor), all_finite(finite(factor)) {}
  __device__ __forceinline__ float operator[](int) const { return factor; }
};

template <int kCount>
struct ManyFactors {
  float factor[kCount];
  bool all_finite = true;

  __device__ __forceinline__ float operator[](int i) const { return factor[i]; }
};

// 16 bytes of numbers, rounded to T; NaN is canonical.
template <class T>
__device__ __forceinline__ void round_all(const float (&x)[kWidth<T>], bool special, uint32_t (&words)[4]) {
  if constexpr (T::kBytes == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __float_as_uint(special ? canonical(x[i]) : x[i]);
  } else if (special) {  // the hardware has another canonical NaN
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = narrow<T>(x[2 * i]) | static_cast<uint32_t>(narrow<T>(x[2 * i + 1])) << 16;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = narrow_x2<T>(x[2 * i], x[2 * i + 1]);
  }
}

template <class T>
__device__ __forceinline__ typename T::Storage number_of(const uint32_t (&words)[4], int i) {
  if constexpr (T::kBytes == 4) return __uint_as_float(words[i]);
  if constexpr (T::kBytes == 2) return static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
}

// The matrix of a job, and the tile's first row and column; the tiles are so large.
struct Place {
  int64_t matrix, row, col;

  __device__ __forceinline__ Place(const DequantizeJob& job, uint32_t tile, int64_t rows, int64_t cols, int tall,
                                   int broad) {
    const uint32_t down = static_cast<uint32_t>(ceil_div(rows, tall));
    const uint32_t across = static_cast<uint32_t>(ceil_div(cols, broad));
    const uint32_t stacked = job.count == 1 ? 0 : tile / (across * down), within = tile - stacked * across * down;
    matrix = stacked;
    row = int64_t{within / across} * tall;
    col = int64_t{within % across} * broad;
  }
};

// ---- without a transposition --------------------------------------------------------------------------------------

// A thread's part of a tile. `kColumns`: of an MXFP8 column copy, where every column has its own scale.
template <class T, Kind kind, bool kColumns, bool kWhole>
__device__ __forceinline__ void flat_part(const DequantizeJob& job, const Parameters& p, const uint8_t* codes,
                                          const uint8_t* scales, typename T::Storage* out, float amax, int64_t row,
                                          int64_t col, int64_t cols, int valid, int rows, bool wide, bool wide_out) {
  constexpr int kCount = kWidth<T>, kBytes = kCodeBytes<kind, kCount>;
  const int64_t pitch = kFp4<kind> ? ceil_div(cols, 2) : cols;
  const uint8_t* from = codes + row * pitch + (kFp4<kind> ? col / 2 : col);
  auto* to = out + row * cols + col;
  uint32_t words[kRowsPerThread][(kBytes + 3) / 4];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    if (!kWhole && i >= rows) break;
    load_codes<kBytes, kWhole>(from + i * pitch, kFp4<kind> ? (valid + 1) / 2 : valid, wide, words[i]);
  }
  const auto write = [&](int i, const auto& factors) {
    float x[kCount];
    uint32_t numbers[4];
    const bool special = decode<kind>(words[i], factors, p.e5m2, x);
    round_all<T>(x, special, numbers);
    auto* place = to + i * cols;
    if (kWhole || (wide_out && valid == kCount)) {
      store_words(place, numbers);
      return;
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (k < valid) place[k] = number_of<T>(numbers, k);
    }
  };
  if constexpr (kColumns) {
    ManyFactors<kCount> factors;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      factors.factor[k] = e8m0_block_factor(kWhole || k < valid ? scales[row / 32 * cols + col + k] : 0);
      factors.all_finite &= finite(factors.factor[k]);
    }
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (!kWhole && i >= rows) break;
      write(i, factors);
    }
  } else if constexpr (kind == Kind::kTiles || kind == Kind::kTensor) {
    const OneFactor factor(factor_of<kind>(load_scale<kind>(scales, row, col, cols), amax, p));
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (!kWhole && i >= rows) break;
      write(i, factor);
    }
  } else {
    uint32_t scale[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (!kWhole && i >= rows) break;
      scale[i] = load_scale<kind>(scales, row + i, col, cols);
    }
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (!kWhole && i >= rows) break;
      write(i, OneFactor(factor_of<kind>(scale[i], amax, p)));
    }
  }
}

template <class T, Kind kind, bool kColumns>
__device__ __forceinline__ void flat_tile(const DequantizeJob& job, const Parameters& p, uint32_t tile) {
  const int64_t rows = kColumns ? job.cols : job.rows, cols = kColumns ? job.rows : job.cols;
  const Place at(job, tile, rows, cols, kFlatRows, 32 * kWidth<T>);
  const int64_t row = at.row + threadIdx.x / 32 * kRowsPerThread, col = at.col + threadIdx.x % 32 * kWidth<T>;
  const int64_t end = min(rows, kColumns ? rows : job.rows_kept - at.matrix * rows);
  const int valid = static_cast<int>(min(int64_t{kWidth<T>}, cols - col));
  const int left = static_cast<int>(min(int64_t{kRowsPerThread}, end - row));
  if (valid <= 0 || left <= 0) return;

  constexpr int kBytes = kCodeBytes<kind, kWidth<T>>;
  const uint8_t* codes = job.codes + at.matrix * job.codes_stride;
  const uint8_t* scales = job.scales + at.matrix * job.scales_stride;
  auto* out = static_cast<typename T::Storage*>(job.x) + at.matrix * job.x_stride;
  const bool wide = (kFp4<kind> ? ceil_div(cols, 2) : cols) % kBytes == 0 && aligned(codes, kBytes);
  const bool wide_out = cols * T::kBytes % 16 == 0 && aligned(out, 16);
  const float amax = amax_of<kind>(job, at.matrix);
  if (wide && wide_out && valid == kWidth<T> && left == kRowsPerThread) {
    flat_part<T, kind, kColumns, true>(job, p, codes, scales, out, amax, row, col, cols, valid, left, true, true);
  } else {
    flat_part<T, kind, kColumns, false>(job, p, codes, scales, out, amax, row, col, cols, valid, left, wide, wide_out);
  }
}

// ---- with a transposition -----------------------------------------------------------------------------------------

// Codes R x C to values C x R, 64 x 64 of them a block. A thread reads 8 codes of four neighbouring rows, and writes 16
// bytes of a column at a time.
template <class T, Kind kind>
struct TurnedTile {
  static constexpr int kBytes = kCodeBytes<kind, 8>;

  const uint8_t* codes;  // of the thread's first code
  const uint8_t* scales;
  int64_t pitch, scales_pitch;
  typename T::Storage* out;  // of the values of the tile's first row and column
  int64_t out_pitch;
  float amax;
  bool wide, wide_out;

  // Its codes, so many rows and columns of them, as values, into shared memory.
  template <bool kWhole>
  __device__ __forceinline__ void read(const Parameters& p, int rows, int cols, uint32_t* shared) const {
    const int lane = threadIdx.x % 32, r = threadIdx.x / 32 * 16 + lane / 8 * 4, c = lane % 8 * 8;
    const int valid = kWhole ? 8 : max(0, min(8, cols - c));
    uint32_t words[4][kBytes / 4];
    uint32_t scale[4] = {};
    constexpr bool kOneScale = kind == Kind::kTiles || kind == Kind::kTensor;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool there = kWhole || (r + i < rows && valid > 0);
      load_codes<kBytes, kWhole>(codes + i * pitch, !there ? 0 : kFp4<kind> ? (valid + 1) / 2 : valid, wide, words[i]);
      if (kind != Kind::kTensor && there && (!kOneScale || i == 0)) scale[i] = scales[kOneScale ? 0 : i * scales_pitch];
    }
    const OneFactor one(factor_of<kind>(scale[0], amax, p));
    uint32_t numbers[4][8 * T::kBytes / 4];  // of a row
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x[8];
      const bool special =
          decode<kind>(words[i], kOneScale ? one : OneFactor(factor_of<kind>(scale[i], amax, p)), p.e5m2, x);
#pragma unroll
      for (int k = 0; k < 8; k += kWidth<T>) {
        uint32_t some[4];
        round_all<T>(reinterpret_cast<const float(&)[kWidth<T>]>(x[k]), special, some);
#pragma unroll
        for (int w = 0; w < 4; ++w) numbers[i][k * T::kBytes / 4 + w] = some[w];
      }
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      uint32_t* to = shared + tile_offset(c + k, r) * T::kBytes / 4;
      if constexpr (T::kBytes == 4) {
        *reinterpret_cast<uint4*>(to) = make_uint4(numbers[0][k], numbers[1][k], numbers[2][k], numbers[3][k]);
      } else {
        const uint32_t pick = k % 2 ? 0x7632 : 0x5410;
        *reinterpret_cast<uint2*>(to) = make_uint2(__byte_perm(numbers[0][k / 2], numbers[1][k / 2], pick),
                                                   __byte_perm(numbers[2][k / 2], numbers[3][k / 2], pick));
      }
    }
  }

  template <bool kWhole>
  __device__ __forceinline__ void write(int rows, int cols, const uint32_t* shared) const {
    constexpr int kCount = kWidth<T>, kAcross = kTile / kCount, kTurns = kTile * kAcross / kThreads;
    const int r = threadIdx.x % kAcross * kCount;
    const int valid = kWhole ? kCount : min(kCount, rows - r);
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int c = i * (kTile / kTurns) + threadIdx.x / kAcross;
      if (!kWhole && (c >= cols || valid <= 0)) continue;
      const uint4 words = *reinterpret_cast<const uint4*>(shared + tile_offset(c, r) * T::kBytes / 4);
      const uint32_t numbers[4] = {words.x, words.y, words.z, words.w};
      auto* to = out + c * out_pitch + r;
      if (kWhole || (wide_out && valid == kCount)) {
        store_words(to, numbers);
      } else {
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          if (k < valid) to[k] = number_of<T>(numbers, k);
        }
      }
    }
  }
};

template <class T, Kind kind>
__device__ __forceinline__ void turned_tile(const DequantizeJob& job, const Parameters& p, uint32_t index,
                                             uint32_t* shared) {
  constexpr int kBlock = kind == Kind::kExponents ? 32 : 16;
  const Place at(job, index, job.rows, job.cols, kTile, kTile);
  const int lane = threadIdx.x % 32;
  const int64_t row = at.row + threadIdx.x / 32 * 16 + lane / 8 * 4, col = at.col + lane % 8 * 8;
  TurnedTile<T, kind> turned;
  const uint8_t* first = job.codes + at.matrix * job.codes_stride;
  turned.pitch = kFp4<kind> ? ceil_div(job.cols, 2) : job.cols;
  turned.codes = first + row * turned.pitch + (kFp4<kind> ? col / 2 : col);
  turned.wide = turned.pitch % turned.kBytes == 0 && aligned(first, turned.kBytes);
  turned.scales_pitch = ceil_div(job.cols, kBlock);
  turned.scales = job.scales + at.matrix * job.scales_stride +
                 (kind == Kind::kTiles ? row / 16 : row) * turned.scales_pitch + col / kBlock;
  auto* values = static_cast<typename T::Storage*>(job.x) + at.matrix * job.x_stride;
  turned.out_pitch = job.rows;
  turned.out = values + at.col * job.rows + at.row;
  turned.wide_out = job.rows * T::kBytes % 16 == 0 && aligned(values, 16);
  turned.amax = amax_of<kind>(job, at.matrix);

  const int rows = static_cast<int>(min(int64_t{kTile}, job.rows - at.row));
  const int cols = static_cast<int>(min(int64_t{kTile}, job.cols - at.col));
  if (turned.wide && turned.wide_out && rows == kTile && cols == kTile) {
    turned.template read<true>(p, rows, cols, shared);
    __syncthreads();
    turned.template write<true>(rows, cols, shared);
  } else {
    turned.template read<false>(p, rows, cols, shared);
    __syncthreads();
    turned.template write<false>(rows, cols, shared);
  }
}

// ---- kernels ------------------------------------------------------------------------------------------------------

// `kTurned`: all jobs' values are transposed; otherwise those of none.
template <class T, Kind kind, bool kTurned>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const __grid_constant__ Table<DequantizeJob, kJobs> table, const Parameters p) {
  extern __shared__ __align__(16) uint32_t shared[];
  const int index = table.find(blockIdx.x);
  const DequantizeJob& job = table.jobs[index];
  const uint32_t tile = blockIdx.x - table.first_tile[index];
  if constexpr (kTurned) {
    turned_tile<T, kind>(job, p, tile, shared);
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

template <class T>
int64_t tiles_of(const DequantizeJob& job) {
  if (job.layout == Layout::kColumnsTurned) {
    return job.count * ceil_div(job.rows, kTile) * ceil_div(job.cols, kTile);
  }
  const bool columns = job.layout == Layout::kColumns;
  const int64_t rows = columns ? job.cols : job.rows, cols = columns ? job.rows : job.cols;
  return job.count * ceil_div(rows, kFlatRows) * ceil_div(cols, 32 * kWidth<T>);
}

template <class T, Kind kind, bool kTurned>
const char* launch(const std::vector<DequantizeJob>& jobs, const Parameters& p, cudaStream_t stream) {
  std::vector<DequantizeJob> chosen;
  for (const DequantizeJob& job : jobs) {
    if (job.dtype == T::kDType && (job.layout == Layout::kColumnsTurned) == kTurned) chosen.push_back(job);
  }
  constexpr int kShared = kTurned ? kTileElements * T::kBytes : 0;
  Table<DequantizeJob, kJobs> table;
  return launch_all(chosen, &tiles_of<T>, table, [&](const Table<DequantizeJob, kJobs>& full, unsigned blocks) {
    dequantize_kernel<T, kind, kTurned><<<blocks, kThreads, kShared, stream>>>(full, p);
  });
}

// One launch if all jobs have one dtype, and all are transposed or none.
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
