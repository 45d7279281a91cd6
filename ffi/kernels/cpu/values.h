// Values of the three dtypes as float32, and the dispatch from a dtype to its C++ type.
#pragma once

#include <cstdint>
#include <utility>

#include "gtp/numerics.h"

// Compiles the same code for older processors and for those with wider vectors; one is chosen when the library is
// loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define GTP_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define GTP_CLONES
#endif

namespace gtp::cpu {

struct F32 {
  using Storage = float;
  static constexpr DType kDType = DType::kF32;
  static float widen(float x) { return x; }
  static float narrow(float x) { return canonical(x); }
};

struct BF16 {
  using Storage = uint16_t;
  static constexpr DType kDType = DType::kBF16;
  static float widen(uint16_t x) { return from_bf16(x); }
  static uint16_t narrow(float x) { return to_bf16(x); }
};

struct F16 {
  using Storage = uint16_t;
  static constexpr DType kDType = DType::kF16;
  static float widen(uint16_t x) { return from_f16(x); }
  static uint16_t narrow(float x) { return to_f16(x); }
};

template <class Body>
void with_dtype(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kF32:
      return std::forward<Body>(body)(F32{});
    case DType::kBF16:
      return std::forward<Body>(body)(BF16{});
    case DType::kF16:
      return std::forward<Body>(body)(F16{});
  }
}

// The numbers of rows and columns of a panel, the part of a matrix that is processed at a time.
constexpr int kPanelRows = 16;
constexpr int kPanelCols = 256;

struct alignas(64) Panel {
  float x[kPanelRows][kPanelCols];
};

}  // namespace gtp::cpu
