// Dequantizes in panels of 32 rows x 256 columns of a copy. Each value is a code times its block's factor.
#include <algorithm>
#include <cstring>

#include "gtp/cpu.h"
#include "parallel.h"
#include "values.h"

namespace gtp::cpu {
namespace {

// The rows of a panel, chosen so that a column that is stored transposed fills a cache line.
constexpr int kRows = 32;
constexpr int kCols = 256;

// One copy, R x C, and the destination of its values.
struct View {
  const Format* format;
  const uint8_t *codes, *scales;
  int64_t rows, cols;
  int64_t codes_row, scales_row;  // bytes from one row to the next
  int64_t x_row, x_col;           // elements
  float amax;
};

View view_of(const DequantizeJob& job, const Format& format, int64_t index) {
  const int64_t blocks = format.block_cols ? ceil_div(job.cols, format.block_cols) : 0;
  View view{};
  view.format = &format;
  view.codes = job.codes + index * job.codes_stride;
  view.scales = job.scales + index * job.scales_stride;
  view.rows = job.rows;
  view.cols = job.cols;
  view.codes_row = format.code_bytes(job.cols);
  view.scales_row = blocks;
  view.x_row = job.layout == Layout::kRows ? job.cols : 1;
  view.x_col = job.layout == Layout::kRows ? 1 : job.rows;
  view.amax = format.has_amax ? job.amax[index / job.count_per_amax * job.amax_stride] : 0.0f;
  return view;
}

float factor_of(const View& view, int64_t row, int64_t block) {
  if (view.format->scale == ScaleType::kNone) return tensor_factor(view.format->largest(), view.amax);
  const uint8_t scale = view.scales[row / view.format->block_rows * view.scales_row + block];
  return view.format->scale == ScaleType::kE4M3 ? e4m3_block_factor(scale, view.amax) : e8m0_block_factor(scale);
}

// Unpacks the codes of one row, one per byte. Panels begin at even columns.
GTP_CLONES void read_codes(const View& view, int64_t row, int64_t col, int cols, uint8_t* __restrict codes) {
  const uint8_t* in = view.codes + row * view.codes_row;
  if (view.format->element_bits == 4) {
    in += col / 2;
    for (int i = 0; i < (cols + 1) / 2; ++i) {
      codes[2 * i] = in[i] & 0xF;
      codes[2 * i + 1] = in[i] >> 4;
    }
  } else {
    std::memcpy(codes, in + col, cols);
  }
}

template <Element kElement>
float decode(uint8_t code) {
  if (kElement == Element::kE2M1) return decode_e2m1(code);
  return kElement == Element::kE4M3 ? decode_e4m3(code) : decode_e5m2(code);
}

// Processes a whole number of blocks, so that the inner loop has a fixed length.
template <class T, Element kElement, int kBlock>
GTP_CLONES void scale_blocks(const uint8_t* __restrict codes, const float* __restrict factors, int blocks,
                             typename T::Storage* __restrict x) {
  for (int block = 0; block < blocks; ++block, codes += kBlock, x += kBlock) {
    for (int i = 0; i < kBlock; ++i) x[i] = T::narrow(decode<kElement>(codes[i]) * factors[block]);
  }
}

// Without block scales, every run of 32 has the same factor.
constexpr int kUnscaledBlock = 32;

template <class T>
auto scaler_of(const Format& format) {
  if (format.element == Element::kE2M1) return &scale_blocks<T, Element::kE2M1, 16>;
  if (format.element == Element::kE4M3) return &scale_blocks<T, Element::kE4M3, 32>;
  return &scale_blocks<T, Element::kE5M2, 32>;
}

// `x` has room for whole blocks.
template <class T>
void dequantize_row(const View& view, int64_t row, int64_t col, int cols, typename T::Storage* x) {
  alignas(64) uint8_t codes[kCols];
  float factors[kCols / 16];
  const int size = view.format->block_cols ? view.format->block_cols : kUnscaledBlock;
  const int blocks = static_cast<int>(ceil_div(cols, size));
  read_codes(view, row, col, cols, codes);
  std::fill(codes + cols, codes + blocks * size, uint8_t{0});
  for (int block = 0; block < blocks; ++block) factors[block] = factor_of(view, row, col / size + block);
  scaler_of<T>(*view.format)(codes, factors, blocks, x);
}

void store_transposed(const auto (&panel)[kRows][kCols], int rows, int cols, int64_t step, auto* x) {
  for (int c = 0; c < cols; ++c) {
    for (int r = 0; r < rows; ++r) x[c * step + r] = panel[r][c];
  }
}

template <class T>
void dequantize_rows(const View& view, int64_t first_row, int rows, typename T::Storage* x) {
  alignas(64) typename T::Storage panel[kRows][kCols];
  x += first_row * view.x_row;
  for (int64_t col = 0; col < view.cols; col += kCols) {
    const int cols = static_cast<int>(std::min<int64_t>(kCols, view.cols - col));
    const bool in_place = view.x_col == 1 && cols == kCols;
    for (int r = 0; r < rows; ++r) {
      auto* out = x + r * view.x_row + col;
      dequantize_row<T>(view, first_row + r, col, cols, in_place ? out : panel[r]);
      if (view.x_col == 1 && !in_place) std::copy_n(panel[r], cols, out);
    }
    if (view.x_col != 1) store_transposed(panel, rows, cols, view.x_col, x + col * view.x_col);
  }
}

template <class T, Element kElement>
GTP_CLONES void scale_each(const uint8_t* __restrict codes, const float* __restrict factors, int count,
                           typename T::Storage* __restrict x) {
  for (int i = 0; i < count; ++i) x[i] = T::narrow(decode<kElement>(codes[i]) * factors[i]);
}

// Dequantizes a row of blocks of a column copy that is not transposed, which only MXFP8 has. Each number in a row of
// values has its own factor.
template <class T>
void dequantize_columns(const DequantizeJob& job, const Format& format, int64_t index, int64_t block) {
  const auto scale = format.element == Element::kE4M3 ? &scale_each<T, Element::kE4M3> : &scale_each<T, Element::kE5M2>;
  const uint8_t* scales = job.scales + index * job.scales_stride + block * job.rows;
  const uint8_t* codes = job.codes + index * job.codes_stride;
  auto* x = static_cast<typename T::Storage*>(job.x) + index * job.x_stride;
  const int64_t first = block * format.block_cols, end = std::min(job.cols, first + format.block_cols);
  for (int64_t at = 0; at < job.rows; at += kCols) {
    const int count = static_cast<int>(std::min<int64_t>(kCols, job.rows - at));
    float factors[kCols];
    for (int i = 0; i < count; ++i) factors[i] = e8m0_block_factor(scales[at + i]);
    for (int64_t row = first; row < end; ++row) {
      scale(codes + row * job.rows + at, factors, count, x + row * job.rows + at);
    }
  }
}

// Returns the number of panels of a copy, which threads take one at a time: runs of kRows rows or, with `kColumns`,
// rows of blocks.
int64_t panels_of(const DequantizeJob& job, const Format& format) {
  if (job.rows * job.cols == 0) return 0;
  return job.layout == Layout::kColumns ? ceil_div(job.cols, format.block_cols) : ceil_div(job.rows, kRows);
}

}  // namespace

void dequantize(const std::vector<DequantizeJob>& jobs, int format_code, const Pool& pool) {
  const Format& format = kFormats[format_code];
  std::vector<int64_t> first_panel{0};
  for (const DequantizeJob& job : jobs) {
    first_panel.push_back(first_panel.back() + job.count * panels_of(job, format));
  }
  parallel_for(pool, first_panel.back(), [&](int64_t unit) {
    const size_t which = std::upper_bound(first_panel.begin(), first_panel.end(), unit) - first_panel.begin() - 1;
    const DequantizeJob& job = jobs[which];
    const int64_t panels = panels_of(job, format), panel = unit - first_panel[which];
    const int64_t index = panel / panels, at = panel % panels;
    if (job.layout == Layout::kColumns) {
      return with_dtype(job.dtype, [&](auto type) { dequantize_columns<decltype(type)>(job, format, index, at); });
    }
    const int64_t first_row = at * kRows;
    const int64_t end = std::min({job.rows, first_row + kRows, job.rows_kept - index * job.rows});
    if (end <= first_row) return;
    const View view = view_of(job, format, index);
    with_dtype(job.dtype, [&](auto type) {
      using T = decltype(type);
      auto* x = static_cast<typename T::Storage*>(job.x) + index * job.x_stride;
      dequantize_rows<T>(view, first_row, static_cast<int>(end - first_row), x);
    });
  });
}

}  // namespace gtp::cpu
