// Checks of a handler's operands: reject dtypes, shapes and alignments that the kernels do not support.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "gtp/jobs.h"
#include "xla/ffi/api/ffi.h"

// Returns the error from the calling function if the expression is an error.
#define GTP_CHECK(expression)                                            \
  do {                                                                   \
    if (::xla::ffi::Error error = (expression); error.failure()) return error; \
  } while (false)

namespace gtp {

namespace ffi = xla::ffi;

using Dims = std::vector<int64_t>;

std::string to_string(const Dims& dims);
Dims dims_of(const ffi::AnyBuffer& buffer);
int64_t product(const Dims& dims);

ffi::Error invalid(const std::string& message);

// The leading dimensions of a stack of matrices.
ffi::Error split_matrix(const char* name, const ffi::AnyBuffer& buffer, Dims& lead, int64_t& rows, int64_t& cols);
ffi::Error check_format(int32_t format);
// Checks that a buffer is float32, bfloat16 or float16 and aligned to its element size.
ffi::Error check_values(const std::string& name, const ffi::AnyBuffer& buffer, DType& dtype);
ffi::Error check_bytes(const char* name, const ffi::AnyBuffer& buffer, const Dims& lead,
                       std::initializer_list<int64_t> matrix);
ffi::Error check_f32(const char* name, const ffi::AnyBuffer& buffer);
// Checks that a buffer is float32 of this shape.
ffi::Error check_f32(const char* name, const ffi::AnyBuffer& buffer, const Dims& dims);

// Checks an amax, whose dimensions must be the first ones of `lead`, and finds how many matrices share an element.
ffi::Error check_amax(const char* name, const ffi::AnyBuffer& amax, const Dims& lead, int64_t& count_per_amax);

// The shapes of one copy's codes and scales; `scales` is empty for formats without blocks.
struct CopyShape {
  int64_t codes[2];
  int64_t scales[2];
  int64_t codes_bytes() const { return codes[0] * codes[1]; }
  int64_t scales_bytes() const { return scales[0] * scales[1]; }
};

// Returns the shapes of a copy R x C with blocks along C, stored as R x C or, if `transposed`, as C x R.
CopyShape copy_shape(const Format& format, int64_t rows, int64_t cols, bool transposed);

}  // namespace gtp
