#include "backend.h"
#include "checks.h"

namespace gtp {
namespace {

// arrays: N arrays of float32, bfloat16 or float16 and any shape. parts: the number of equal parts of each array.
// amax: float32, one element per part.
template <class B>
ffi::Error multi_amax(typename B::Context context, ffi::RemainingArgs arrays, ffi::Result<ffi::AnyBuffer> amax,
                      ffi::Span<const int64_t> parts) {
  return guarded([&]() -> ffi::Error {
    if (parts.size() != arrays.size()) return invalid("parts must be one number per array");
    GTP_CHECK(check_f32("amax", *amax));
    // checked before any part is listed, so that the number of parts is bounded by the caller's buffer
    size_t left = amax->element_count();
    for (const int64_t count : parts) {
      if (count < 0 || static_cast<uint64_t>(count) > left) return invalid("amax does not have one element per part");
      left -= count;
    }
    if (left) return invalid("amax does not have one element per part");
    std::vector<Array> found;
    found.reserve(amax->element_count());
    for (size_t i = 0; i < arrays.size(); ++i) {
      const auto array = arrays.get<ffi::AnyBuffer>(i);
      if (!array.has_value()) return array.error();
      DType dtype;
      GTP_CHECK(check_values("array " + std::to_string(i), *array, dtype));
      const int64_t size = static_cast<int64_t>(array->element_count());
      if ((parts[i] == 0 ? size : size % parts[i]) != 0) {
        return invalid("array " + std::to_string(i) + " cannot be divided into " + std::to_string(parts[i]) +
                       " equal parts");
      }
      const auto* data = static_cast<const uint8_t*>(array->untyped_data());
      for (int64_t part = 0; part < parts[i]; ++part) {
        const int64_t each = size / parts[i];
        found.push_back({data + part * each * dtype_bytes(dtype), each, dtype});
      }
    }
    return B::run(context, B::multi_amax, found, static_cast<float*>(amax->untyped_data()));
  });
}

// x: (*lead, M, K). amax: float32 ().
template <class B>
ffi::Error hadamard_amax(typename B::Context context, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> amax) {
  return guarded([&]() -> ffi::Error {
    DType dtype;
    Dims lead;
    int64_t rows, cols;
    GTP_CHECK(check_values("x", x, dtype));
    GTP_CHECK(split_matrix("x", x, lead, rows, cols));
    GTP_CHECK(check_f32("amax", *amax));
    if (amax->element_count() != 1) return invalid("amax has more than one element");
    const Array array{x.untyped_data(), static_cast<int64_t>(x.element_count()), dtype};
    return B::run(context, B::hadamard_amax, array, product(lead), rows, cols,
                  static_cast<float*>(amax->untyped_data()));
  });
}

}  // namespace

GTP_DEFINE_HANDLERS(multi_amax, multi_amax, .RemainingArgs().Ret<ffi::AnyBuffer>().Attr<ffi::Span<const int64_t>>("parts"));
GTP_DEFINE_HANDLERS(hadamard_amax, hadamard_amax, .Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

}  // namespace gtp
