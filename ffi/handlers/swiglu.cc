#include "backend.h"
#include "checks.h"

#ifdef GTP_WITH_CUDA

namespace gtp {
namespace {

// Fills in gate_up, (rows, parts * 2 * width), and the gradient of hidden, (rows, parts * width); (0,) if there is none.
ffi::Error check_operands(const ffi::AnyBuffer& gate_up, const ffi::AnyBuffer& gradient, int64_t parts, bool backward,
                          SwigluJob& job) {
  GTP_CHECK(check_values("gate_up", gate_up, job.dtype));
  const Dims dims = dims_of(gate_up);
  if (dims.size() != 2) return invalid("gate_up has shape " + to_string(dims) + "; it must have 2 dimensions");
  if (parts < 1 || dims[1] % 2 || dims[1] / 2 % parts) {
    return invalid("gate_up has " + std::to_string(dims[1]) + " columns, which cannot be divided into " +
                   std::to_string(parts) + " parts of a gate and as wide an up");
  }
  job.gate_up = gate_up.untyped_data();
  job.rows = dims[0];
  job.parts = parts;
  job.width = dims[1] / 2 / parts;
  if (!backward) return ffi::Error::Success();
  DType dtype;
  GTP_CHECK(check_values("gradient", gradient, dtype));
  if (dtype != job.dtype) return invalid("gradient has another dtype than gate_up");
  const Dims hidden = {job.rows, parts * job.width};
  if (dims_of(gradient) != hidden) {
    return invalid("gradient has shape " + to_string(dims_of(gradient)) + "; it must be " + to_string(hidden));
  }
  job.gradient = gradient.untyped_data();
  return ffi::Error::Success();
}

// Fills in the scale and the format of codes, which must be FP8 with a single scale.
ffi::Error check_codes(const char* name, const ffi::AnyBuffer& amax, int32_t format, TensorCodes& codes) {
  GTP_CHECK(check_format(format));
  const Format& its = kFormats[format];
  if (its.scale != ScaleType::kNone) {
    return invalid(std::string("the format of ") + name + " is " + its.name + "; it must have one scale per tensor");
  }
  GTP_CHECK(check_f32(name, amax, {}));
  codes = {static_cast<const float*>(amax.untyped_data()), its.largest(), its.element == Element::kE5M2};
  return ffi::Error::Success();
}

// gate_up: see above. gradient: that of hidden, or (0,). amax: float32 (), of hidden; with a gradient, of the gradient
// of gate_up.
ffi::Error swiglu_amax(Cuda::Context context, ffi::AnyBuffer gate_up, ffi::AnyBuffer gradient,
                       ffi::Result<ffi::AnyBuffer> amax, int64_t parts, bool backward) {
  return guarded([&]() -> ffi::Error {
    SwigluJob job{};
    GTP_CHECK(check_operands(gate_up, gradient, parts, backward, job));
    GTP_CHECK(check_f32("amax", *amax, {}));
    return Cuda::run(context, cuda::swiglu_amax, job, static_cast<float*>(amax->untyped_data()));
  });
}

// amax: float32 (), of hidden. codes: uint8 (rows, parts * width).
ffi::Error swiglu_quantize(Cuda::Context context, ffi::AnyBuffer gate_up, ffi::AnyBuffer amax,
                           ffi::Result<ffi::AnyBuffer> codes, int32_t format, int64_t parts) {
  return guarded([&]() -> ffi::Error {
    SwigluJob job{};
    GTP_CHECK(check_operands(gate_up, gate_up, parts, false, job));
    GTP_CHECK(check_codes("amax", amax, format, job.of_hidden));
    GTP_CHECK(check_bytes("codes", *codes, {}, {job.rows, parts * job.width}));
    job.hidden_codes = static_cast<uint8_t*>(codes->untyped_data());
    return Cuda::run(context, cuda::swiglu_quantize, job);
  });
}

// amax: float32 (), of hidden. gradient_amax: float32 (), of the gradient of gate_up. hidden_codes: uint8
// (parts * width, rows). row_codes: uint8 (rows, parts * 2 * width), of that gradient. column_codes: their transpose.
ffi::Error swiglu_quantize_gradient(Cuda::Context context, ffi::AnyBuffer gate_up, ffi::AnyBuffer gradient,
                                    ffi::AnyBuffer amax, ffi::AnyBuffer gradient_amax,
                                    ffi::Result<ffi::AnyBuffer> hidden_codes, ffi::Result<ffi::AnyBuffer> row_codes,
                                    ffi::Result<ffi::AnyBuffer> column_codes, int32_t format, int32_t gradient_format,
                                    int64_t parts) {
  return guarded([&]() -> ffi::Error {
    SwigluJob job{};
    GTP_CHECK(check_operands(gate_up, gradient, parts, true, job));
    GTP_CHECK(check_codes("amax", amax, format, job.of_hidden));
    GTP_CHECK(check_codes("gradient_amax", gradient_amax, gradient_format, job.of_gradient));
    const int64_t width = parts * job.width;
    GTP_CHECK(check_bytes("hidden_codes", *hidden_codes, {}, {width, job.rows}));
    GTP_CHECK(check_bytes("row_codes", *row_codes, {}, {job.rows, 2 * width}));
    GTP_CHECK(check_bytes("column_codes", *column_codes, {}, {2 * width, job.rows}));
    job.hidden_codes = static_cast<uint8_t*>(hidden_codes->untyped_data());
    job.row_codes = static_cast<uint8_t*>(row_codes->untyped_data());
    job.column_codes = static_cast<uint8_t*>(column_codes->untyped_data());
    return Cuda::run(context, cuda::swiglu_quantize, job);
  });
}

}  // namespace

GTP_DEFINE_CUDA_HANDLER(swiglu_amax, swiglu_amax, .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()
                        .Attr<int64_t>("parts").Attr<bool>("backward"));
GTP_DEFINE_CUDA_HANDLER(swiglu_quantize, swiglu_quantize, .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
                        .Ret<ffi::AnyBuffer>().Attr<int32_t>("format").Attr<int64_t>("parts"));
GTP_DEFINE_CUDA_HANDLER(swiglu_quantize_gradient, swiglu_quantize_gradient, .Arg<ffi::AnyBuffer>()
                        .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()
                        .Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attr<int32_t>("format")
                        .Attr<int32_t>("gradient_format").Attr<int64_t>("parts"));

}  // namespace gtp

#endif
