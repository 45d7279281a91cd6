#include "backend.h"
#include "checks.h"

#ifdef GTP_WITH_CUDA

namespace gtp {
namespace {

constexpr int64_t kMost = int64_t{1} << 31;  // of elements along a dimension, and of tiles

ffi::Error check_i32(const char* name, const ffi::AnyBuffer& buffer, int64_t& size) {
  if (buffer.element_type() != ffi::DataType::S32 || buffer.dimensions().size() != 1) {
    return invalid(std::string(name) + " must be int32 of one dimension");
  }
  size = static_cast<int64_t>(buffer.element_count());
  return ffi::Error::Success();
}

ffi::Error check_operand(const char* name, const ffi::AnyBuffer& buffer, size_t dims, int64_t depth) {
  if (buffer.element_type() != ffi::DataType::U8 || buffer.dimensions().size() != dims) {
    return invalid(std::string(name) + " must be uint8 of " + std::to_string(dims) + " dimensions");
  }
  if (buffer.dimensions().back() != depth) return invalid(std::string(name) + " has another depth");
  if (depth % 16 != 0 || reinterpret_cast<uintptr_t>(buffer.untyped_data()) % 16 != 0) {
    return invalid(std::string(name) + " must have rows of a multiple of 16 bytes, aligned to 16");
  }
  for (const int64_t size : buffer.dimensions()) {
    if (size >= kMost) return invalid(std::string(name) + " is too large");
  }
  return ffi::Error::Success();
}

ffi::Error check_out(const ffi::AnyBuffer& out, const Dims& dims, bool& wide) {
  wide = out.element_type() == ffi::DataType::F32;
  if (!wide && out.element_type() != ffi::DataType::BF16) return invalid("the result must be float32 or bfloat16");
  if (dims_of(out) != dims) return invalid("the result has shape " + to_string(dims_of(out)) + ", not " + to_string(dims));
  if (dims.back() % 8 != 0 || reinterpret_cast<uintptr_t>(out.untyped_data()) % 16 != 0) {
    return invalid("the result must have a multiple of 8 columns, aligned to 16 bytes");
  }
  return ffi::Error::Success();
}

ffi::Error check_part(int64_t shards, int64_t part) {
  if (shards > 1 && part % 128 != 0) return invalid("a shard's part of a group must be a multiple of 128");
  return ffi::Error::Success();
}

// left: uint8 (rows, depth). right: uint8 (shards, groups, part, depth). scales: float32 (groups,). tile_groups, starts,
// stops: int32 (tiles,). out: (rows, shards * part).
ffi::Error grouped_product(Cuda::Context context, ffi::AnyBuffer left, ffi::AnyBuffer right, ffi::AnyBuffer scales,
                           ffi::AnyBuffer tile_groups, ffi::AnyBuffer starts, ffi::AnyBuffer stops,
                           ffi::Result<ffi::AnyBuffer> out, bool left_e5m2, bool right_e5m2) {
  return guarded([&]() -> ffi::Error {
    if (left.dimensions().size() != 2) return invalid("left must have 2 dimensions");
    const int64_t rows = left.dimensions()[0], depth = left.dimensions()[1];
    GTP_CHECK(check_operand("left", left, 2, depth));
    GTP_CHECK(check_operand("right", right, 4, depth));
    const int64_t shards = right.dimensions()[0], groups = right.dimensions()[1], part = right.dimensions()[2];
    const int64_t columns = shards * part;
    GTP_CHECK(check_part(shards, part));
    GTP_CHECK(check_f32("scales", scales));
    if (static_cast<int64_t>(scales.element_count()) != groups) return invalid("scales must be one a group");
    int64_t tiles, count;
    GTP_CHECK(check_i32("tile_groups", tile_groups, tiles));
    GTP_CHECK(check_i32("starts", starts, count));
    if (count != tiles) return invalid("starts must be one a tile");
    GTP_CHECK(check_i32("stops", stops, count));
    if (count != tiles) return invalid("stops must be one a tile");
    bool wide;
    GTP_CHECK(check_out(*out, {rows, columns}, wide));
    if (groups * columns >= kMost || tiles * columns >= kMost) return invalid("there are too many tiles");
    if (rows == 0 || columns == 0) return ffi::Error::Success();
    GroupedJob job{};
    job.left = static_cast<const uint8_t*>(left.untyped_data());
    job.right = static_cast<const uint8_t*>(right.untyped_data());
    job.tile_groups = static_cast<const int32_t*>(tile_groups.untyped_data());
    job.starts = static_cast<const int32_t*>(starts.untyped_data());
    job.stops = static_cast<const int32_t*>(stops.untyped_data());
    job.scales = static_cast<const float*>(scales.untyped_data());
    job.out = out->untyped_data();
    job.shards = static_cast<int>(shards);
    job.groups = static_cast<int>(groups);
    job.tiles = static_cast<int>(tiles);
    job.left_rows = static_cast<int>(rows);
    job.columns = static_cast<int>(columns);
    job.depth = static_cast<int>(depth);
    job.left_e5m2 = left_e5m2;
    job.right_e5m2 = right_e5m2;
    job.wide = wide;
    return Cuda::run(context, cuda::grouped_matmul, job);
  });
}

// left: uint8 (rows, depth). right: uint8 (columns, depth). scales: float32 (groups,). starts, stops: int32 (groups,).
// out: (shards * groups, rows / shards, columns).
ffi::Error grouped_outer(Cuda::Context context, ffi::AnyBuffer left, ffi::AnyBuffer right, ffi::AnyBuffer scales,
                         ffi::AnyBuffer starts, ffi::AnyBuffer stops, ffi::Result<ffi::AnyBuffer> out, bool left_e5m2,
                         bool right_e5m2) {
  return guarded([&]() -> ffi::Error {
    if (left.dimensions().size() != 2) return invalid("left must have 2 dimensions");
    const int64_t rows = left.dimensions()[0], depth = left.dimensions()[1];
    GTP_CHECK(check_operand("left", left, 2, depth));
    GTP_CHECK(check_operand("right", right, 2, depth));
    const int64_t columns = right.dimensions()[0];
    GTP_CHECK(check_f32("scales", scales));
    const int64_t groups = static_cast<int64_t>(scales.element_count());
    int64_t count;
    GTP_CHECK(check_i32("starts", starts, count));
    if (count != groups) return invalid("starts must be one a group");
    GTP_CHECK(check_i32("stops", stops, count));
    if (count != groups) return invalid("stops must be one a group");
    bool wide;
    if (out->dimensions().size() != 3) return invalid("the result must have 3 dimensions");
    const int64_t part = out->dimensions()[1], shards = part > 0 ? rows / part : 1;
    if (shards * part != rows) return invalid("the result must have all rows of left");
    GTP_CHECK(check_part(shards, part));
    GTP_CHECK(check_out(*out, {shards * groups, part, columns}, wide));
    if (groups * rows >= kMost || groups * (rows / 128 + 1) * (columns / 256 + 1) >= kMost) {
      return invalid("there are too many tiles");
    }
    if (out->element_count() == 0) return ffi::Error::Success();
    GroupedJob job{};
    job.left = static_cast<const uint8_t*>(left.untyped_data());
    job.right = static_cast<const uint8_t*>(right.untyped_data());
    job.starts = static_cast<const int32_t*>(starts.untyped_data());
    job.stops = static_cast<const int32_t*>(stops.untyped_data());
    job.scales = static_cast<const float*>(scales.untyped_data());
    job.out = out->untyped_data();
    job.shards = static_cast<int>(shards);
    job.groups = static_cast<int>(groups);
    job.rows = static_cast<int>(rows);
    job.columns = static_cast<int>(columns);
    job.depth = static_cast<int>(depth);
    job.outer = true;
    job.left_e5m2 = left_e5m2;
    job.right_e5m2 = right_e5m2;
    job.wide = wide;
    return Cuda::run(context, cuda::grouped_matmul, job);
  });
}

// rows: uint8 (rows, cols). starts, stops: int32 (tiles,), of rows; a tile has at most 128. out: uint8 (matrices, cols,
// 128 * tiles of each).
ffi::Error transpose(Cuda::Context context, ffi::AnyBuffer rows, ffi::AnyBuffer starts, ffi::AnyBuffer stops,
                     ffi::Result<ffi::AnyBuffer> out) {
  return guarded([&]() -> ffi::Error {
    if (rows.dimensions().size() != 2) return invalid("rows must have 2 dimensions");
    const int64_t cols = rows.dimensions()[1];
    GTP_CHECK(check_operand("rows", rows, 2, cols));
    int64_t tiles, count;
    GTP_CHECK(check_i32("starts", starts, tiles));
    GTP_CHECK(check_i32("stops", stops, count));
    if (count != tiles) return invalid("stops must be one a tile");
    if (out->dimensions().size() != 3) return invalid("the result must have 3 dimensions");
    const int64_t matrices = out->dimensions()[0], each = out->dimensions()[2] / 128;
    GTP_CHECK(check_bytes("the result", *out, {}, {matrices, cols, each * 128}));
    if (matrices * each != tiles) return invalid("the result must have 128 columns a tile");
    if (tiles * (cols / 128 + 1) >= kMost) return invalid("there are too many tiles");
    if (out->element_count() == 0) return ffi::Error::Success();
    TransposeJob job{};
    job.rows = static_cast<const uint8_t*>(rows.untyped_data());
    job.starts = static_cast<const int32_t*>(starts.untyped_data());
    job.stops = static_cast<const int32_t*>(stops.untyped_data());
    job.out = static_cast<uint8_t*>(out->untyped_data());
    job.cols = cols;
    job.tiles = static_cast<int>(tiles);
    job.tiles_each = static_cast<int>(each);
    return Cuda::run(context, cuda::transpose, job);
  });
}

}  // namespace

GTP_DEFINE_CUDA_HANDLER(transpose, transpose, .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
                        .Ret<ffi::AnyBuffer>());
GTP_DEFINE_CUDA_HANDLER(grouped_product, grouped_product, .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
                        .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()
                        .Attr<bool>("left_e5m2").Attr<bool>("right_e5m2"));
GTP_DEFINE_CUDA_HANDLER(grouped_outer, grouped_outer, .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
                        .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()
                        .Attr<bool>("left_e5m2").Attr<bool>("right_e5m2"));

}  // namespace gtp

#endif
