#include "backend.h"
#include "checks.h"

namespace gtp {
namespace {

// arrays: N of float32, bfloat16 or float16, any shapes. amax: float32 (N,).
template <class B>
ffi::Error multi_amax(typename B::Context context, ffi::RemainingArgs arrays, ffi::Result<ffi::AnyBuffer> amax) {
  return guarded([&]() -> ffi::Error {
    std::vector<Array> found;
    for (size_t i = 0; i < arrays.size(); ++i) {
      const auto array = arrays.get<ffi::AnyBuffer>(i);
      if (!array.has_value()) return array.error();
      DType dtype;
      GTP_CHECK(check_values("array " + std::to_string(i), *array, dtype));
      found.push_back({array->untyped_data(), static_cast<int64_t>(array->element_count()), dtype});
    }
    GTP_CHECK(check_f32("amax", *amax));
    if (amax->element_count() != found.size()) return invalid("amax has not one element an array");
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

GTP_DEFINE_HANDLERS(multi_amax, multi_amax, .RemainingArgs().Ret<ffi::AnyBuffer>());
GTP_DEFINE_HANDLERS(hadamard_amax, hadamard_amax, .Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

}  // namespace gtp
