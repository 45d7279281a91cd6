// SwiGLU and its gradient as FP8 codes: reads gate, up and the gradient of hidden, and stores neither hidden nor the
// gradient of gate and up.
//
// A block takes a tile of 128 rows x 128 hidden features. A thread takes 8 features of 4 rows at a time: one 16-byte
// load of 16-bit numbers per row and array. Lines of transposed codes are assembled in shared memory.
#include "finite_max.cuh"
#include "gtp/cuda.h"
#include "quantize_tile.cuh"

namespace gtp::cuda {
namespace {

constexpr int kSide = 128;
constexpr int kThreads = 256;
constexpr int kRows = 4, kCols = 8;                              // per thread at a time
constexpr int kLanes = kSide / kCols;                            // threads per row
constexpr int kTurns = kSide * kSide / (kThreads * kRows * kCols);
// The number of blocks per SM for which registers are limited.
template <class T>
constexpr int kResident = T::kBytes == 4 ? 2 : 3;

// A thread's place in the tile of its block.
template <class T>
struct Tile {
  int64_t row;     // of the tile
  int64_t gate;    // column of the thread's first feature in gate_up; that of up is `width` further
  int64_t hidden;  // column of the thread's first feature in hidden
  int rows, cols;  // of the matrix from the tile on
  bool wide;       // every line of 8 numbers is aligned to 16 bytes, and every line of their codes to 8 bytes

  __device__ __forceinline__ Tile(const SwigluJob& job, uint32_t across) {
    const uint32_t down = blockIdx.x / across, rest = blockIdx.x - down * across;
    const uint32_t each = across / static_cast<uint32_t>(job.parts), part = rest / each;
    const int64_t col = int64_t{rest - part * each} * kSide;
    row = int64_t{down} * kSide;
    gate = 2 * part * job.width + col + lane() * kCols;
    hidden = part * job.width + col + lane() * kCols;
    rows = static_cast<int>(min(int64_t{kSide}, job.rows - row));
    cols = static_cast<int>(min(int64_t{kSide}, job.width - col));
    wide = job.width % kCols == 0 && aligned(job.gate_up, 16) && aligned(job.gradient, 16) &&
           aligned(job.row_codes, 8) && (job.gradient || aligned(job.hidden_codes, 8));
  }

  __device__ __forceinline__ bool whole() const { return wide && rows == kSide && cols == kSide; }

  // The number of the thread's features inside the matrix, for a row of the tile.
  __device__ __forceinline__ int valid(int at) const {
    return at < rows ? max(0, min(kCols, cols - lane() * kCols)) : 0;
  }

  __device__ __forceinline__ static int lane() { return threadIdx.x % kLanes; }
  // The number of the thread's group of `kRows` rows.
  __device__ __forceinline__ static int group(int turn) { return turn * (kThreads / kLanes) + threadIdx.x / kLanes; }
};

// ---- in -----------------------------------------------------------------------------------------------------------

// Eight numbers of a row, as they are stored.
template <class T>
struct Eight {
  static constexpr int kWords = kCols * T::kBytes / 4;
  uint32_t words[kWords];

  __device__ __forceinline__ float operator[](int i) const { return value_of<T>(words, i); }

  // Loads `valid` numbers, and sets the rest to 0.
  template <bool kWhole>
  __device__ __forceinline__ void load(const void* from, int64_t at, int valid, bool wide) {
    const auto* x = static_cast<const typename T::Storage*>(from) + at;
    if (kWhole || (wide && valid == kCols)) {
#pragma unroll
      for (int w = 0; w < kWords; w += 4) {
        const uint4 chunk = __ldcs(reinterpret_cast<const uint4*>(x) + w / 4);
        words[w] = chunk.x;
        words[w + 1] = chunk.y;
        words[w + 2] = chunk.z;
        words[w + 3] = chunk.w;
      }
      return;
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      words[w] = 0;
#pragma unroll
      for (int i = 0; i < 4 / T::kBytes; ++i) {
        if (w * 4 / T::kBytes + i < valid) words[w] |= bits(x[w * 4 / T::kBytes + i]) << (16 * i);
      }
    }
  }

  // Rounds numbers to the dtype.
  __device__ __forceinline__ void round(const float (&x)[kCols]) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if constexpr (T::kBytes == 4) {
        words[w] = __float_as_uint(x[w]);
      } else {
        words[w] = narrow_x2<T>(x[2 * w], x[2 * w + 1]);
      }
    }
  }

 private:
  __device__ __forceinline__ static uint32_t bits(float x) { return __float_as_uint(x); }
  __device__ __forceinline__ static uint32_t bits(uint16_t x) { return x; }
};

// The operands of a thread's group of rows.
template <class T, bool kBackward>
struct Operands {
  Eight<T> gate[kRows], up[kRows], gradient[kBackward ? kRows : 1];

  template <bool kWhole>
  __device__ __forceinline__ void load(const SwigluJob& job, const Tile<T>& tile, int turn) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int at = Tile<T>::group(turn) * kRows + r, valid = kWhole ? kCols : tile.valid(at);
      const int64_t row = tile.row + at, first = row * 2 * job.parts * job.width + tile.gate;
      gate[r].template load<kWhole>(job.gate_up, first, valid, tile.wide);
      up[r].template load<kWhole>(job.gate_up, first + job.width, valid, tile.wide);
      if constexpr (kBackward) {
        gradient[r].template load<kWhole>(job.gradient, row * job.parts * job.width + tile.hidden, valid, tile.wide);
      }
    }
  }
};

// ---- SwiGLU -------------------------------------------------------------------------------------------------------

// Returns 1 / (1 + exp(-x)). For 16-bit numbers, the hardware's approximations are accurate enough.
template <class T>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (T::kBytes == 4) return 1.0f / (1.0f + expf(-x));
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(1.0f + __expf(-x)));
  return out;
}

template <class T>
__device__ __forceinline__ Eight<T> hidden_of(const Eight<T>& gate, const Eight<T>& up) {
  float x[kCols];
#pragma unroll
  for (int i = 0; i < kCols; ++i) x[i] = gate[i] * sigmoid<T>(gate[i]) * up[i];
  Eight<T> out;
  out.round(x);
  return out;
}

// Returns hidden, and the gradients of gate and up.
template <class T>
__device__ __forceinline__ void backward_of(const Eight<T>& gate, const Eight<T>& up, const Eight<T>& gradient,
                                            Eight<T> (&out)[3]) {
  float hidden[kCols], of_gate[kCols], of_up[kCols];
#pragma unroll
  for (int i = 0; i < kCols; ++i) {
    const float s = sigmoid<T>(gate[i]), silu = gate[i] * s, of_silu = gradient[i] * up[i];
    hidden[i] = silu * up[i];
    of_gate[i] = __fmaf_rn(of_silu * gate[i], s * (1.0f - s), of_silu * s);
    of_up[i] = gradient[i] * silu;
  }
  out[0].round(hidden);
  out[1].round(of_gate);
  out[2].round(of_up);
}

// ---- amax ---------------------------------------------------------------------------------------------------------

template <class T, bool kBackward, bool kWhole>
__device__ __forceinline__ uint32_t tile_max(const SwigluJob& job, const Tile<T>& tile) {
  FiniteMax<T> top;
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    Operands<T, kBackward> x;
    x.template load<kWhole>(job, tile, turn);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if constexpr (kBackward) {
        Eight<T> out[3];
        backward_of(x.gate[r], x.up[r], x.gradient[r], out);
#pragma unroll
        for (const uint32_t word : out[1].words) top.add(word);
#pragma unroll
        for (const uint32_t word : out[2].words) top.add(word);
      } else {
        const Eight<T> hidden = hidden_of(x.gate[r], x.up[r]);
#pragma unroll
        for (const uint32_t word : hidden.words) top.add(word);
      }
    }
  }
  return top.bits();
}

template <class T, bool kBackward>
__global__ void __launch_bounds__(kThreads, kResident<T>)
    swiglu_amax_kernel(const __grid_constant__ SwigluJob job, uint32_t across, uint32_t* amax) {
  const Tile<T> tile(job, across);
  raise_block<kThreads>(tile.whole() ? tile_max<T, kBackward, true>(job, tile) : tile_max<T, kBackward, false>(job, tile),
                        amax);
}

// ---- codes --------------------------------------------------------------------------------------------------------

struct Encoding {
  float factor;
  bool e5m2;

  __device__ __forceinline__ explicit Encoding(const TensorCodes& codes)
      : factor(tensor_scale(codes.largest, *codes.amax)), e5m2(codes.e5m2) {}
};

// Returns the codes of eight numbers. Those that are not finite get the code NaN.
template <class T>
__device__ __forceinline__ uint2 codes_of(const Eight<T>& x, const Encoding& to) {
  float values[kCols];
  uint32_t top = x.words[0];
#pragma unroll
  for (int i = 0; i < kCols; ++i) values[i] = x[i];
#pragma unroll
  for (int w = 1; w < Eight<T>::kWords; ++w) top = larger_magnitudes<T>(top, x.words[w]);
  uint2 codes = encode_fp8_x8(values, to.factor, to.e5m2);
  if (widen_magnitude<T>(fold_halves<T>(magnitudes<T>(top))) < kInfinity) return codes;
#pragma unroll
  for (int i = 0; i < kCols; ++i) {
    uint32_t& word = i < 4 ? codes.x : codes.y;
    if ((__float_as_uint(values[i]) & kMagnitude) >= kInfinity) {
      word = (word & ~(0xFFu << (i % 4 * 8))) | uint32_t{kNanCode} << (i % 4 * 8);
    }
  }
  return codes;
}

template <bool kWhole>
__device__ __forceinline__ void store_eight(uint8_t* out, uint2 codes, int valid, bool wide) {
  const uint32_t words[2] = {codes.x, codes.y};
  store<kWhole, false>(out, words, valid, wide);
}

template <class T, bool kWhole>
__device__ __forceinline__ void write_hidden(const SwigluJob& job, const Tile<T>& tile) {
  const Encoding encoding(job.of_hidden);
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    Operands<T, false> x;
    x.template load<kWhole>(job, tile, turn);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int at = Tile<T>::group(turn) * kRows + r;
      const uint2 codes = codes_of(hidden_of(x.gate[r], x.up[r]), encoding);
      store_eight<kWhole>(job.hidden_codes + (tile.row + at) * job.parts * job.width + tile.hidden, codes,
                          tile.valid(at), tile.wide);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, kResident<T>)
    swiglu_kernel(const __grid_constant__ SwigluJob job, uint32_t across) {
  const Tile<T> tile(job, across);
  if (tile.whole()) {
    write_hidden<T, true>(job, tile);
  } else {
    write_hidden<T, false>(job, tile);
  }
}

// Lines of transposed codes: features of hidden, of the gate's gradient, and of up's. The place of a word, four rows, is
// permuted within its line, so that neither groups of rows nor lines conflict.
struct Lines {
  uint4 chunks[3][kSide][kSide / 16];

  // Stores the codes of a thread's eight features of four rows, given the codes of each row.
  __device__ __forceinline__ void put(int array, int lane, int group, const uint2 (&rows)[kRows]) {
    uint32_t left[kRows] = {rows[0].x, rows[1].x, rows[2].x, rows[3].x};
    uint32_t right[kRows] = {rows[0].y, rows[1].y, rows[2].y, rows[3].y};
    turn(left);
    turn(right);
    auto* words = reinterpret_cast<uint32_t*>(chunks[array][lane * kCols]) + (group ^ lane * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i * kSide / 4] = left[i];
      words[(i + 4) * kSide / 4] = right[i];
    }
  }

  // Returns the codes of 16 rows.
  __device__ __forceinline__ void get(int array, int line, int chunk, uint32_t (&words)[4]) const {
    const int lane = line / kCols;
    const uint4 found = chunks[array][line][chunk ^ lane / 2];
    const bool swapped = lane % 2;
    words[0] = swapped ? found.z : found.x;
    words[1] = swapped ? found.w : found.y;
    words[2] = swapped ? found.x : found.z;
    words[3] = swapped ? found.y : found.w;
  }
};

// Writes the row codes of the gradient, and collects the lines of all transposed codes.
template <class T, bool kWhole>
__device__ __forceinline__ void write_rows(const SwigluJob& job, const Tile<T>& tile, Lines& lines) {
  const Encoding of_hidden(job.of_hidden), of_gradient(job.of_gradient);
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    Operands<T, true> x;
    x.template load<kWhole>(job, tile, turn);
    uint2 codes[3][kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Eight<T> out[3];
      backward_of(x.gate[r], x.up[r], x.gradient[r], out);
      codes[0][r] = codes_of(out[0], of_hidden);
      codes[1][r] = codes_of(out[1], of_gradient);
      codes[2][r] = codes_of(out[2], of_gradient);
      const int at = Tile<T>::group(turn) * kRows + r, valid = tile.valid(at);
      uint8_t* row = job.row_codes + (tile.row + at) * 2 * job.parts * job.width + tile.gate;
      store_eight<kWhole>(row, codes[1][r], valid, tile.wide);
      store_eight<kWhole>(row + job.width, codes[2][r], valid, tile.wide);
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) lines.put(i, Tile<T>::lane(), Tile<T>::group(turn), codes[i]);
  }
}

template <class T, bool kWhole>
__device__ __forceinline__ void write_columns(const SwigluJob& job, const Tile<T>& tile, const Lines& lines) {
  const bool wide = job.rows % 16 == 0 && aligned(job.hidden_codes, 16) && aligned(job.column_codes, 16);
  const int64_t hidden = tile.hidden - Tile<T>::lane() * kCols, gate = tile.gate - Tile<T>::lane() * kCols;
#pragma unroll
  for (int i = 0; i < 3 * kSide * kSide / 16 / kThreads; ++i) {
    constexpr int kEach = kSide * kSide / 16 / kThreads;
    const int array = i / kEach, piece = i % kEach * kThreads + threadIdx.x, line = piece / 8, chunk = piece % 8;
    const int valid = tile.rows - chunk * 16;
    if (!kWhole && (line >= tile.cols || valid <= 0)) continue;
    uint8_t* out = array == 0 ? job.hidden_codes + (hidden + line) * job.rows
                              : job.column_codes + (gate + line + (array == 2 ? job.width : 0)) * job.rows;
    uint32_t words[4];
    lines.get(array, line, chunk, words);
    store<false, false>(out + tile.row + chunk * 16, words, min(valid, 16), wide);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, kResident<T>)
    swiglu_backward_kernel(const __grid_constant__ SwigluJob job, uint32_t across) {
  __shared__ Lines lines;
  const Tile<T> tile(job, across);
  if (tile.whole()) {
    write_rows<T, true>(job, tile, lines);
    __syncthreads();
    write_columns<T, true>(job, tile, lines);
  } else {
    write_rows<T, false>(job, tile, lines);
    __syncthreads();
    write_columns<T, false>(job, tile, lines);
  }
}

// ---- launches -----------------------------------------------------------------------------------------------------

// Calls `launch(T{}, blocks, across)` for the job's dtype, with the number of tiles, and of those side by side.
template <class Launch>
const char* launch_tiles(const SwigluJob& job, const Launch& launch) {
  const int64_t across = job.parts * ceil_div(job.width, kSide), tiles = across * ceil_div(job.rows, kSide);
  if (tiles == 0) return nullptr;
  if (tiles > INT32_MAX) return "an array has more tiles than a CUDA grid has blocks";
  const auto blocks = static_cast<unsigned>(tiles), side_by_side = static_cast<unsigned>(across);
  switch (job.dtype) {
    case DType::kF32: launch(F32{}, blocks, side_by_side); break;
    case DType::kBF16: launch(BF16{}, blocks, side_by_side); break;
    default: launch(F16{}, blocks, side_by_side); break;
  }
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

const char* swiglu_amax(const SwigluJob& job, float* amax, Stream opaque) {
  const auto stream = static_cast<cudaStream_t>(opaque);
  const cudaError_t error = cudaMemsetAsync(amax, 0, sizeof(float), stream);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  auto* slot = reinterpret_cast<uint32_t*>(amax);
  return launch_tiles(job, [&](auto dtype, unsigned blocks, unsigned across) {
    using T = decltype(dtype);
    if (job.gradient) {
      swiglu_amax_kernel<T, true><<<blocks, kThreads, 0, stream>>>(job, across, slot);
    } else {
      swiglu_amax_kernel<T, false><<<blocks, kThreads, 0, stream>>>(job, across, slot);
    }
  });
}

const char* swiglu_quantize(const SwigluJob& job, Stream opaque) {
  const auto stream = static_cast<cudaStream_t>(opaque);
  return launch_tiles(job, [&](auto dtype, unsigned blocks, unsigned across) {
    using T = decltype(dtype);
    if (job.gradient) {
      swiglu_backward_kernel<T><<<blocks, kThreads, 0, stream>>>(job, across);
    } else {
      swiglu_kernel<T><<<blocks, kThreads, 0, stream>>>(job, across);
    }
  });
}

}  // namespace gtp::cuda
