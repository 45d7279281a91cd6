// What the kernels are asked to do: plain pointers, sizes and strides. Neither XLA nor Python is known from here down.
#pragma once

#include <cstdint>

#include "gtp/formats.h"

namespace gtp {

// Where one copy of a stack of matrices goes. With R x C the copy's matrix, blocks along C, codes are R rows of
// ceil(C * bits / 8) bytes and scales ceil(R / block rows) rows of ceil(C / block columns) bytes, without gaps.
struct Copy {
  uint8_t* codes;  // nullptr: not wanted
  uint8_t* scales;
  const float* amax;
  int64_t codes_stride;  // bytes from one matrix of the stack to the next
  int64_t scales_stride;
  int64_t codes_bytes;  // of one matrix
  int64_t scales_bytes;
  int32_t codes_gap;  // bytes to zero after those of each matrix; fewer than kSectionBytes
  int32_t scales_gap;
};

// Quantizes `count` matrices of M x K.
struct QuantizeJob {
  const void* x;
  int64_t count, rows, cols;
  int64_t x_stride;        // elements from one matrix to the next
  Copy row;                // R x C = M x K
  Copy column;             // R x C = K x M, blocks along M
  int64_t count_per_amax;  // so many matrices share an amax,
  int64_t amax_stride;     // and the next ones' lies so many floats on
  DType dtype;
  bool column_transposed;  // whether column codes and scales are stored R x C; otherwise C x R
};

struct QuantizeOptions {
  int format;           // index into kFormats
  bool hadamard;        // transform the column copy, with M rounded up to 16
  const uint32_t* key;  // two words to round stochastically with; nullptr: to nearest even
};

// How the codes of a dequantization lie.
enum class Layout : int {
  kRows,            // codes R x C, values R x C
  kColumns,         // codes and values C x R, blocks still along C: a column copy that is not transposed
  kColumnsTransposed,  // codes R x C, values C x R: a transposed column copy
};

// Dequantizes `count` copies of R x C. Of all their rows together only the first `rows_kept` are written, which with
// another layout than `kRows` is all of them.
struct DequantizeJob {
  const uint8_t* codes;
  const uint8_t* scales;
  const float* amax;
  void* x;
  int64_t count, rows, cols, rows_kept;
  int64_t codes_stride, scales_stride;  // bytes from one copy to the next
  int64_t x_stride;                     // elements from the values of one copy to those of the next
  int64_t count_per_amax, amax_stride;
  DType dtype;
  Layout layout;
};

enum class Factor { kE4M3, kE5M2, kBF16, kF16 };  // of what products are made in a grouped matmul

// Each row times its group's matrix, in tiles of at most 128 rows of one group; or, if `outer`, sums of products over each
// group's rows.
//
//            | left                       | right                          | out
//   product  | (left_rows, depth)         | (shards, groups, part, depth)  | (left_rows, columns), shards * part of them
//   backward | (left_rows, shards * part) | (shards, groups, part, columns)| (left_rows, columns)
//   outer    | (rows, depth) of codes, (depth, rows) of values; right likewise with columns
//                                                                 | (shards, groups, rows / shards, columns)
struct GroupedJob {
  const void* left;
  const void* right;
  const int32_t* tile_groups;
  const int32_t* starts;  // of tiles; of groups if `outer`
  const int32_t* stops;
  const float* scales;  // of each group: what its sums are multiplied with; null for 1
  void* out;
  int shards, groups, tiles, left_rows, rows, columns, depth;
  bool outer;
  bool backward;  // the contraction runs over the parts of all shards, in order
  Factor left_factor, right_factor;
  bool wide;  // out is float32; bfloat16 or, of operands in float16, float16 otherwise
};

// Rows of bytes, transposed: tile i takes up to 128 rows from starts[i] to stops[i], zeros behind them. Tiles make
// matrices of `tiles_each`: out is (matrices, cols, tiles_each * 128).
struct TransposeJob {
  const uint8_t* rows;
  const int32_t* index;  // which row stands at each place, of which starts and stops then are; null for its own
  const int32_t* starts;
  const int32_t* stops;
  uint8_t* out;
  int64_t cols;  // a multiple of 4
  int64_t height;
  int tiles, tiles_each;
};

// Copies of rows: out[i] is rows[index[i]], or zeros where there is no such row.
struct TakeJob {
  const void* rows;  // aligned to 16 bytes, as `out`
  const int32_t* index;
  void* out;
  int64_t height, count;
  int pieces;  // of 16 bytes, a row
};

struct Array {
  const void* data;
  int64_t size;
  DType dtype;
};

}  // namespace gtp
