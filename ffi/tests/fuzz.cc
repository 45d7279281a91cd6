// Runs the CPU kernels on random jobs, in buffers of exactly their size at odd addresses. Built with sanitizers, it
// finds reads and writes out of bounds. It also checks properties of the results that need no oracle.
//
//     fuzz SEED CASES
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "gtp/cpu.h"
#include "gtp/numerics.h"

namespace {

using namespace gtp;

std::mt19937_64 generator;

int64_t below(int64_t limit) { return static_cast<int64_t>(generator() % static_cast<uint64_t>(limit)); }

int64_t any_size() {
  static constexpr int64_t kSizes[] = {0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 255, 256, 257, 300};
  return below(2) ? kSizes[below(std::size(kSizes))] : below(80);
}

// Memory of exactly this size, aligned to `alignment` but to nothing more.
class Buffer {
 public:
  Buffer(int64_t bytes, int alignment) : offset_(alignment * (1 + below(3))), memory_(new uint8_t[bytes + offset_]) {
    std::memset(memory_.get(), 0xA5, bytes + offset_);
  }
  uint8_t* get() { return memory_.get() + offset_; }

 private:
  int64_t offset_;
  std::unique_ptr<uint8_t[]> memory_;
};

void fill(uint8_t* x, int64_t size, DType dtype, bool wild) {
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t word = static_cast<uint32_t>(generator());
    const float value = normal(generator);
    if (dtype == DType::kF32) {
      std::memcpy(x + 4 * i, wild ? static_cast<const void*>(&word) : &value, 4);
    } else {
      const uint16_t half = wild ? static_cast<uint16_t>(word) : dtype == DType::kBF16 ? to_bf16(value) : to_f16(value);
      std::memcpy(x + 2 * i, &half, 2);
    }
  }
}

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "violated: %s\n", what);
  std::exit(1);
}

void run_case() {
  const int code = static_cast<int>(below(kFormatCount));
  const Format& format = kFormats[code];
  const auto dtype = static_cast<DType>(below(3));
  const int64_t count = below(3), rows = any_size(), cols = any_size(), size = count * rows * cols;
  const bool hadamard = code == 1 && below(2), stochastic = format.element_bits == 4 && below(3) == 0, wild = below(2);
  const cpu::Pool pool{3, [](std::function<void()> task) { std::thread(std::move(task)).detach(); }};

  Buffer x(size * dtype_bytes(dtype), dtype_bytes(dtype));
  fill(x.get(), size, dtype, wild);
  float amax[2];
  cpu::multi_amax({{x.get(), size, dtype}}, &amax[0], pool);
  amax[1] = amax[0];
  if (hadamard) cpu::hadamard_amax({x.get(), size, dtype}, count, rows, cols, &amax[1], pool);
  require(amax[0] >= 0 && std::isfinite(amax[0]), "an amax is finite and not negative");

  const int64_t length = hadamard ? round_up(rows, kRun) : rows;
  const auto scales_of = [&](int64_t r, int64_t c) {
    return format.block_cols ? ceil_div(r, format.block_rows) * ceil_div(c, format.block_cols) : 0;
  };
  const int64_t row_codes = rows * format.code_bytes(cols), row_scales = scales_of(rows, cols);
  const int64_t column_codes = cols * format.code_bytes(length), column_scales = scales_of(cols, length);
  Buffer codes(count * row_codes, 1), scales(count * row_scales, 1);
  Buffer codes_t(count * column_codes, 1), scales_t(count * column_scales, 1);
  const uint32_t key[2] = {1, 2};
  QuantizeJob job{};
  job.x = x.get();
  job.count = count;
  job.rows = rows;
  job.cols = cols;
  job.x_stride = rows * cols;
  job.count_per_amax = std::max<int64_t>(1, count);
  job.dtype = dtype;
  job.column_transposed = format.transposed_columns || below(2);
  job.row = {codes.get(), scales.get(), &amax[0], row_codes, row_scales, row_codes, row_scales, 0, 0};
  job.column = {codes_t.get(), scales_t.get(), &amax[1],      column_codes, column_scales,
                column_codes,  column_scales,  0,             0};
  if (size == 0) return;
  cpu::quantize({job}, {code, hadamard, stochastic ? key : nullptr}, pool);

  const auto out_type = static_cast<DType>(below(3));
  Buffer back(size * dtype_bytes(out_type), dtype_bytes(out_type));
  DequantizeJob undo{};
  undo.codes = codes.get();
  undo.scales = scales.get();
  undo.amax = &amax[0];
  undo.x = back.get();
  undo.count = count;
  undo.rows = rows;
  undo.cols = cols;
  undo.rows_kept = below(count * rows + 1);
  undo.codes_stride = row_codes;
  undo.scales_stride = row_scales;
  undo.x_stride = rows * cols;
  undo.count_per_amax = count;
  undo.dtype = out_type;
  undo.layout = Layout::kRows;
  cpu::dequantize({undo}, code, pool);
  for (int64_t i = undo.rows_kept * cols * dtype_bytes(out_type); i < size * dtype_bytes(out_type); ++i) {
    require(back.get()[i] == 0xA5, "rows beyond `rows_kept` are not written");
  }

  const int64_t transposed_size = count * length * cols;
  Buffer back_t(transposed_size * 4, 4);
  undo.codes = codes_t.get();
  undo.scales = scales_t.get();
  undo.amax = &amax[1];
  undo.x = back_t.get();
  undo.rows = cols;
  undo.cols = length;
  undo.rows_kept = count * cols;
  undo.codes_stride = column_codes;
  undo.scales_stride = column_scales;
  undo.x_stride = length * cols;
  undo.dtype = DType::kF32;
  undo.layout = job.column_transposed ? Layout::kColumnsTransposed : Layout::kColumns;
  cpu::dequantize({undo}, code, pool);
  if (wild || hadamard) return;
  // an error is at most a step, relative to the block's amax: 2 in 6 for e2m1, 32 in 448 for e4m3, 1 in 4 for e5m2; the
  // rounding of the scale adds to it
  const float step = format.element == Element::kE2M1 ? 0.36f : format.element == Element::kE4M3 ? 0.08f : 0.26f;
  const auto* values = reinterpret_cast<const float*>(back_t.get());
  for (int64_t i = 0; i < transposed_size; ++i) {
    float original;
    if (dtype == DType::kF32) {
      std::memcpy(&original, x.get() + 4 * i, 4);
    } else {
      uint16_t half;
      std::memcpy(&half, x.get() + 2 * i, 2);
      original = dtype == DType::kBF16 ? from_bf16(half) : from_f16(half);
    }
    float value;
    std::memcpy(&value, reinterpret_cast<const uint8_t*>(values) + 4 * i, 4);
    require(std::fabs(value - original) <= step * amax[1], "an error is at most a step");
  }
}

}  // namespace

int main(int argc, char** argv) {
  generator.seed(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0);
  const long cases = argc > 2 ? std::strtol(argv[2], nullptr, 10) : 1000;
  for (long i = 0; i < cases; ++i) run_case();
  std::printf("%ld cases\n", cases);
}
