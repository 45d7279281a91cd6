// Quantizes in panels: loads 16 rows x 256 columns of a copy as float32, scales each block, rounds, and stores.
#include <algorithm>
#include <cstring>

#include "gtp/cpu.h"
#include "parallel.h"
#include "values.h"

namespace gtp::cpu {
namespace {

// One copy of one matrix: R x C numbers with blocks along C, their source and their destination.
struct View {
  const Format* format;
  const void* x;
  DType dtype;
  int64_t rows, cols, source_cols;  // columns from source_cols to cols are zero
  int64_t row_step, col_step;       // elements from one row, one column, to the next
  uint8_t *codes, *scales;
  int64_t codes_row, scales_row;  // bytes from one row to the next
  float amax;
  bool hadamard;
  const uint32_t* key;
  uint32_t copy;       // 0: row-wise; 1: column-wise
  uint64_t first_run;  // the number of this matrix's first run in the stack
};

View view_of(const QuantizeJob& job, const QuantizeOptions& options, bool column, int64_t index) {
  const Format& format = kFormats[options.format];
  const Copy& copy = column ? job.column : job.row;
  View view{};
  view.format = &format;
  view.dtype = job.dtype;
  view.x = static_cast<const uint8_t*>(job.x) + index * job.x_stride * dtype_bytes(job.dtype);
  view.hadamard = column && options.hadamard;
  view.rows = column ? job.cols : job.rows;
  view.source_cols = column ? job.rows : job.cols;
  view.cols = view.hadamard ? round_up(view.source_cols, kRun) : view.source_cols;
  view.row_step = column ? 1 : job.cols;
  view.col_step = column ? job.cols : 1;
  view.codes = copy.codes + index * copy.codes_stride;
  view.scales = copy.scales ? copy.scales + index * copy.scales_stride : nullptr;
  const int64_t blocks = format.block_cols ? ceil_div(view.cols, format.block_cols) : 0;
  view.codes_row = format.code_bytes(view.cols);
  view.scales_row = blocks;
  view.amax = format.has_amax ? copy.amax[index / job.count_per_amax * job.amax_stride] : 0.0f;
  view.key = options.key;
  view.copy = column;
  view.first_run = static_cast<uint64_t>(index) * view.rows * ceil_div(view.cols, kRun);
  return view;
}

template <class T>
GTP_CLONES void load_rows(const typename T::Storage* x, int64_t step, int rows, int cols, Panel& panel) {
  for (int r = 0; r < rows; ++r) {
    const auto* row = x + r * step;
    for (int c = 0; c < cols; ++c) panel.x[r][c] = T::widen(row[c]);
  }
}

template <class T>
void load_columns(const typename T::Storage* x, int64_t step, int rows, int cols, Panel& panel) {
  for (int c = 0; c < cols; ++c) {
    const auto* column = x + c * step;
    for (int r = 0; r < rows; ++r) panel.x[r][c] = T::widen(column[r]);
  }
}

// Loads a panel; rows and columns beyond the matrix become zero.
void load(const View& view, int64_t row, int64_t col, int rows, int cols, Panel& panel) {
  const int present = static_cast<int>(std::clamp<int64_t>(view.source_cols - col, 0, cols));
  if (rows < kPanelRows || present < kPanelCols) std::memset(panel.x, 0, sizeof panel.x);
  with_dtype(view.dtype, [&](auto type) {
    using T = decltype(type);
    const auto* x = static_cast<const typename T::Storage*>(view.x) + row * view.row_step + col * view.col_step;
    if (view.col_step == 1) {
      load_rows<T>(x, view.row_step, rows, present, panel);
    } else {
      load_columns<T>(x, view.col_step, rows, present, panel);
    }
  });
}

void transform(Panel& panel, int rows, int cols) {
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < cols; c += kRun) hadamard_run(reinterpret_cast<float(&)[kRun]>(panel.x[r][c]));
  }
}

template <int kSize>
inline uint32_t block_max(const float* x) {
  int32_t top = 0;
  for (int i = 0; i < kSize; ++i) top = std::max(top, static_cast<int32_t>(bits_of(x[i]) & kMagnitude));
  return static_cast<uint32_t>(top);
}

inline uint32_t sign_of(float x, int bit) { return bits_of(x) >> (31 - bit) & 1u << bit; }

inline float magnitude_of(float x) { return float_of(bits_of(x) & kMagnitude); }

// Computes the codes of one row of a block, one per byte.
template <int kSize>
inline void encode_e2m1_row(const float* x, float factor, uint8_t* codes) {
  for (int i = 0; i < kSize; ++i) {
    codes[i] = static_cast<uint8_t>(encode_e2m1(magnitude_of(x[i]) * factor) | sign_of(x[i], 3));
  }
}

template <bool kE5M2>
inline void encode_fp8_row(const float* x, int size, float factor, uint8_t* codes) {
  for (int i = 0; i < size; ++i) {
    const float product = magnitude_of(x[i]) * factor;
    codes[i] = static_cast<uint8_t>((kE5M2 ? encode_e5m2(product) : encode_e4m3(product)) | sign_of(x[i], 7));
  }
}

using Codes = uint8_t[kPanelRows][kPanelCols];

void encode_stochastic_row(const View& view, const float* x, float factor, int64_t row, int64_t col, uint8_t* codes) {
  const uint64_t run = view.first_run + row * ceil_div(view.cols, kRun) + col / kRun;
  const RandomWords random = random_words(run, view.copy, view.key[0], view.key[1]);
  for (int i = 0; i < kRun; ++i) {
    const uint32_t code = encode_e2m1_stochastic(magnitude_of(x[i]) * factor, random.octet(i));
    codes[i] = static_cast<uint8_t>(code | sign_of(x[i], 3));
  }
}

// A block that contains NaN or Inf gets the scale NaN and the codes 0.
template <int kBlockRows>
GTP_CLONES void encode_nvfp4(const View& view, const Panel& panel, int64_t row, int64_t col, int rows, int cols,
                             Codes& codes) {
  constexpr int kSize = 16;
  const Nvfp4Scale tensor = nvfp4_scale(view.amax);
  for (int c = 0; c < cols; c += kSize) {
    for (int r = 0; r < rows; r += kBlockRows) {
      const int block_rows = std::min(kBlockRows, rows - r);
      uint32_t top = 0;
      for (int i = 0; i < block_rows; ++i) top = std::max(top, block_max<kSize>(&panel.x[r + i][c]));
      const bool finite = top < kInfinity;
      const BlockScale scale = e4m3_block_scale(finite ? float_of(top) : 0.0f, tensor);
      view.scales[(row + r) / kBlockRows * view.scales_row + (col + c) / kSize] =
          finite ? scale.code : kNanCode;
      for (int i = 0; i < block_rows; ++i) {
        uint8_t* out = &codes[r + i][c];
        if (!finite) {
          std::memset(out, 0, kSize);
        } else if (view.key) {
          encode_stochastic_row(view, &panel.x[r + i][c], scale.factor, row + r + i, col + c, out);
        } else {
          encode_e2m1_row<kSize>(&panel.x[r + i][c], scale.factor, out);
        }
      }
    }
  }
}

GTP_CLONES void encode_mxfp8(const View& view, const Panel& panel, int64_t row, int64_t col, int rows, int cols,
                             Codes& codes) {
  constexpr int kSize = 32;
  const float inverse_max = 1.0f / view.format->element_max;
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < cols; c += kSize) {
      const uint32_t top = block_max<kSize>(&panel.x[r][c]);
      const bool finite = top < kInfinity;
      const BlockScale scale = e8m0_block_scale(finite ? float_of(top) : 0.0f, inverse_max);
      view.scales[(row + r) * view.scales_row + (col + c) / kSize] = finite ? scale.code : kNanScale8;
      if (finite) {
        encode_fp8_row<false>(&panel.x[r][c], kSize, scale.factor, &codes[r][c]);
      } else {
        std::memset(&codes[r][c], 0, kSize);
      }
    }
  }
}

// Without blocks, each non-finite element gets the code NaN.
template <bool kE5M2>
GTP_CLONES void encode_fp8(const View& view, const Panel& panel, int rows, int cols, Codes& codes) {
  const float scale = tensor_scale(view.format->largest(), view.amax);
  for (int r = 0; r < rows; ++r) {
    encode_fp8_row<kE5M2>(panel.x[r], cols, scale, codes[r]);
    for (int c = 0; c < cols; ++c) {
      codes[r][c] = (bits_of(panel.x[r][c]) & kMagnitude) >= kInfinity ? kNanCode : codes[r][c];
    }
  }
}

void encode(const View& view, const Panel& panel, int64_t row, int64_t col, int rows, int cols, Codes& codes) {
  if (view.format->scale == ScaleType::kE4M3) {
    const auto encode_blocks = view.format->block_rows == 1 ? encode_nvfp4<1> : encode_nvfp4<16>;
    encode_blocks(view, panel, row, col, rows, cols, codes);
  } else if (view.format->scale == ScaleType::kE8M0) {
    encode_mxfp8(view, panel, row, col, rows, cols, codes);
  } else {
    const auto encode_tensor = view.format->element == Element::kE5M2 ? encode_fp8<true> : encode_fp8<false>;
    encode_tensor(view, panel, rows, cols, codes);
  }
}

void store(const View& view, const Codes& codes, int64_t row, int64_t col, int rows, int cols) {
  if (view.format->element_bits == 4) {
    for (int r = 0; r < rows; ++r) {
      uint8_t* out = view.codes + (row + r) * view.codes_row + col / 2;
      const int pairs = cols / 2;
      for (int i = 0; i < pairs; ++i) out[i] = static_cast<uint8_t>(codes[r][2 * i] | codes[r][2 * i + 1] << 4);
      if (cols % 2) out[pairs] = codes[r][cols - 1];
    }
  } else {
    for (int r = 0; r < rows; ++r) std::memcpy(view.codes + (row + r) * view.codes_row + col, codes[r], cols);
  }
}

void zero_gaps(const Copy& copy, int64_t index) {
  std::memset(copy.codes + index * copy.codes_stride + copy.codes_bytes, 0, copy.codes_gap);
  if (copy.scales) std::memset(copy.scales + index * copy.scales_stride + copy.scales_bytes, 0, copy.scales_gap);
}

void quantize_rows(const View& view, int64_t row) {
  static_assert(kPanelRows == 16, "a panel holds whole tiles");
  thread_local Panel panel;
  thread_local Codes codes;
  const int rows = static_cast<int>(std::min<int64_t>(kPanelRows, view.rows - row));
  for (int64_t col = 0; col < view.cols; col += kPanelCols) {
    const int cols = static_cast<int>(std::min<int64_t>(kPanelCols, view.cols - col));
    load(view, row, col, rows, cols, panel);
    if (view.hadamard) transform(panel, rows, cols);
    encode(view, panel, row, col, rows, cols, codes);
    store(view, codes, row, col, rows, cols);
  }
}

// Quantizes a column copy that is not transposed, which only MXFP8 has, in strips of one row of blocks.
constexpr int kStripRows = 32;
using Strip = Panel[kStripRows / kPanelRows];

template <bool kE5M2>
GTP_CLONES void encode_strip(const Strip& strip, int rows, int cols, float inverse_max, uint8_t* scales, uint8_t* codes,
                             int64_t pitch) {
  int32_t tops[kPanelCols] = {};
  for (int r = 0; r < rows; ++r) {
    const float* x = strip[r / kPanelRows].x[r % kPanelRows];
    for (int c = 0; c < cols; ++c) tops[c] = std::max(tops[c], static_cast<int32_t>(bits_of(x[c]) & kMagnitude));
  }
  float factors[kPanelCols];
  uint8_t kept[kPanelCols];
  for (int c = 0; c < cols; ++c) {
    const bool finite = static_cast<uint32_t>(tops[c]) < kInfinity;
    const BlockScale scale = e8m0_block_scale(finite ? float_of(tops[c]) : 0.0f, inverse_max);
    scales[c] = finite ? scale.code : kNanScale8;
    factors[c] = scale.factor;
    kept[c] = finite ? 0xFF : 0;
  }
  for (int r = 0; r < rows; ++r) {
    const float* x = strip[r / kPanelRows].x[r % kPanelRows];
    uint8_t* __restrict out = codes + r * pitch;
    for (int c = 0; c < cols; ++c) {
      const float product = magnitude_of(x[c]) * factors[c];
      const uint32_t code = kE5M2 ? encode_e5m2(product) : encode_e4m3(product);
      out[c] = static_cast<uint8_t>((code | sign_of(x[c], 7)) & kept[c]);
    }
  }
}

// Quantizes one row of blocks of a matrix.
void quantize_strip(const QuantizeJob& job, const Format& format, int64_t index, int64_t block) {
  thread_local Strip strip;
  const int64_t first = block * kStripRows, pitch = job.cols;
  const int rows = static_cast<int>(std::min<int64_t>(kStripRows, job.rows - first));
  uint8_t* codes = job.column.codes + index * job.column.codes_stride + first * pitch;
  uint8_t* scales = job.column.scales + index * job.column.scales_stride + block * pitch;
  const auto encode_one = format.element == Element::kE5M2 ? encode_strip<true> : encode_strip<false>;
  for (int64_t col = 0; col < job.cols; col += kPanelCols) {
    const int cols = static_cast<int>(std::min<int64_t>(kPanelCols, job.cols - col));
    with_dtype(job.dtype, [&](auto type) {
      using T = decltype(type);
      const auto* x = static_cast<const typename T::Storage*>(job.x) + index * job.x_stride + first * pitch + col;
      for (int r = 0; r < rows; r += kPanelRows) {
        load_rows<T>(x + r * pitch, pitch, std::min(kPanelRows, rows - r), cols, strip[r / kPanelRows]);
      }
    });
    encode_one(strip, rows, cols, 1.0f / format.element_max, scales + col, codes + col, pitch);
  }
}

}  // namespace

void quantize(const std::vector<QuantizeJob>& jobs, const QuantizeOptions& options, const Pool& pool) {
  struct Share {
    const QuantizeJob* job;
    bool column, strips;
    int64_t panels, first;
  };
  std::vector<Share> shares;
  int64_t total = 0;
  for (const QuantizeJob& job : jobs) {
    if (job.count * job.rows * job.cols == 0) continue;
    for (const bool column : {false, true}) {
      if (!(column ? job.column : job.row).codes) continue;
      const bool strips = column && !job.column_transposed;
      const int64_t rows = column && !strips ? job.cols : job.rows;
      const int64_t panels = ceil_div(rows, strips ? kStripRows : kPanelRows);
      shares.push_back({&job, column, strips, panels, total});
      total += panels * job.count;
    }
  }
  parallel_for(pool, total, [&](int64_t unit) {
    const auto after = std::upper_bound(shares.begin(), shares.end(), unit,
                                        [](int64_t value, const Share& share) { return value < share.first; });
    const Share& share = *(after - 1);
    const int64_t panel = unit - share.first;
    if (panel % share.panels == 0) zero_gaps(share.column ? share.job->column : share.job->row, panel / share.panels);
    if (share.strips) {
      return quantize_strip(*share.job, kFormats[options.format], panel / share.panels, panel % share.panels);
    }
    const View view = view_of(*share.job, options, share.column, panel / share.panels);
    quantize_rows(view, panel % share.panels * kPanelRows);
  });
}

}  // namespace gtp::cpu
