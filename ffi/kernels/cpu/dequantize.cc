// Dequantization: look the code up, multiply with its block's factor, round.
#include <algorithm>
#include <array>

#include "gtp/cpu.h"
#include "ieee.h"
#include "parallel.h"
#include "values.h"

namespace gtp::cpu {
namespace {

using Table = std::array<float, 256>;

Table table_of(Element element) {
  IeeeArithmetic ieee;
  Table table{};
  for (uint32_t code = 0; code < table.size(); ++code) {
    table[code] = element == Element::kE2M1   ? decode_e2m1(code & 0xF)
                  : element == Element::kE4M3 ? decode_e4m3(code)
                                              : decode_e5m2(code);
  }
  return table;
}

// One copy, R x C, and where its values go.
struct View {
  const Format* format;
  const uint8_t *codes, *scales;
  int64_t rows, cols;
  int64_t codes_row, codes_col, scales_row, scales_col;
  int64_t x_row, x_col;  // elements
  float amax;
};

float factor_of(const View& view, int64_t row, int64_t block) {
  if (view.format->scale == ScaleType::kNone) return tensor_factor(view.format->largest(), view.amax);
  const uint8_t scale = view.scales[row / view.format->block_rows * view.scales_row + block * view.scales_col];
  return view.format->scale == ScaleType::kE4M3 ? e4m3_block_factor(scale, view.amax) : e8m0_block_factor(scale);
}

template <class T>
GTP_CLONES void scale_block(const float* values, float factor, typename T::Storage* x, int64_t step, int size) {
  if (step == 1) {
    for (int i = 0; i < size; ++i) x[i] = T::narrow(values[i] * factor);
  } else {
    for (int i = 0; i < size; ++i) x[i * step] = T::narrow(values[i] * factor);
  }
}

template <class T>
void dequantize_row(const View& view, const Table& table, int64_t row, typename T::Storage* x) {
  const int64_t block_size = view.format->block_cols ? view.format->block_cols : kPanelCols;
  const uint8_t* codes = view.codes + row * view.codes_row;
  float values[kPanelCols];
  for (int64_t col = 0; col < view.cols; col += block_size) {
    const int size = static_cast<int>(std::min(block_size, view.cols - col));
    if (view.format->element_bits == 4) {
      for (int i = 0; i < size; ++i) values[i] = table[codes[(col + i) / 2] >> ((col + i) % 2 * 4) & 0xF];
    } else {
      for (int i = 0; i < size; ++i) values[i] = table[codes[(col + i) * view.codes_col]];
    }
    scale_block<T>(values, factor_of(view, row, col / block_size), x + col * view.x_col, view.x_col, size);
  }
}

View view_of(const DequantizeJob& job, const Format& format, int64_t index) {
  const bool turned = job.layout == Layout::kColumns;
  const int64_t blocks = format.block_cols ? ceil_div(job.cols, format.block_cols) : 0;
  View view{};
  view.format = &format;
  view.codes = job.codes + index * job.codes_stride;
  view.scales = job.scales + index * job.scales_stride;
  view.rows = job.rows;
  view.cols = job.cols;
  view.codes_row = turned ? 1 : format.code_bytes(job.cols);
  view.codes_col = turned ? job.rows : 1;
  view.scales_row = turned ? 1 : blocks;
  view.scales_col = turned ? job.rows : 1;
  view.x_row = job.layout == Layout::kRows ? job.cols : 1;
  view.x_col = job.layout == Layout::kRows ? 1 : job.rows;
  view.amax = format.has_amax ? job.amax[index / job.count_per_amax * job.amax_stride] : 0.0f;
  return view;
}

}  // namespace

void dequantize(const std::vector<DequantizeJob>& jobs, int format_code, const Pool& pool) {
  const Format& format = kFormats[format_code];
  std::vector<int64_t> first_panel{0};
  for (const DequantizeJob& job : jobs) {
    const int64_t panels = job.cols == 0 ? 0 : job.count * ceil_div(job.rows, kPanelRows);
    first_panel.push_back(first_panel.back() + panels);
  }
  const Table table = table_of(format.element);
  parallel_for(pool, first_panel.back(), [&](int64_t unit) {
    const size_t which = std::upper_bound(first_panel.begin(), first_panel.end(), unit) - first_panel.begin() - 1;
    const DequantizeJob& job = jobs[which];
    const int64_t panels = ceil_div(job.rows, kPanelRows), panel = unit - first_panel[which];
    const int64_t index = panel / panels, first_row = panel % panels * kPanelRows;
    const View view = view_of(job, format, index);
    with_dtype(job.dtype, [&](auto type) {
      using T = decltype(type);
      auto* x = static_cast<typename T::Storage*>(job.x) + index * job.rows * job.cols;
      const int64_t end = std::min({job.rows, first_row + kPanelRows, job.rows_kept - index * job.rows});
      for (int64_t row = first_row; row < end; ++row) dequantize_row<T>(view, table, row, x + row * view.x_row);
    });
  });
}

}  // namespace gtp::cpu
