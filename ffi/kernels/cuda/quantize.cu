// Quantization, tile by tile: one pass over the input for the row copy, the column copy, or both.
//
// A block of 128 threads takes a tile of 64 rows x 64 columns. A warp loads 16 of its rows, a thread 8 columns of 4 of
// them, which stay in registers for the row copy. The column copy reads the tile again from shared memory, so that a
// thread holds 16 rows of two columns; only the column copy that is not transposed (MXFP8) is made from the registers
// too.
#include <algorithm>

#include "device.cuh"
#include "gtp/cuda.h"
#include "launch.cuh"

namespace gtp::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRowsPerThread = 4;

struct Parameters {
  const uint32_t* key;
  float largest;  // of the format, for FP8
  float inverse_max;
  bool hadamard;
  bool e5m2;
};

// A matrix of the job, and the tile's first row and column.
struct Place {
  int64_t matrix, row, col;
};

// ---- in and out ---------------------------------------------------------------------------------------------------

// Eight numbers of a row as they are stored.
template <class T>
struct Eight {
  static constexpr int kWords = 8 * T::kBytes / 4;
  uint32_t words[kWords];

  __device__ __forceinline__ float operator[](int i) const { return value_of<T>(words, i); }

  __device__ __forceinline__ uint32_t max() const {
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) top = max_magnitude<T>(top, words[i]);
    return fold_halves<T>(top);
  }

  __device__ __forceinline__ void floats(float (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = (*this)[i];
  }
};

// `valid` of them; the rest is zero.
template <class T>
__device__ __forceinline__ Eight<T> load_eight(const typename T::Storage* x, int valid, bool wide) {
  Eight<T> eight;
  if (wide) {
#pragma unroll
    for (int i = 0; i < Eight<T>::kWords / 4; ++i) {
      const uint4 words = valid > 0 ? __ldcs(reinterpret_cast<const uint4*>(x) + i) : make_uint4(0, 0, 0, 0);
      eight.words[4 * i] = words.x;
      eight.words[4 * i + 1] = words.y;
      eight.words[4 * i + 2] = words.z;
      eight.words[4 * i + 3] = words.w;
    }
    return eight;
  }
#pragma unroll
  for (int i = 0; i < Eight<T>::kWords; ++i) {
    if constexpr (T::kBytes == 4) {
      eight.words[i] = i < valid ? __float_as_uint(x[i]) : 0u;
    } else {
      const uint32_t low = 2 * i < valid ? x[2 * i] : 0u, high = 2 * i + 1 < valid ? x[2 * i + 1] : 0u;
      eight.words[i] = low | high << 16;
    }
  }
  return eight;
}

// The first `bytes` of up to 16 bytes, in one store if `wide`.
template <int kWords>
__device__ __forceinline__ void store(uint8_t* out, const uint32_t (&words)[kWords], int bytes, bool wide) {
  if (wide && bytes == 4 * kWords) {
    if constexpr (kWords == 1) *reinterpret_cast<uint32_t*>(out) = words[0];
    if constexpr (kWords == 2) *reinterpret_cast<uint2*>(out) = make_uint2(words[0], words[1]);
    if constexpr (kWords == 4) *reinterpret_cast<uint4*>(out) = make_uint4(words[0], words[1], words[2], words[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4 * kWords; ++i) {
    if (i < bytes) out[i] = static_cast<uint8_t>(words[i / 4] >> (i % 4 * 8));
  }
}

// ---- a block's scale, and codes of eight numbers ------------------------------------------------------------------

struct Scaled {
  uint8_t code;
  float factor;
  bool finite;
};

template <Kind kind>
__device__ __forceinline__ Scaled scale_of(uint32_t top_bits, const Nvfp4Scale& tensor, const Parameters& p) {
  const bool finite = top_bits < kInfinity;
  const float top = __uint_as_float(finite ? top_bits : 0u);
  if constexpr (kind == Kind::kExponents) {
    const BlockScale scale = e8m0_block_scale(top, p.inverse_max);
    return {finite ? scale.code : kNanScale8, scale.factor, finite};
  } else {
    const BlockScale scale = fast_e4m3_block_scale(top, tensor);
    return {finite ? scale.code : kNanCode, scale.factor, finite};
  }
}

__device__ __forceinline__ uint32_t stochastic_x8(const float (&x)[8], float factor, const RandomWords& random,
                                                  int first) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    // the index of an octet must be known when compiling, or the words go to local memory
    const uint32_t octet = first == 0 ? random.octet(i) : random.octet(8 + i);
    const uint32_t code = encode_e2m1_stochastic(fabsf(x[i]) * factor, octet) | (__float_as_uint(x[i]) >> 28 & 8u);
    word |= code << (4 * i);
  }
  return word;
}

// FP8 codes of eight numbers without a block: what is not finite becomes NaN by itself.
__device__ __forceinline__ uint2 tensor_x8(const float (&x)[8], float factor, bool e5m2) {
  uint2 words = encode_fp8_x8(x, factor, e5m2);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if ((__float_as_uint(x[i]) & kMagnitude) < kInfinity) continue;
    uint32_t& word = i < 4 ? words.x : words.y;
    word = (word & ~(0xFFu << (i % 4 * 8))) | static_cast<uint32_t>(kNanCode) << (i % 4 * 8);
  }
  return words;
}

__device__ __forceinline__ Nvfp4Scale tensor_of(const Copy& copy, const QuantizeJob& job, int64_t matrix, Kind kind,
                                                const Parameters& p) {
  if (kind == Kind::kExponents) return {};
  const float amax = copy.amax[matrix / job.count_per_amax * job.amax_stride];
  if (kind == Kind::kTensor) return {tensor_scale(p.largest, amax), 0.0f};
  return nvfp4_scale(amax);
}

// ---- the row copy -------------------------------------------------------------------------------------------------

template <class T, Kind kind, bool kStochastic>
__device__ __forceinline__ void row_copy(const QuantizeJob& job, const Parameters& p, const Place& at,
                                         const Eight<T> (&x)[kRowsPerThread]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane % 8;
  const Nvfp4Scale tensor = tensor_of(job.row, job, at.matrix, kind, p);
  const int64_t col = at.col + group * 8, first_row = at.row + warp * 16;
  const int valid = static_cast<int>(min(static_cast<int64_t>(8), job.cols - col));
  const int64_t pitch = kFp4<kind> ? ceil_div(job.cols, 2) : job.cols;
  uint8_t* codes = job.row.codes + at.matrix * job.row.codes_stride;
  uint8_t* scales = job.row.scales + at.matrix * job.row.scales_stride;
  const bool wide = pitch % (kFp4<kind> ? 4 : 8) == 0 && aligned(codes, kFp4<kind> ? 4 : 8);

  Scaled tile{};
  if constexpr (kind == Kind::kTiles) {
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) top = max(top, x[i].max());
    top = shuffle_max(shuffle_max(shuffle_max(top, 1), 8), 16);
    tile = scale_of<kind>(widen_magnitude<T>(top), tensor, p);
    if (lane < 8 && group % 2 == 0 && valid > 0 && first_row < job.rows) {
      scales[first_row / 16 * ceil_div(job.cols, 16) + col / 16] = tile.code;
    }
  }
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int64_t row = first_row + i * 4 + lane / 8;
    float values[8];
    x[i].floats(values);
    Scaled block = tile;
    if constexpr (kind == Kind::kRuns || kind == Kind::kExponents) {
      uint32_t top = shuffle_max(x[i].max(), 1);
      if constexpr (kind == Kind::kExponents) top = shuffle_max(top, 2);
      block = scale_of<kind>(widen_magnitude<T>(top), tensor, p);
      constexpr int kSize = kind == Kind::kRuns ? 16 : 32;
      if (group % (kSize / 8) == 0 && valid > 0 && row < job.rows) {
        scales[row * ceil_div(job.cols, kSize) + col / kSize] = block.code;
      }
    }
    if (row >= job.rows || valid <= 0) continue;
    if constexpr (kFp4<kind>) {
      uint32_t word[1];
      if constexpr (kStochastic) {
        const uint64_t run = (at.matrix * job.rows + row) * ceil_div(job.cols, 16) + col / 16;
        word[0] = stochastic_x8(values, block.factor, random_words(run, 0, p.key[0], p.key[1]), group % 2 * 8);
      } else {
        word[0] = encode_e2m1_x8(values, block.factor);
      }
      if (!block.finite) word[0] = 0;
      store(codes + row * pitch + col / 2, word, (valid + 1) / 2, wide);
    } else {
      uint2 both;
      if constexpr (kind == Kind::kTensor) {
        both = tensor_x8(values, tensor.per_step, p.e5m2);
      } else {
        both = encode_fp8_x8(values, block.factor, p.e5m2);
        if (!block.finite) both = make_uint2(0, 0);
      }
      const uint32_t words[2] = {both.x, both.y};
      store(codes + row * pitch + col, words, valid, wide);
    }
  }
}

// ---- the column copy that stays as it is --------------------------------------------------------------------------

// Blocks of 32 rows of a column: two warps each.
template <class T>
__device__ __forceinline__ void column_copy_in_place(const QuantizeJob& job, const Parameters& p, const Place& at,
                                                     const Eight<T> (&x)[kRowsPerThread], uint32_t* shared) {
  constexpr int kSize = 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane % 8;
  uint32_t(*tops)[kTile] = reinterpret_cast<uint32_t(*)[kTile]>(shared);                   // of a warp's rows
  float(*factors)[kTile] = reinterpret_cast<float(*)[kTile]>(shared + kThreads / 32 * kTile);  // NaN: not finite

  uint32_t words[Eight<T>::kWords];
#pragma unroll
  for (int i = 0; i < Eight<T>::kWords; ++i) {
    uint32_t top = 0;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) top = max_magnitude<T>(top, x[r].words[i]);
    top = max_magnitude<T>(top, __shfl_xor_sync(0xFFFFFFFFu, top, 8));
    words[i] = max_magnitude<T>(top, __shfl_xor_sync(0xFFFFFFFFu, top, 16));
  }
  if (lane < 8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) tops[warp][group * 8 + i] = __float_as_uint(value_of<T>(words, i));
  }
  __syncthreads();
  {
    const int block = threadIdx.x / kTile, k = threadIdx.x % kTile;
    const Scaled scale = scale_of<Kind::kExponents>(max(tops[2 * block][k], tops[2 * block + 1][k]), {}, p);
    factors[block][k] = scale.finite ? scale.factor : __uint_as_float(kNan);
    const int64_t row = at.row + block * kSize, col = at.col + k;
    if (row < job.rows && col < job.cols) {
      uint8_t* scales = job.column.scales + at.matrix * job.column.scales_stride;
      scales[row / kSize * job.cols + col] = scale.code;
    }
  }
  __syncthreads();
  const int64_t col = at.col + group * 8;
  const int valid = static_cast<int>(min(static_cast<int64_t>(8), job.cols - col));
  uint8_t* codes = job.column.codes + at.matrix * job.column.codes_stride;
  const bool wide = job.cols % 8 == 0 && aligned(codes, 8);
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const int64_t row = at.row + warp * 16 + r * 4 + lane / 8;
    if (row >= job.rows || valid <= 0) continue;
    uint32_t out[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float low = factors[warp / 2][group * 8 + i], high = factors[warp / 2][group * 8 + i + 1];
      uint32_t pair = encode_fp8_x2(x[r][i] * low, x[r][i + 1] * high, p.e5m2);
      if (isnan(low)) pair &= 0xFF00u;
      if (isnan(high)) pair &= 0x00FFu;
      out[i / 4] |= pair << (i % 4 * 8);
    }
    store(codes + row * job.cols + col, out, valid, wide);
  }
}

// ---- the transposed column copy -----------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ void store_tile(const Eight<T> (&x)[kRowsPerThread], uint32_t* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane % 8;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    uint32_t* out = shared + tile_offset(warp * 16 + i * 4 + lane / 8, group * 8) * T::kBytes / 4;
#pragma unroll
    for (int w = 0; w < Eight<T>::kWords; w += 4) {
      *reinterpret_cast<uint4*>(out + w) =
          make_uint4(x[i].words[w], x[i].words[w + 1], x[i].words[w + 2], x[i].words[w + 3]);
    }
  }
}

// Sixteen rows of two neighbouring columns, as floats.
template <class T>
struct TwoColumns {
  float x[2][kRun];
};

template <class T>
__device__ __forceinline__ TwoColumns<T> load_columns(const uint32_t* shared, int run, int pair) {
  TwoColumns<T> columns;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const uint32_t* in = shared + tile_offset(run * kRun + i, pair * 2) * T::kBytes / 4;
    if constexpr (T::kBytes == 4) {
      const uint2 words = *reinterpret_cast<const uint2*>(in);
      columns.x[0][i] = __uint_as_float(words.x);
      columns.x[1][i] = __uint_as_float(words.y);
    } else {
      const uint32_t word = *in;
      columns.x[0][i] = value_of<T>(&word, 0);
      columns.x[1][i] = value_of<T>(&word, 1);
    }
  }
  return columns;
}

__device__ __forceinline__ uint32_t column_max(const float (&x)[kRun]) {
  uint32_t top = 0;
#pragma unroll
  for (int i = 0; i < kRun; ++i) top = max(top, __float_as_uint(x[i]) & kMagnitude);
  return top;
}

template <class T, Kind kind, bool kExtras>
__device__ __forceinline__ void column_copy_transposed(const QuantizeJob& job, const Parameters& p, const Place& at,
                                                       const uint32_t* shared) {
  // a warp takes 16 columns, so that it holds whole 16 x 16 blocks; four lanes write one column's 64 codes
  const int lane = threadIdx.x % 32, run = lane % 4, pair = threadIdx.x / 32 * 8 + lane / 4;
  const bool hadamard = kExtras && kind == Kind::kRuns && p.hadamard;
  const int64_t length = hadamard ? ceil_div(job.rows, kRun) * kRun : job.rows;
  const int64_t row = at.row + run * kRun;
  const int valid = static_cast<int>(max(static_cast<int64_t>(0), min(static_cast<int64_t>(kRun), length - row)));
  const Nvfp4Scale tensor = tensor_of(job.column, job, at.matrix, kind, p);
  const int64_t pitch = kFp4<kind> ? ceil_div(length, 2) : length;
  uint8_t* codes = job.column.codes + at.matrix * job.column.codes_stride;
  uint8_t* scales = job.column.scales + at.matrix * job.column.scales_stride;
  const bool wide = pitch % (kFp4<kind> ? 8 : 16) == 0 && aligned(codes, kFp4<kind> ? 8 : 16);

  TwoColumns<T> columns = load_columns<T>(shared, run, pair);
  if (hadamard) {
    hadamard_run(columns.x[0]);
    hadamard_run(columns.x[1]);
  }
  Scaled tile{};
  if constexpr (kind == Kind::kTiles) {
    uint32_t top = max(column_max(columns.x[0]), column_max(columns.x[1]));
    top = shuffle_max(shuffle_max(shuffle_max(top, 4), 8), 16);
    tile = scale_of<kind>(top, tensor, p);
    if (lane < 4 && valid > 0 && at.col + pair * 2 < job.cols) {
      scales[(at.col + pair * 2) / 16 * ceil_div(length, 16) + row / 16] = tile.code;
    }
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float(&x)[kRun] = columns.x[c];
    const int64_t col = at.col + pair * 2 + c;
    Scaled block = tile;
    if constexpr (kind == Kind::kRuns || kind == Kind::kExponents) {
      constexpr int kSize = kind == Kind::kRuns ? 16 : 32;
      uint32_t top = column_max(x);
      if constexpr (kind == Kind::kExponents) top = shuffle_max(top, 1);
      block = scale_of<kind>(top, tensor, p);
      if (run % (kSize / 16) == 0 && valid > 0 && col < job.cols) {
        scales[col * ceil_div(length, kSize) + row / kSize] = block.code;
      }
    }
    if (col >= job.cols || valid == 0) continue;
    const float(&first)[8] = reinterpret_cast<const float(&)[8]>(x[0]);
    const float(&second)[8] = reinterpret_cast<const float(&)[8]>(x[8]);
    if constexpr (kFp4<kind>) {
      uint32_t words[2];
      if (kExtras && p.key) {
        const uint64_t index = (at.matrix * job.cols + col) * ceil_div(length, kRun) + row / kRun;
        const RandomWords random = random_words(index, 1, p.key[0], p.key[1]);
        words[0] = stochastic_x8(first, block.factor, random, 0);
        words[1] = stochastic_x8(second, block.factor, random, 8);
      } else {
        words[0] = encode_e2m1_x8(first, block.factor);
        words[1] = encode_e2m1_x8(second, block.factor);
      }
      if (!block.finite) words[0] = words[1] = 0;
      store(codes + col * pitch + row / 2, words, (valid + 1) / 2, wide);
    } else {
      uint2 low, high;
      if constexpr (kind == Kind::kTensor) {
        low = tensor_x8(first, tensor.per_step, p.e5m2);
        high = tensor_x8(second, tensor.per_step, p.e5m2);
      } else {
        low = encode_fp8_x8(first, block.factor, p.e5m2);
        high = encode_fp8_x8(second, block.factor, p.e5m2);
        if (!block.finite) low = high = make_uint2(0, 0);
      }
      const uint32_t words[4] = {low.x, low.y, high.x, high.y};
      store(codes + col * pitch + row, words, valid, wide);
    }
  }
}

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
