// Dequantizes codes into transposed values.
#pragma once

#include "dequantize_tile.cuh"

namespace gtp::cuda::dequantization {

// Turns codes R x C into values C x R, one panel of 128 rows per block. A thread reads 16 bytes of codes from each of
// four neighbouring rows and decodes 8 codes of each row at a time. The values, of 64 columns in all, pass through
// shared memory and are stored 16 bytes at a time. Blocks are numbered down the codes, which is along the values, so
// that stores at about the same time are close together in memory. Numbering blocks along the codes took 10% longer
// (16-bit values; H200).
template <class T, Kind kind>
class TransposedPanel {
 public:
  static constexpr int kThreads = 256;
  static constexpr int kRows = 128;
  static constexpr int kCodes = kFp4<kind> ? 32 : 16;  // codes per row of a thread
  static constexpr int kCols = 8 * kCodes;
  static constexpr int kPartBytes = 8 * 8 * kRows * T::kBytes;  // bytes of a part: eight values per row of each thread
  static constexpr int kSharedBytes = 2 * kPartBytes;

  __device__ __forceinline__ TransposedPanel(const DequantizeJob& job, uint32_t panel) {
    const Place at(job, panel, job.rows, job.cols, kRows, kCols, true);
    const int lane = threadIdx.x % 32;
    row_ = threadIdx.x / 32 * 16 + lane / 8 * 4;
    col_ = lane % 8 * kCodes;
    const int64_t row = at.row + row_, col = at.col + col_;
    const uint8_t* first = job.codes + at.matrix * job.codes_stride;
    pitch_ = kFp4<kind> ? ceil_div(job.cols, 2) : job.cols;
    codes_ = first + row * pitch_ + (kFp4<kind> ? col / 2 : col);
    wide_ = pitch_ % 16 == 0 && aligned(first, 16);
    scales_pitch_ = ceil_div(job.cols, kBlock);
    scales_ = job.scales + at.matrix * job.scales_stride + (kind == Kind::kTiles ? row / 16 : row) * scales_pitch_ +
              col / kBlock;
    auto* values = static_cast<typename T::Storage*>(job.x) + at.matrix * job.x_stride;
    out_pitch_ = job.rows;
    out_ = values + at.col * out_pitch_ + at.row;
    wide_out_ = out_pitch_ * T::kBytes % 16 == 0 && aligned(values, 16);
    amax_ = amax_of<kind>(job, at.matrix);
    rows_ = static_cast<int>(min(int64_t{kRows}, job.rows - at.row));
    cols_ = static_cast<int>(min(int64_t{kCols}, job.cols - at.col));
  }

  __device__ __forceinline__ void write(const Parameters& p, char* shared) const {
    if (wide_ && wide_out_ && rows_ == kRows && cols_ == kCols) {
      write<true>(p, shared);
    } else {
      write<false>(p, shared);
    }
  }

 private:
  static constexpr int kBlock = kind == Kind::kExponents ? 32 : 16;
  static constexpr int kParts = kCodes / 8;
  static constexpr int kScaleRows = kind == Kind::kTensor ? 0 : kind == Kind::kTiles ? 1 : 4;
  static constexpr int kScales = kFp4<kind> ? 2 : 1;  // scales per row

  int row_, col_;        // position of the thread's first code in the panel
  const uint8_t* codes_;  // the thread's first code
  const uint8_t* scales_;
  int64_t pitch_, scales_pitch_;
  typename T::Storage* out_;  // where the values of the panel's first row and column go
  int64_t out_pitch_;
  float amax_;
  int rows_, cols_;  // size of the panel
  bool wide_, wide_out_;

  // Returns the place of 16 bytes of a line. Lines that are written together begin in different banks.
  __device__ __forceinline__ static int place(int line, int chunk) {
    return line * kRows * T::kBytes + ((chunk ^ (line >> 3 & 7)) << 4);
  }

  template <bool kWhole>
  __device__ __forceinline__ void write(const Parameters& p, char* shared) const {
    uint32_t words[4][4];
    float factors[4][kScales] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int valid = kWhole ? kCodes : row_ + i < rows_ ? max(0, min(kCodes, cols_ - col_)) : 0;
      load_codes<16, kWhole>(codes_ + i * pitch_, kFp4<kind> ? (valid + 1) / 2 : valid, wide_, words[i]);
    }
#pragma unroll
    for (int i = 0; i < (kind == Kind::kTensor ? 1 : kScaleRows); ++i) {
#pragma unroll
      for (int k = 0; k < kScales; ++k) {
        const bool there = kWhole || (row_ + i < rows_ && col_ + k * kBlock < cols_);
        const uint32_t scale = kind != Kind::kTensor && there ? scales_[i * scales_pitch_ + k] : 0;
        factors[i][k] = factor_of<kind>(scale, amax_, p);
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      char* stage = shared + part % 2 * kPartBytes;
      decode_part(p, words, factors, part, stage);
      __syncthreads();  // also waits until all threads have stored the part in the other stage
      store_part<kWhole>(part, stage);
    }
  }

  // Writes eight values of each of the thread's rows to shared memory.
  __device__ __forceinline__ void decode_part(const Parameters& p, const uint32_t (&words)[4][4],
                                              const float (&factors)[4][kScales], int part, char* stage) const {
    uint32_t numbers[4][8 * T::kBytes / 4];  // by row
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      constexpr int kWords = kCodeBytes<kind, 8> / 4;
      const float factor = factors[kScaleRows == 4 ? i : 0][kScales == 2 ? part / 2 : 0];
      float x[8];
      const bool special = decode<kind>(words[i] + part * kWords, OneFactor(factor), p.e5m2, x);
#pragma unroll
      for (int k = 0; k < 8; k += kWidth<T>) {
        uint32_t some[4];
        round_all<T>(reinterpret_cast<const float(&)[kWidth<T>]>(x[k]), special, some);
#pragma unroll
        for (int w = 0; w < 4; ++w) numbers[i][k * T::kBytes / 4 + w] = some[w];
      }
    }
    const int line = threadIdx.x % 8 * 8, bytes = row_ * T::kBytes;
    char* to = stage + place(line, bytes / 16) + bytes % 16;
#pragma unroll
    for (int k = 0; k < 8; ++k, to += kRows * T::kBytes) {
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
  __device__ __forceinline__ void store_part(int part, const char* stage) const {
    constexpr int kCount = kWidth<T>, kAcross = kRows / kCount, kAtOnce = kThreads / kAcross;
    const int chunk = threadIdx.x % kAcross, row = chunk * kCount;
    const int valid = kWhole ? kCount : min(kCount, rows_ - row);
#pragma unroll
    for (int i = 0; i < 64 / kAtOnce; ++i) {
      const int line = i * kAtOnce + threadIdx.x / kAcross, col = line / 8 * kCodes + part * 8 + line % 8;
      if (!kWhole && (col >= cols_ || valid <= 0)) continue;
      const uint4 words = *reinterpret_cast<const uint4*>(stage + place(line, chunk));
      const uint32_t numbers[4] = {words.x, words.y, words.z, words.w};
      auto* to = out_ + col * out_pitch_ + row;
      if (kWhole || (wide_out_ && valid == kCount)) {
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

}  // namespace gtp::cuda::dequantization
