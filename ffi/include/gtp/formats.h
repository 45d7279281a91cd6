// The number formats as data: the C++ version of gtp_jax/formats/_spec.py. A test compares the two.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define GTP_HD __host__ __device__ __forceinline__
#else
#define GTP_HD inline
#endif

namespace gtp {

enum class Element : int { kE2M1, kE4M3, kE5M2 };
enum class ScaleType : int { kNone, kE4M3, kE8M0 };
enum class DType : int { kF32, kBF16, kF16 };

struct Format {
  const char* name;
  Element element;
  float element_max;
  int element_bits;
  int block_rows;  // 0 without blocks
  int block_cols;
  ScaleType scale;
  float scale_max;  // 1 if it does not limit the tensor's scale
  bool has_amax;
  bool transposed_columns;

  // The value that the tensor's amax is mapped to.
  constexpr float largest() const { return element_max * scale_max; }
  constexpr int64_t code_bytes(int64_t elements) const { return (elements * element_bits + 7) / 8; }
};

// The index is the format's `code`.
inline constexpr Format kFormats[] = {
    {"NVFP4", Element::kE2M1, 6.0f, 4, 16, 16, ScaleType::kE4M3, 448.0f, true, true},
    {"NVFP4_1D", Element::kE2M1, 6.0f, 4, 1, 16, ScaleType::kE4M3, 448.0f, true, true},
    {"MXFP8", Element::kE4M3, 448.0f, 8, 1, 32, ScaleType::kE8M0, 1.0f, false, false},
    {"FP8_E4M3", Element::kE4M3, 448.0f, 8, 0, 0, ScaleType::kNone, 1.0f, true, true},
    {"FP8_E5M2", Element::kE5M2, 57344.0f, 8, 0, 0, ScaleType::kNone, 1.0f, true, true},
};
inline constexpr int kFormatCount = sizeof(kFormats) / sizeof(kFormats[0]);

// The number of elements that share the 16 random bytes of a Philox call, and of rows that a Hadamard transform mixes.
inline constexpr int kRun = 16;
// The sections of a layer's buffer start at multiples of this.
inline constexpr int kSectionBytes = 16;

// For non-negative numbers. They are unsigned, so that a division by a power of two is a shift.
GTP_HD constexpr int64_t ceil_div(int64_t n, int64_t d) {
  return static_cast<int64_t>((static_cast<uint64_t>(n) + static_cast<uint64_t>(d) - 1) / static_cast<uint64_t>(d));
}
GTP_HD constexpr int64_t round_up(int64_t n, int64_t d) { return ceil_div(n, d) * d; }
GTP_HD constexpr int dtype_bytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

}  // namespace gtp
