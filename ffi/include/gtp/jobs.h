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

// Quantizes `count` matrices of M x K, one after another in memory.
struct QuantizeJob {
  const void* x;
  int64_t count, rows, cols;
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

// A matmul of FP8 codes whose rows belong to groups. Operands are matrices with the contraction last, `depth` bytes a row.
//
// Product: rows of `left` (left_rows, depth), each by its group's matrix of `right` (shards, groups, columns / shards,
// depth); out is (left_rows, columns). `tile_groups`, `starts` and `stops` are of tiles of at most 128 rows; tiles of the
// group `groups` are of rows that belong to none, and become zeros.
//
// Outer: of each group, `left` (rows, depth) by `right` (columns, depth), contracted from its start to its stop, in
// whole 128; out is (shards, groups, rows / shards, columns). `starts` and `stops` are of groups.
//
// Where there are several shards, each one's part of a group is a multiple of 128.
struct GroupedJob {
  const uint8_t* left;
  const uint8_t* right;
  const int32_t* tile_groups;
  const int32_t* starts;
  const int32_t* stops;
  const float* scales;  // of each group: what its sums are multiplied with
  void* out;
  int shards, groups, tiles, left_rows, rows, columns, depth;
  bool outer;
  bool left_e5m2, right_e5m2;  // e4m3 otherwise
  bool wide;                   // out is float32; bfloat16 otherwise
};

// Rows of bytes, transposed: tile i takes up to 128 rows from starts[i] to stops[i], zeros behind them. Tiles make
// matrices of `tiles_each`: out is (matrices, cols, tiles_each * 128).
struct TransposeJob {
  const uint8_t* rows;
  const int32_t* starts;
  const int32_t* stops;
  uint8_t* out;
  int64_t cols;  // a multiple of 4
  int tiles, tiles_each;
};

struct Array {
  const void* data;
  int64_t size;
  DType dtype;
};

}  // namespace gtp
