#include "backend.h"
#include "checks.h"

#ifdef GTP_WITH_CUDA

namespace gtp {
namespace {

constexpr int64_t kBlock = 128;
constexpr int64_t kMost = int64_t{1} << 30;  // limit for elements along a dimension, and for tiles

ffi::Error check_i32(const char* name, const ffi::AnyBuffer& buffer, int64_t& size) {
  if (buffer.element_type() != ffi::DataType::S32 || buffer.dimensions().size() != 1) {
    return invalid(std::string(name) + " must be int32 with one dimension");
  }
  size = static_cast<int64_t>(buffer.element_count());
  return ffi::Error::Success();
}

ffi::Error check_factor(const char* name, const ffi::AnyBuffer& buffer, bool e5m2, Factor& factor) {
  switch (buffer.element_type()) {
    case ffi::DataType::U8: factor = e5m2 ? Factor::kE5M2 : Factor::kE4M3; return ffi::Error::Success();
    case ffi::DataType::BF16: factor = Factor::kBF16; return ffi::Error::Success();
    case ffi::DataType::F16: factor = Factor::kF16; return ffi::Error::Success();
    default: return invalid(std::string(name) + " must be uint8, bfloat16 or float16");
  }
}

bool is_codes(Factor factor) { return factor == Factor::kE4M3 || factor == Factor::kE5M2; }

// Checks that the tensor memory accelerator can copy the rows of a buffer.
ffi::Error check_rows(const char* name, const ffi::AnyBuffer& buffer, size_t dims) {
  if (buffer.dimensions().size() != dims) {
    return invalid(std::string(name) + " must have " + std::to_string(dims) + " dimensions");
  }
  const int64_t bytes = static_cast<int64_t>(ffi::ByteWidth(buffer.element_type())) * buffer.dimensions().back();
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(buffer.untyped_data()) % 16 != 0) {
    return invalid(std::string(name) + " must be aligned to 16 bytes, and its rows must be a multiple of 16 bytes");
  }
  for (const int64_t size : buffer.dimensions()) {
    if (size >= kMost) return invalid(std::string(name) + " is too large");
  }
  return ffi::Error::Success();
}

ffi::Error check_operands(const ffi::AnyBuffer& left, const ffi::AnyBuffer& right, size_t right_dims, bool left_e5m2,
                          bool right_e5m2, GroupedJob& job) {
  GTP_CHECK(check_factor("left", left, left_e5m2, job.left_factor));
  GTP_CHECK(check_factor("right", right, right_e5m2, job.right_factor));
  if (left.element_type() != right.element_type()) return invalid("left and right must have the same dtype");
  GTP_CHECK(check_rows("left", left, 2));
  return check_rows("right", right, right_dims);
}

// Checks operands of e4m3 codes.
ffi::Error check_codes(const ffi::AnyBuffer& left, const ffi::AnyBuffer& right, size_t right_dims, GroupedJob& job) {
  GTP_CHECK(check_operands(left, right, right_dims, false, false, job));
  return is_codes(job.left_factor) ? ffi::Error::Success() : invalid("left and right must be uint8");
}

// Checks scales that the tensor memory accelerator copies.
ffi::Error check_lines(const char* name, const ffi::AnyBuffer& buffer, const Dims& dims) {
  GTP_CHECK(check_f32(name, buffer, dims));
  return check_rows(name, buffer, 2);
}

ffi::Error check_bytes_of_rows(const char* name, const ffi::AnyBuffer& buffer) {
  if (buffer.element_type() != ffi::DataType::U8) return invalid(std::string(name) + " must be uint8");
  return check_rows(name, buffer, 2);
}

ffi::Error check_out(const ffi::AnyBuffer& out, const Dims& dims, Factor factor, bool& wide) {
  wide = out.element_type() == ffi::DataType::F32;
  const auto narrow = factor == Factor::kF16 ? ffi::DataType::F16 : ffi::DataType::BF16;
  if (!wide && out.element_type() != narrow) {
    return invalid(factor == Factor::kF16 ? "the result must be float32 or float16" : "the result must be float32 or bfloat16");
  }
  if (dims_of(out) != dims) return invalid("the result has shape " + to_string(dims_of(out)) + ", not " + to_string(dims));
  if (dims.back() % 8 != 0 || reinterpret_cast<uintptr_t>(out.untyped_data()) % 16 != 0) {
    return invalid("the result must have a multiple of 8 columns, aligned to 16 bytes");
  }
  return ffi::Error::Success();
}

// With several shards, the kernel copies boxes of at least 8 lines, none of which may span two shards.
ffi::Error check_part(int64_t shards, int64_t part) {
  if (shards > 1 && part % 8 != 0) return invalid("a shard's part of a group must be a multiple of 8");
  return ffi::Error::Success();
}

ffi::Error check_scales(const ffi::AnyBuffer& scales, int64_t groups, const float*& data) {
  GTP_CHECK(check_f32("scales", scales));
  const int64_t count = static_cast<int64_t>(scales.element_count());
  if (count != groups && count != 0) return invalid("scales must have one element per group, or none");
  data = count == 0 ? nullptr : static_cast<const float*>(scales.untyped_data());
  return ffi::Error::Success();
}

// Checks what products of all kinds have in common, and fills in their jobs. With `backward`, left is (rows, shards *
// part), right is (shards, groups, part, columns) and out is (rows, columns).
ffi::Error check_product(const ffi::AnyBuffer& left, const ffi::AnyBuffer& right, const ffi::AnyBuffer& tile_groups,
                         const ffi::AnyBuffer& starts, const ffi::AnyBuffer& stops, ffi::AnyBuffer& out, bool backward,
                         GroupedJob& job) {
  const int64_t rows = left.dimensions()[0], depth = left.dimensions()[1];
  const int64_t shards = right.dimensions()[0], groups = right.dimensions()[1], part = right.dimensions()[2];
  const int64_t columns = backward ? right.dimensions()[3] : shards * part;
  if (depth != (backward ? shards * part : right.dimensions()[3])) return invalid("left and right differ in depth");
  GTP_CHECK(check_part(shards, part));
  int64_t tiles, count;
  GTP_CHECK(check_i32("tile_groups", tile_groups, tiles));
  GTP_CHECK(check_i32("starts", starts, count));
  if (count != tiles) return invalid("starts must have one element per tile");
  GTP_CHECK(check_i32("stops", stops, count));
  if (count != tiles) return invalid("stops must have one element per tile");
  GTP_CHECK(check_out(out, {rows, columns}, job.left_factor, job.wide));
  if (shards * groups >= kMost || shards * part >= kMost || tiles * (columns / 256 + 1) >= kMost) {
    return invalid("there are too many tiles");
  }
  job.left = left.untyped_data();
  job.right = right.untyped_data();
  job.tile_groups = static_cast<const int32_t*>(tile_groups.untyped_data());
  job.starts = static_cast<const int32_t*>(starts.untyped_data());
  job.stops = static_cast<const int32_t*>(stops.untyped_data());
  job.out = out.untyped_data();
  job.shards = static_cast<int>(shards);
  job.groups = static_cast<int>(groups);
  job.tiles = static_cast<int>(tiles);
  job.left_rows = static_cast<int>(rows);
  job.columns = static_cast<int>(columns);
  job.depth = static_cast<int>(depth);
  job.backward = backward;
  return ffi::Error::Success();
}

// left: (rows, depth). right: (shards, groups, part, depth). scales: float32 (groups,) or (0,). tile_groups, starts,
// stops: int32 (tiles,). out: (rows, shards * part). `backward`, as in `check_product`, supports values only, not codes.
ffi::Error grouped_product(Cuda::Context context, ffi::AnyBuffer left, ffi::AnyBuffer right, ffi::AnyBuffer scales,
                           ffi::AnyBuffer tile_groups, ffi::AnyBuffer starts, ffi::AnyBuffer stops,
                           ffi::Result<ffi::AnyBuffer> out, bool left_e5m2, bool right_e5m2, bool backward) {
  return guarded([&]() -> ffi::Error {
    GroupedJob job{};
    GTP_CHECK(check_operands(left, right, 4, left_e5m2, right_e5m2, job));
    if (backward && is_codes(job.left_factor)) return invalid("backward does not support FP8 codes");
    GTP_CHECK(check_product(left, right, tile_groups, starts, stops, *out, backward, job));
    GTP_CHECK(check_scales(scales, job.groups, job.scales));
    if (job.wide && !is_codes(job.left_factor)) return invalid("the result must have the dtype of left");
    if (out->element_count() == 0) return ffi::Error::Success();
    return Cuda::run(context, cuda::grouped_matmul, job);
  });
}

// left: e4m3 codes (rows, depth). left_scales: float32 (ceil(depth / 128), rows rounded up to 4). right: e4m3 codes
// (shards, groups, part, depth). right_scales: float32 (groups, ceil(shards * part / 128), ceil(depth / 128)).
// tile_groups, starts, stops: int32 (tiles,). out: (rows, shards * part).
ffi::Error grouped_blocked_product(Cuda::Context context, ffi::AnyBuffer left, ffi::AnyBuffer left_scales,
                                   ffi::AnyBuffer right, ffi::AnyBuffer right_scales, ffi::AnyBuffer tile_groups,
                                   ffi::AnyBuffer starts, ffi::AnyBuffer stops, ffi::Result<ffi::AnyBuffer> out) {
  return guarded([&]() -> ffi::Error {
    GroupedJob job{};
    GTP_CHECK(check_codes(left, right, 4, job));
    GTP_CHECK(check_product(left, right, tile_groups, starts, stops, *out, false, job));
    const int64_t blocks = ceil_div(job.depth, kBlock);
    GTP_CHECK(check_lines("left_scales", left_scales, {blocks, round_up(job.left_rows, 4)}));
    GTP_CHECK(check_f32("right_scales", right_scales, {job.groups, ceil_div(job.columns, kBlock), blocks}));
    if (out->element_count() == 0) return ffi::Error::Success();
    if (blocks == 0) return invalid("the contraction must not be empty");
    job.left_scales = static_cast<const float*>(left_scales.untyped_data());
    job.right_scales = static_cast<const float*>(right_scales.untyped_data());
    return Cuda::run(context, cuda::grouped_blocked_matmul, job);
  });
}

// Checks what sums of all kinds over groups' rows have in common, and fills in their jobs.
ffi::Error check_outer(const ffi::AnyBuffer& left, const ffi::AnyBuffer& right, const ffi::AnyBuffer& starts,
                       const ffi::AnyBuffer& stops, ffi::AnyBuffer& out, GroupedJob& job) {
  const int along = is_codes(job.left_factor) ? 1 : 0;  // the contracted dimension
  const int64_t depth = left.dimensions()[along], rows = left.dimensions()[1 - along];
  const int64_t columns = right.dimensions()[1 - along];
  if (right.dimensions()[along] != depth) return invalid("left and right differ in depth");
  int64_t groups, count;
  GTP_CHECK(check_i32("starts", starts, groups));
  GTP_CHECK(check_i32("stops", stops, count));
  if (count != groups) return invalid("starts and stops must have one element per group");
  if (out.dimensions().size() != 3) return invalid("the result must have 3 dimensions");
  const int64_t part = out.dimensions()[1], shards = part > 0 ? rows / part : 1;
  if (shards * part != rows) return invalid("the result's shards must add up to the rows of left");
  GTP_CHECK(check_out(out, {shards * groups, part, columns}, job.left_factor, job.wide));
  if (groups * (rows / 128 + 1) * (columns / 256 + 1) >= kMost) return invalid("there are too many tiles");
  job.left = left.untyped_data();
  job.right = right.untyped_data();
  job.starts = static_cast<const int32_t*>(starts.untyped_data());
  job.stops = static_cast<const int32_t*>(stops.untyped_data());
  job.out = out.untyped_data();
  job.shards = static_cast<int>(shards);
  job.groups = static_cast<int>(groups);
  job.rows = static_cast<int>(rows);
  job.columns = static_cast<int>(columns);
  job.depth = static_cast<int>(depth);
  job.outer = true;
  return ffi::Error::Success();
}

// left: codes (rows, depth) or values (depth, rows). right: codes (columns, depth) or values (depth, columns). scales:
// float32 (groups,) or (0,). starts, stops: int32 (groups,), positions along depth; multiples of 128 for codes. out:
// (shards * groups, rows / shards, columns).
ffi::Error grouped_outer(Cuda::Context context, ffi::AnyBuffer left, ffi::AnyBuffer right, ffi::AnyBuffer scales,
                         ffi::AnyBuffer starts, ffi::AnyBuffer stops, ffi::Result<ffi::AnyBuffer> out, bool left_e5m2,
                         bool right_e5m2) {
  return guarded([&]() -> ffi::Error {
    GroupedJob job{};
    GTP_CHECK(check_operands(left, right, 2, left_e5m2, right_e5m2, job));
    GTP_CHECK(check_outer(left, right, starts, stops, *out, job));
    GTP_CHECK(check_scales(scales, job.groups, job.scales));
    if (out->element_count() == 0) return ffi::Error::Success();
    return Cuda::run(context, cuda::grouped_matmul, job);
  });
}

// left: e4m3 codes (rows, depth). left_scales: float32 (depth / 128, rows). right, right_scales: the same with columns
// instead of rows. depth: a multiple of 128. starts, stops, out: as in `grouped_outer`.
ffi::Error grouped_blocked_outer(Cuda::Context context, ffi::AnyBuffer left, ffi::AnyBuffer left_scales,
                                 ffi::AnyBuffer right, ffi::AnyBuffer right_scales, ffi::AnyBuffer starts,
                                 ffi::AnyBuffer stops, ffi::Result<ffi::AnyBuffer> out) {
  return guarded([&]() -> ffi::Error {
    GroupedJob job{};
    GTP_CHECK(check_codes(left, right, 2, job));
    GTP_CHECK(check_outer(left, right, starts, stops, *out, job));
    if (job.depth % kBlock != 0) return invalid("the contraction must be a multiple of 128");
    GTP_CHECK(check_lines("left_scales", left_scales, {job.depth / kBlock, job.rows}));
    GTP_CHECK(check_lines("right_scales", right_scales, {job.depth / kBlock, job.columns}));
    if (out->element_count() == 0) return ffi::Error::Success();
    if (job.depth == 0) return invalid("the contraction must not be empty");
    job.left_scales = static_cast<const float*>(left_scales.untyped_data());
    job.right_scales = static_cast<const float*>(right_scales.untyped_data());
    return Cuda::run(context, cuda::grouped_blocked_matmul, job);
  });
}

// Checks the dtype and shape of the row numbers of places: int32 (places,), or (0,) if the places are the rows
// themselves. Finds their number, and the row numbers if there are any.
ffi::Error check_index(const ffi::AnyBuffer& index, const int32_t*& data, int64_t& count) {
  GTP_CHECK(check_i32("index", index, count));
  data = count == 0 ? nullptr : static_cast<const int32_t*>(index.untyped_data());
  return ffi::Error::Success();
}

// rows: uint8 (rows, cols). index: int32 (places,) or (0,). starts, stops: int32 (tiles,), in places; a tile has at
// most 128 places. out: uint8 (matrices, cols, 128 * tiles per matrix).
ffi::Error transpose(Cuda::Context context, ffi::AnyBuffer rows, ffi::AnyBuffer index, ffi::AnyBuffer starts,
                     ffi::AnyBuffer stops, ffi::Result<ffi::AnyBuffer> out) {
  return guarded([&]() -> ffi::Error {
    GTP_CHECK(check_bytes_of_rows("rows", rows));
    const int64_t cols = rows.dimensions()[1];
    TransposeJob job{};
    int64_t tiles, count;
    GTP_CHECK(check_index(index, job.index, count));
    GTP_CHECK(check_i32("starts", starts, tiles));
    GTP_CHECK(check_i32("stops", stops, count));
    if (count != tiles) return invalid("stops must have one element per tile");
    if (out->dimensions().size() != 3) return invalid("the result must have 3 dimensions");
    const int64_t matrices = out->dimensions()[0], each = out->dimensions()[2] / 128;
    GTP_CHECK(check_bytes("the result", *out, {}, {matrices, cols, each * 128}));
    if (matrices * each != tiles) return invalid("the result must have 128 columns per tile");
    if (tiles * (cols / 128 + 1) >= kMost) return invalid("there are too many tiles");
    if (out->element_count() == 0) return ffi::Error::Success();
    job.rows = static_cast<const uint8_t*>(rows.untyped_data());
    job.starts = static_cast<const int32_t*>(starts.untyped_data());
    job.stops = static_cast<const int32_t*>(stops.untyped_data());
    job.out = static_cast<uint8_t*>(out->untyped_data());
    job.cols = cols;
    job.height = rows.dimensions()[0];
    job.tiles = static_cast<int>(tiles);
    job.tiles_each = static_cast<int>(each);
    return Cuda::run(context, cuda::transpose, job);
  });
}

// rows: (rows, cols) of any dtype, with rows of a multiple of 16 bytes. index: int32 (places,). out: (places, cols),
// with zeros where the index is not that of a row.
ffi::Error take(Cuda::Context context, ffi::AnyBuffer rows, ffi::AnyBuffer index, ffi::Result<ffi::AnyBuffer> out) {
  return guarded([&]() -> ffi::Error {
    GTP_CHECK(check_rows("rows", rows, 2));
    TakeJob job{};
    GTP_CHECK(check_i32("index", index, job.count));
    if (out->element_type() != rows.element_type()) return invalid("the result must have the dtype of rows");
    const Dims dims = {job.count, rows.dimensions()[1]};
    if (dims_of(*out) != dims) return invalid("the result has shape " + to_string(dims_of(*out)) + ", not " + to_string(dims));
    if (reinterpret_cast<uintptr_t>(out->untyped_data()) % 16 != 0) return invalid("the result must be aligned to 16 bytes");
    if (job.count >= kMost) return invalid("there are too many places");
    if (out->element_count() == 0) return ffi::Error::Success();
    job.rows = rows.untyped_data();
    job.index = static_cast<const int32_t*>(index.untyped_data());
    job.out = out->untyped_data();
    job.height = rows.dimensions()[0];
    job.pieces = static_cast<int>(rows.dimensions()[1] * static_cast<int64_t>(ffi::ByteWidth(rows.element_type())) / 16);
    return Cuda::run(context, cuda::take, job);
  });
}

}  // namespace

GTP_DEFINE_CUDA_HANDLER(take, take, .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
GTP_DEFINE_CUDA_HANDLER(transpose, transpose, .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
                        .Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
GTP_DEFINE_CUDA_HANDLER(grouped_product, grouped_product, .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
                        .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()
                        .Attr<bool>("left_e5m2").Attr<bool>("right_e5m2").Attr<bool>("backward"));
GTP_DEFINE_CUDA_HANDLER(grouped_outer, grouped_outer, .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
                        .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()
                        .Attr<bool>("left_e5m2").Attr<bool>("right_e5m2"));
GTP_DEFINE_CUDA_HANDLER(grouped_blocked_product, grouped_blocked_product, .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
                        .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
                        .Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
GTP_DEFINE_CUDA_HANDLER(grouped_blocked_outer, grouped_blocked_outer, .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
                        .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
                        .Ret<ffi::AnyBuffer>());

}  // namespace gtp

#endif
