#include "backend.h"
#include "checks.h"

#ifdef GTP_WITH_CUDA

namespace gtp {
namespace {

constexpr int64_t kBlock = 128;
constexpr int64_t kMost = int64_t{1} << 30;

ffi::Error check_whole(const char* name, const ffi::AnyBuffer& buffer) {
  if (buffer.dimensions().size() != 2) return invalid(std::string(name) + " must have 2 dimensions");
  for (const int64_t size : buffer.dimensions()) {
    if (size % kBlock != 0 || size >= kMost) return invalid(std::string(name) + " must have sizes of multiples of 128");
  }
  if (reinterpret_cast<uintptr_t>(buffer.untyped_data()) % 16 != 0) {
    return invalid(std::string(name) + " must be aligned to 16 bytes");
  }
  return ffi::Error::Success();
}

// x: (rows, cols). row_codes: uint8 (rows, cols). row_scales: float32 (cols / 128, rows). column_codes: uint8
// (cols, rows). column_scales: float32 (rows / 128, cols). A copy that is not requested has shape (0,) twice.
ffi::Error quantize_runs(Cuda::Context context, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> row_codes,
                         ffi::Result<ffi::AnyBuffer> row_scales, ffi::Result<ffi::AnyBuffer> column_codes,
                         ffi::Result<ffi::AnyBuffer> column_scales, bool rows, bool columns) {
  return guarded([&]() -> ffi::Error {
    RunsJob job{};
    GTP_CHECK(check_values("x", x, job.dtype));
    GTP_CHECK(check_whole("x", x));
    job.rows = x.dimensions()[0];
    job.cols = x.dimensions()[1];
    if (!rows && !columns) return invalid("at least one copy must be requested");
    if (rows) {
      GTP_CHECK(check_bytes("row_codes", *row_codes, {}, {job.rows, job.cols}));
      GTP_CHECK(check_f32("row_scales", *row_scales, {job.cols / kBlock, job.rows}));
    }
    if (columns) {
      GTP_CHECK(check_bytes("column_codes", *column_codes, {}, {job.cols, job.rows}));
      GTP_CHECK(check_f32("column_scales", *column_scales, {job.rows / kBlock, job.cols}));
    }
    if (job.rows / kBlock * (job.cols / kBlock) >= kMost) return invalid("x is too large");
    if (x.element_count() == 0) return ffi::Error::Success();
    job.x = x.untyped_data();
    if (rows) {
      job.row_codes = static_cast<uint8_t*>(row_codes->untyped_data());
      job.row_scales = static_cast<float*>(row_scales->untyped_data());
    }
    if (columns) {
      job.column_codes = static_cast<uint8_t*>(column_codes->untyped_data());
      job.column_scales = static_cast<float*>(column_scales->untyped_data());
    }
    return Cuda::run(context, cuda::quantize_runs, job);
  });
}

// left: uint8 (rows, depth). left_scales: float32 (depth / 128, rows). right: uint8 (columns, depth). right_scales:
// float32 (depth / 128, columns), or of tiles (columns / 128, depth / 128 rounded up to 4). out: (rows, columns).
ffi::Error blocked_product(Cuda::Context context, ffi::AnyBuffer left, ffi::AnyBuffer left_scales, ffi::AnyBuffer right,
                           ffi::AnyBuffer right_scales, ffi::Result<ffi::AnyBuffer> out,
                           ffi::Result<ffi::AnyBuffer> workspace, bool tiles) {
  return guarded([&]() -> ffi::Error {
    BlockedJob job{};
    GTP_CHECK(check_whole("left", left));
    GTP_CHECK(check_whole("right", right));
    job.rows = left.dimensions()[0];
    job.depth = left.dimensions()[1];
    job.columns = right.dimensions()[0];
    job.tiles = tiles;
    GTP_CHECK(check_bytes("left", left, {}, {job.rows, job.depth}));
    GTP_CHECK(check_bytes("right", right, {}, {job.columns, job.depth}));
    const int64_t blocks = job.depth / kBlock;
    GTP_CHECK(check_f32("left_scales", left_scales, {blocks, job.rows}));
    GTP_CHECK(check_f32("right_scales", right_scales,
                        tiles ? Dims{job.columns / kBlock, round_up(blocks, 4)} : Dims{blocks, job.columns}));
    job.wide = out->element_type() == ffi::DataType::F32;
    if (!job.wide && out->element_type() != ffi::DataType::BF16) return invalid("the result must be float32 or bfloat16");
    if (dims_of(*out) != Dims{job.rows, job.columns}) return invalid("the result must be (rows, columns)");
    if (out->element_count() == 0) return ffi::Error::Success();
    if (job.depth == 0) return invalid("the contraction must not be empty");
    job.left = left.untyped_data();
    job.left_scales = left_scales.untyped_data();
    job.right = right.untyped_data();
    job.right_scales = right_scales.untyped_data();
    job.out = out->untyped_data();
    job.workspace = workspace->untyped_data();
    job.workspace_bytes = static_cast<int64_t>(workspace->size_bytes());
    return Cuda::run(context, cuda::blocked_matmul, job);
  });
}

}  // namespace

GTP_DEFINE_CUDA_HANDLER(quantize_runs, quantize_runs, .Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()
                        .Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attr<bool>("rows").Attr<bool>("columns"));
GTP_DEFINE_CUDA_HANDLER(blocked_product, blocked_product, .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
                        .Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attr<bool>("tiles"));

}  // namespace gtp

#endif
