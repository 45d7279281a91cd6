// Finds the largest finite magnitudes. As integers, the bit patterns of magnitudes have the same order as the numbers.
#include <algorithm>
#include <atomic>

#include "gtp/cpu.h"
#include "parallel.h"
#include "values.h"

namespace gtp::cpu {
namespace {

constexpr int64_t kChunk = 1 << 16;

// Adds the distance from infinity's pattern to the sign bit. This makes the patterns of non-finite numbers negative, so
// that a signed maximum ignores them.
GTP_CLONES int32_t finite_max(const uint16_t* x, int64_t size, uint16_t infinity) {
  const uint16_t lift = 0x8000u - infinity;
  int16_t top = static_cast<int16_t>(lift);
  for (int64_t i = 0; i < size; ++i) {
    top = std::max(top, static_cast<int16_t>(static_cast<uint16_t>((x[i] & 0x7FFFu) + lift)));
  }
  return top - lift;
}

GTP_CLONES int32_t finite_max(const float* x, int64_t size) {
  constexpr uint32_t kLift = kSignBit - kInfinity;
  int32_t top = static_cast<int32_t>(kLift);
  for (int64_t i = 0; i < size; ++i) top = std::max(top, static_cast<int32_t>((bits_of(x[i]) & kMagnitude) + kLift));
  return top - static_cast<int32_t>(kLift);
}

float chunk_amax(const Array& array, int64_t begin, int64_t size) {
  if (array.dtype == DType::kF32) return float_of(finite_max(static_cast<const float*>(array.data) + begin, size));
  const uint16_t* x = static_cast<const uint16_t*>(array.data) + begin;
  if (array.dtype == DType::kBF16) return from_bf16(static_cast<uint16_t>(finite_max(x, size, 0x7F80)));
  return from_f16(static_cast<uint16_t>(finite_max(x, size, 0x7C00)));
}

void raise_to(std::atomic<uint32_t>& slot, float value) {
  uint32_t seen = slot.load(std::memory_order_relaxed);
  const uint32_t bits = bits_of(value);
  while (seen < bits && !slot.compare_exchange_weak(seen, bits, std::memory_order_relaxed)) {
  }
}

}  // namespace

void multi_amax(const std::vector<Array>& arrays, float* amax, const Pool& pool) {
  std::vector<int64_t> first_chunk{0};
  for (const Array& array : arrays) first_chunk.push_back(first_chunk.back() + ceil_div(array.size, kChunk));
  std::vector<std::atomic<uint32_t>> tops(arrays.size());
  parallel_for(pool, first_chunk.back(), [&](int64_t chunk) {
    const size_t index = std::upper_bound(first_chunk.begin(), first_chunk.end(), chunk) - first_chunk.begin() - 1;
    const int64_t begin = (chunk - first_chunk[index]) * kChunk;
    raise_to(tops[index], chunk_amax(arrays[index], begin, std::min(kChunk, arrays[index].size - begin)));
  });
  for (size_t i = 0; i < arrays.size(); ++i) amax[i] = float_of(tops[i]);
}

void hadamard_amax(const Array& x, int64_t count, int64_t rows, int64_t cols, float* amax, const Pool& pool) {
  std::atomic<uint32_t> top{0};
  const int64_t runs = ceil_div(rows, kRun);
  with_dtype(x.dtype, [&](auto type) {
    using T = decltype(type);
    const auto* data = static_cast<const typename T::Storage*>(x.data);
    parallel_for(pool, cols == 0 ? 0 : count * runs, [&](int64_t unit) {
      const int64_t first_row = unit % runs * kRun;
      const auto* run = data + (unit / runs * rows + first_row) * cols;
      uint32_t best = 0;
      for (int64_t col = 0; col < cols; ++col) {
        float y[kRun];
        for (int i = 0; i < kRun; ++i) y[i] = first_row + i < rows ? T::widen(run[i * cols + col]) : 0.0f;
        hadamard_run(y);
        for (float value : y) {
          const uint32_t magnitude = bits_of(value) & kMagnitude;
          best = std::max(best, magnitude < kInfinity ? magnitude : 0u);
        }
      }
      raise_to(top, float_of(best));
    });
  });
  *amax = float_of(top);
}

}  // namespace gtp::cpu
