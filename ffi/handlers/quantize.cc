#include "backend.h"
#include "checks.h"

namespace gtp {
namespace {

ffi::Error describe_copy(const char* codes_name, const char* scales_name, const Dims& lead, const CopyShape& shape,
                         ffi::AnyBuffer codes, ffi::AnyBuffer scales, ffi::AnyBuffer amax, Copy& copy) {
  GTP_CHECK(check_bytes(codes_name, codes, lead, {shape.codes[0], shape.codes[1]}));
  if (shape.scales_bytes() > 0) {
    GTP_CHECK(check_bytes(scales_name, scales, lead, {shape.scales[0], shape.scales[1]}));
  }
  copy = {static_cast<uint8_t*>(codes.untyped_data()), static_cast<uint8_t*>(scales.untyped_data()),
          static_cast<const float*>(amax.untyped_data()), shape.codes_bytes(), shape.scales_bytes(),
          shape.codes_bytes(), shape.scales_bytes(), 0, 0};
  return ffi::Error::Success();
}

// x: (*lead, M, K). amax, amax_columns: float32, with the first dimensions of lead; ignored if the format has no amax.
// key: uint32 (2,), ignored unless `stochastic`. Codes and scales of copies that are not requested are not written.
template <class B>
ffi::Error quantize(typename B::Context context, ffi::AnyBuffer x, ffi::AnyBuffer amax, ffi::AnyBuffer amax_columns,
                    ffi::AnyBuffer key, ffi::Result<ffi::AnyBuffer> row_codes, ffi::Result<ffi::AnyBuffer> row_scales,
                    ffi::Result<ffi::AnyBuffer> column_codes, ffi::Result<ffi::AnyBuffer> column_scales,
                    int32_t format_code, bool hadamard, bool stochastic, bool rows, bool columns) {
  return guarded([&]() -> ffi::Error {
    GTP_CHECK(check_format(format_code));
    const Format& format = kFormats[format_code];
    if (hadamard && format.block_rows * format.block_cols != kRun) {
      return invalid(std::string("the Hadamard transform cannot be used with ") + format.name);
    }
    if (stochastic && format.element != Element::kE2M1) {
      return invalid(std::string("stochastic rounding cannot be used with ") + format.name);
    }
    if (stochastic && (key.element_type() != ffi::DataType::U32 || key.element_count() != 2)) {
      return invalid("key must be two words of uint32");
    }
    QuantizeJob job{};
    Dims lead;
    GTP_CHECK(check_values("x", x, job.dtype));
    GTP_CHECK(split_matrix("x", x, lead, job.rows, job.cols));
    job.x = x.untyped_data();
    job.count = product(lead);
    job.x_stride = job.rows * job.cols;
    job.count_per_amax = 1;
    job.amax_stride = 1;
    job.column_transposed = format.transposed_columns;
    if (format.has_amax) {
      int64_t for_rows = 1, for_columns = 1;
      if (rows) GTP_CHECK(check_amax("amax", amax, lead, for_rows));
      if (columns) GTP_CHECK(check_amax("amax_columns", amax_columns, lead, for_columns));
      if (rows && columns && for_rows != for_columns) return invalid("amax and amax_columns have different shapes");
      job.count_per_amax = rows ? for_rows : for_columns;
    }
    if (rows) {
      const CopyShape shape = copy_shape(format, job.rows, job.cols, false);
      GTP_CHECK(describe_copy("row codes", "row scales", lead, shape, *row_codes, *row_scales, amax, job.row));
    }
    if (columns) {
      const int64_t length = hadamard ? round_up(job.rows, kRun) : job.rows;
      const CopyShape shape = copy_shape(format, job.cols, length, !format.transposed_columns);
      GTP_CHECK(describe_copy("column codes", "column scales", lead, shape, *column_codes, *column_scales, amax_columns,
                              job.column));
    }
    if (x.element_count() == 0 || !(rows || columns)) return ffi::Error::Success();
    const QuantizeOptions options{format_code, hadamard,
                                  stochastic ? static_cast<const uint32_t*>(key.untyped_data()) : nullptr};
    return B::run(context, B::quantize, std::vector<QuantizeJob>{job}, options);
  });
}

// codes, scales: those of the row-wise or the column-wise copy of x. amax: as above. x: (*lead, M, K).
template <class B>
ffi::Error dequantize(typename B::Context context, ffi::AnyBuffer codes, ffi::AnyBuffer scales, ffi::AnyBuffer amax,
                      ffi::Result<ffi::AnyBuffer> x, int32_t format_code, bool columns) {
  return guarded([&]() -> ffi::Error {
    GTP_CHECK(check_format(format_code));
    const Format& format = kFormats[format_code];
    DequantizeJob job{};
    Dims lead;
    int64_t m, k;
    GTP_CHECK(check_values("x", *x, job.dtype));
    GTP_CHECK(split_matrix("x", *x, lead, m, k));
    job.rows = columns ? k : m;
    job.cols = columns ? m : k;
    const bool transposed = columns && !format.transposed_columns;
    const CopyShape shape = copy_shape(format, job.rows, job.cols, transposed);
    GTP_CHECK(check_bytes("codes", codes, lead, {shape.codes[0], shape.codes[1]}));
    if (format.block_cols) GTP_CHECK(check_bytes("scales", scales, lead, {shape.scales[0], shape.scales[1]}));
    job.count_per_amax = 1;
    if (format.has_amax) GTP_CHECK(check_amax("amax", amax, lead, job.count_per_amax));
    if (x->element_count() == 0) return ffi::Error::Success();
    job.codes = static_cast<const uint8_t*>(codes.untyped_data());
    job.scales = static_cast<const uint8_t*>(scales.untyped_data());
    job.amax = static_cast<const float*>(amax.untyped_data());
    job.x = x->untyped_data();
    job.count = product(lead);
    job.rows_kept = job.count * job.rows;
    job.codes_stride = shape.codes_bytes();
    job.scales_stride = shape.scales_bytes();
    job.x_stride = job.rows * job.cols;
    job.amax_stride = 1;
    job.layout = !columns ? Layout::kRows : transposed ? Layout::kColumns : Layout::kColumnsTransposed;
    return B::run(context, B::dequantize, std::vector<DequantizeJob>{job}, format_code);
  });
}

}  // namespace

GTP_DEFINE_HANDLERS(quantize, quantize,
                    .Arg<ffi::AnyBuffer>()
                        .Arg<ffi::AnyBuffer>()
                        .Arg<ffi::AnyBuffer>()
                        .Arg<ffi::AnyBuffer>()
                        .Ret<ffi::AnyBuffer>()
                        .Ret<ffi::AnyBuffer>()
                        .Ret<ffi::AnyBuffer>()
                        .Ret<ffi::AnyBuffer>()
                        .Attr<int32_t>("format")
                        .Attr<bool>("hadamard")
                        .Attr<bool>("stochastic")
                        .Attr<bool>("rows")
                        .Attr<bool>("columns"));
GTP_DEFINE_HANDLERS(dequantize, dequantize,
                    .Arg<ffi::AnyBuffer>()
                        .Arg<ffi::AnyBuffer>()
                        .Arg<ffi::AnyBuffer>()
                        .Ret<ffi::AnyBuffer>()
                        .Attr<int32_t>("format")
                        .Attr<bool>("columns"));

}  // namespace gtp
