// The jobs of the kernels: plain pointers, sizes and strides. From here on down, nothing depends on XLA or Python.
#pragma once

#include <cstdint>

#include "gtp/formats.h"

namespace gtp {

// The destination of one copy of a stack of matrices. If the copy's matrix is R x C with blocks along C, its codes are
// R rows of ceil(C * bits / 8) bytes and its scales ceil(R / block rows) rows of ceil(C / block columns) bytes, without
// gaps.
struct Copy {
  uint8_t* codes;  // nullptr if the copy is not requested
  uint8_t* scales;
  const float* amax;
  int64_t codes_stride;  // bytes from one matrix of the stack to the next
  int64_t scales_stride;
  int64_t codes_bytes;  // per matrix
  int64_t scales_bytes;
  int32_t codes_gap;  // bytes to set to zero after each matrix; fewer than kSectionBytes
  int32_t scales_gap;
};

// Quantizes `count` matrices of M x K.
struct QuantizeJob {
  const void* x;
  int64_t count, rows, cols;
  int64_t x_stride;        // elements from one matrix to the next
  Copy row;                // R x C = M x K
  Copy column;             // R x C = K x M, blocks along M
  int64_t count_per_amax;  // number of consecutive matrices that share an amax
  int64_t amax_stride;     // floats from one amax to the next
  DType dtype;
  bool column_transposed;  // whether column codes and scales are stored R x C; otherwise C x R
};

struct QuantizeOptions {
  int format;           // index into kFormats
  bool hadamard;        // transform the column copy, with M rounded up to 16
  const uint32_t* key;  // two words for stochastic rounding; nullptr to round to nearest even
};

// The layout of the codes to dequantize.
enum class Layout : int {
  kRows,            // codes R x C, values R x C
  kColumns,         // codes and values C x R, with blocks still along C: a column copy that is not transposed
  kColumnsTransposed,  // codes R x C, values C x R: a transposed column copy
};

// Dequantizes `count` copies of R x C. Only the first `rows_kept` of all their rows together are written; with layouts
// other than `kRows`, this must be all rows.
struct DequantizeJob {
  const uint8_t* codes;
  const uint8_t* scales;
  const float* amax;
  void* x;
  int64_t count, rows, cols, rows_kept;
  int64_t codes_stride, scales_stride;  // bytes from one copy to the next
  int64_t x_stride;                     // elements from one copy's values to the next copy's
  int64_t count_per_amax, amax_stride;
  DType dtype;
  Layout layout;
};

enum class Factor { kE4M3, kE5M2, kBF16, kF16 };  // the dtype of a grouped matmul's operands

// Multiplies each row with its group's matrix, in tiles of at most 128 rows of one group. If `outer`, sums products
// over each group's rows instead.
//
//            | left                       | right                          | out
//   product  | (left_rows, depth)         | (shards, groups, part, depth)  | (left_rows, columns = shards * part)
//   backward | (left_rows, shards * part) | (shards, groups, part, columns)| (left_rows, columns)
//   outer    | codes (rows, depth) or values (depth, rows); right is the same with columns instead of rows
//                                                                 | (shards, groups, rows / shards, columns)
//
// The inverse scales of codes in blocks:
//
//            | left_scales                                      | right_scales
//   product  | (depth / 128, left_rows rounded up to 4)         | (groups, columns / 128, depth / 128), rounded up
//   outer    | (depth / 128, rows)                              | (depth / 128, columns)
struct GroupedJob {
  const void* left;
  const void* right;
  const int32_t* tile_groups;
  const int32_t* starts;  // per tile; per group if `outer`
  const int32_t* stops;
  const float* scales;  // per group: the factor of its sums; null for 1
  const float* left_scales;  // of e4m3 codes in blocks of 128, see below; otherwise null
  const float* right_scales;
  void* out;
  int shards, groups, tiles, left_rows, rows, columns, depth;
  bool outer;
  bool backward;  // the contraction runs over all shards' parts, in order
  Factor left_factor, right_factor;
  bool wide;  // out is float32; otherwise bfloat16, or float16 for float16 operands
};

// Transposes rows of bytes. Tile i takes up to 128 rows, from starts[i] to stops[i], and is padded with zeros. A matrix
// consists of `tiles_each` tiles: out is (matrices, cols, tiles_each * 128).
struct TransposeJob {
  const uint8_t* rows;
  const int32_t* index;  // the row number at each place; starts and stops count places. Null if places are rows
  const int32_t* starts;
  const int32_t* stops;
  uint8_t* out;
  int64_t cols;  // a multiple of 4
  int64_t height;
  int tiles, tiles_each;
};

// Copies rows: out[i] is rows[index[i]], or zeros if there is no such row.
struct TakeJob {
  const void* rows;  // aligned to 16 bytes, like `out`
  const int32_t* index;
  void* out;
  int64_t height, count;
  int pieces;  // pieces of 16 bytes per row
};

// Quantizes a matrix to e4m3 in runs of 128 elements, each with a float32 scale that is a power of two: along its rows,
// along its columns, or both. Sizes are multiples of 128.
struct RunsJob {
  const void* x;  // (rows, cols)
  uint8_t* row_codes;     // (rows, cols); nullptr if not requested
  float* row_scales;      // (cols / 128, rows)
  uint8_t* column_codes;  // (cols, rows); nullptr if not requested
  float* column_scales;   // (rows / 128, cols)
  int64_t rows, cols;
  DType dtype;
};

// The scale and the format of FP8 codes of a whole tensor.
struct TensorCodes {
  const float* amax;
  float largest;  // the value that the amax is mapped to
  bool e5m2;      // otherwise e4m3
};

// SwiGLU, hidden = silu(gate) * up, of the output of a fused gate and up projection; or its gradient. A row of `gate_up`
// has `parts` parts, each with `width` features of the gate, then `width` of up. A row of hidden, and of its gradient,
// has `parts * width` features. Results are rounded to `dtype` before they are quantized.
struct SwigluJob {
  const void* gate_up;
  const void* gradient;   // of hidden; nullptr in forward
  uint8_t* hidden_codes;  // (rows, parts * width) in forward, and the transpose in backward
  uint8_t* row_codes;     // of the gradient of gate_up, (rows, parts * 2 * width); backward only
  uint8_t* column_codes;  // their transpose
  TensorCodes of_hidden, of_gradient;
  int64_t rows, parts, width;
  DType dtype;
};

// Multiplies e4m3 codes in blocks: out = left right^T, with sums promoted to float32 every 128 elements. Sizes are
// multiples of 128.
struct BlockedJob {
  const void* left;          // (rows, depth)
  const void* left_scales;   // (depth / 128, rows)
  const void* right;         // (columns, depth)
  const void* right_scales;  // (depth / 128, columns); (columns / 128, depth / 128 rounded up to 4) if `tiles`
  void* out;                 // (rows, columns)
  void* workspace;
  int64_t rows, columns, depth, workspace_bytes;
  bool tiles;  // whether scales of the right operand are of 128 x 128 tiles
  bool wide;   // whether out is float32; otherwise bfloat16
};

struct Array {
  const void* data;
  int64_t size;
  DType dtype;
};

}  // namespace gtp
