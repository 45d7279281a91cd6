#include "checks.h"

#include <algorithm>

namespace gtp {

std::string to_string(const Dims& dims) {
  std::string text = "(";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + ")";
}

Dims dims_of(const ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return Dims(dims.begin(), dims.end());
}

int64_t product(const Dims& dims) {
  int64_t n = 1;
  for (const int64_t dim : dims) n *= dim;
  return n;
}

ffi::Error invalid(const std::string& message) { return ffi::Error::InvalidArgument("gtp: " + message); }

ffi::Error split_matrix(const char* name, const ffi::AnyBuffer& buffer, Dims& lead, int64_t& rows, int64_t& cols) {
  lead = dims_of(buffer);
  if (lead.size() < 2) {
    return invalid(std::string(name) + " has shape " + to_string(lead) + "; it must have at least two dimensions");
  }
  cols = lead.back();
  lead.pop_back();
  rows = lead.back();
  lead.pop_back();
  return ffi::Error::Success();
}

ffi::Error check_format(int32_t format) {
  if (format >= 0 && format < kFormatCount) return ffi::Error::Success();
  return invalid("format is " + std::to_string(format) + "; it must be from 0 to " + std::to_string(kFormatCount - 1));
}

ffi::Error check_values(const std::string& name, const ffi::AnyBuffer& buffer, DType& dtype) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32:
      dtype = DType::kF32;
      break;
    case ffi::DataType::BF16:
      dtype = DType::kBF16;
      break;
    case ffi::DataType::F16:
      dtype = DType::kF16;
      break;
    default:
      return invalid(name + " has XLA's element type " + std::to_string(static_cast<int>(buffer.element_type())) +
                     "; it must be float32, bfloat16 or float16");
  }
  if (reinterpret_cast<uintptr_t>(buffer.untyped_data()) % dtype_bytes(dtype)) {
    return invalid(name + " is not aligned to the size of its elements");
  }
  return ffi::Error::Success();
}

ffi::Error check_bytes(const char* name, const ffi::AnyBuffer& buffer, const Dims& lead,
                       std::initializer_list<int64_t> matrix) {
  if (buffer.element_type() != ffi::DataType::U8) return invalid(std::string(name) + " is not uint8");
  Dims expected = lead;
  expected.insert(expected.end(), matrix);
  if (dims_of(buffer) == expected) return ffi::Error::Success();
  return invalid(std::string(name) + " has shape " + to_string(dims_of(buffer)) + "; it must be " +
                 to_string(expected));
}

ffi::Error check_f32(const char* name, const ffi::AnyBuffer& buffer) {
  if (buffer.element_type() != ffi::DataType::F32) return invalid(std::string(name) + " is not float32");
  if (reinterpret_cast<uintptr_t>(buffer.untyped_data()) % 4) return invalid(std::string(name) + " is not aligned");
  return ffi::Error::Success();
}

ffi::Error check_f32(const char* name, const ffi::AnyBuffer& buffer, const Dims& dims) {
  GTP_CHECK(check_f32(name, buffer));
  if (dims_of(buffer) == dims) return ffi::Error::Success();
  return invalid(std::string(name) + " has shape " + to_string(dims_of(buffer)) + ", not " + to_string(dims));
}

ffi::Error check_amax(const char* name, const ffi::AnyBuffer& amax, const Dims& lead, int64_t& count_per_amax) {
  GTP_CHECK(check_f32(name, amax));
  const Dims dims = dims_of(amax);
  if (dims.size() > lead.size() || !std::equal(dims.begin(), dims.end(), lead.begin())) {
    return invalid(std::string(name) + " has shape " + to_string(dims) +
                   "; it must be the first of the leading dimensions " + to_string(lead));
  }
  count_per_amax = std::max<int64_t>(1, product(Dims(lead.begin() + dims.size(), lead.end())));
  return ffi::Error::Success();
}

CopyShape copy_shape(const Format& format, int64_t rows, int64_t cols, bool transposed) {
  CopyShape shape{{rows, format.code_bytes(cols)}, {0, 0}};
  if (format.block_cols) {
    shape.scales[0] = ceil_div(rows, format.block_rows);
    shape.scales[1] = ceil_div(cols, format.block_cols);
  }
  if (transposed) {
    std::swap(shape.codes[0], shape.codes[1]);
    std::swap(shape.scales[0], shape.scales[1]);
  }
  return shape;
}

}  // namespace gtp
