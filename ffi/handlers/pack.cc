#include <algorithm>
#include <map>

#include "backend.h"
#include "checks.h"

namespace gtp {
namespace {

// A gtp_jax.formats.Piece, and where its sections begin.
struct Piece {
  int64_t rows, cols;
  bool transposed;
  int64_t total_rows, out, out_row;
  int64_t array, matrix;
  int64_t codes_start, scales_start;
};

struct Plan {
  std::vector<Piece> pieces;
  int64_t bytes;
};

// Larger matrices and plans with more pieces are rejected, so that no sum or product below overflows.
constexpr int64_t kMostElements = int64_t{1} << 40;
constexpr size_t kMostPieces = size_t{1} << 20;

// Parses the plan, which has eight numbers per piece: rows, cols, transposed, total_rows, out, out_row, array, matrix.
// The codes of all pieces come first, then the scales of all pieces; each section starts at a multiple of
// kSectionBytes.
ffi::Error read_plan(const Format& format, ffi::Span<const int64_t> table, Plan& plan) {
  constexpr size_t kFields = 8;
  if (table.size() % kFields) return invalid("the plan does not have eight numbers per piece");
  if (table.size() / kFields > kMostPieces) return invalid("the plan has more than 2**20 pieces");
  for (size_t i = 0; i < table.size(); i += kFields) {
    for (size_t field = 0; field < kFields; ++field) {
      if (table[i + field] < 0) return invalid("the plan has a negative number");
    }
    const int64_t* at = &table[i];
    const Piece piece{at[0], at[1], at[2] != 0, at[3], at[4], at[5], at[6], at[7], 0, 0};
    for (const int64_t number :
         {piece.rows, piece.cols, piece.total_rows, piece.out_row, piece.array, piece.matrix}) {
      if (number > kMostElements) return invalid("the plan has a number beyond 2**40");
    }
    if (piece.cols > 0 && piece.rows > kMostElements / piece.cols) {
      return invalid("the plan has a piece of more than 2**40 elements");
    }
    plan.pieces.push_back(piece);
  }
  plan.bytes = 0;
  for (Piece& piece : plan.pieces) {
    piece.codes_start = plan.bytes;
    plan.bytes += round_up(copy_shape(format, piece.rows, piece.cols, false).codes_bytes(), kSectionBytes);
  }
  for (Piece& piece : plan.pieces) {
    piece.scales_start = plan.bytes;
    plan.bytes += round_up(copy_shape(format, piece.rows, piece.cols, false).scales_bytes(), kSectionBytes);
  }
  return ffi::Error::Success();
}

// The pieces that one job quantizes: neighbouring matrices of an array whose codes, scales and amaxes are equally
// spaced.
struct Run {
  int64_t first, count;
  int64_t step;  // from one piece's number in the plan to the next
};

// Returns the pieces of each array, in the plan's order, as a few long runs. Without `long_runs`, each piece is a run.
std::vector<Run> runs_of(const Plan& plan, int64_t arrays, bool long_runs) {
  std::vector<std::vector<Run>> runs(arrays);
  for (int64_t i = 0; i < static_cast<int64_t>(plan.pieces.size()); ++i) {
    const Piece& piece = plan.pieces[i];
    std::vector<Run>& its = runs[piece.array];
    if (long_runs && !its.empty()) {
      Run& run = its.back();
      const int64_t last = run.first + (run.count - 1) * run.step, step = run.count == 1 ? i - last : run.step;
      const Piece &before = plan.pieces[last], &first = plan.pieces[run.first];
      const Piece& second = run.count == 1 ? piece : plan.pieces[run.first + step];
      if (i - last == step && piece.matrix == before.matrix + 1 && piece.rows == first.rows &&
          piece.cols == first.cols && piece.transposed == first.transposed &&
          piece.codes_start - before.codes_start == second.codes_start - first.codes_start &&
          piece.scales_start - before.scales_start == second.scales_start - first.scales_start) {
        run.step = step;
        ++run.count;
        continue;
      }
    }
    its.push_back({i, 1, 0});
  }
  std::vector<Run> found;
  for (const std::vector<Run>& its : runs) found.insert(found.end(), its.begin(), its.end());
  return found;
}

// Returns the jobs that pack a plan's pieces, given the first byte of each buffer. `buffers` has one element per layer
// of a stack, or a single one if all layers share a buffer.
// amax: float32 (*lead, pieces). shards: the plan's arrays, (*lead, rows, cols) or, if an array has several pieces,
// (*lead, matrices, rows, cols); cols come before rows if the piece is transposed.
ffi::Error pack_jobs(const Format& format, const Plan& plan, const Dims& lead, ffi::AnyBuffer amax,
                     ffi::RemainingArgs shards, const std::vector<uint8_t*>& buffers, std::vector<QuantizeJob>& jobs) {
  const auto count = static_cast<int64_t>(plan.pieces.size());
  const auto apart = static_cast<int64_t>(buffers.size());
  const int64_t layers = product(lead) / apart;  // per buffer
  int64_t arrays = 0;
  for (const Piece& piece : plan.pieces) arrays = std::max(arrays, piece.array + 1);
  if (static_cast<int64_t>(shards.size()) != arrays) {
    return invalid("there are " + std::to_string(shards.size()) + " shards; the plan's pieces lie in " +
                   std::to_string(arrays));
  }
  for (const Run& run : runs_of(plan, arrays, layers == 1)) {
    const int64_t i = run.first;
    const Piece& piece = plan.pieces[i];
    const std::string name = "shard " + std::to_string(piece.array);
    const auto shard = shards.get<ffi::AnyBuffer>(piece.array);
    if (!shard.has_value()) return shard.error();
    QuantizeJob job{};
    GTP_CHECK(check_values(name, *shard, job.dtype));
    job.rows = piece.transposed ? piece.cols : piece.rows;
    job.cols = piece.transposed ? piece.rows : piece.cols;
    const Dims dims = dims_of(*shard);
    const int64_t matrices = dims.size() == lead.size() + 3 ? dims[lead.size()] : 1;
    Dims expected = lead;
    if (dims.size() == lead.size() + 3) expected.push_back(matrices);
    expected.insert(expected.end(), {job.rows, job.cols});
    const int64_t last = piece.matrix + run.count - 1;
    if (dims != expected || last >= matrices) {
      return invalid(name + " has shape " + to_string(dims) + "; piece " +
                     std::to_string(i + (run.count - 1) * run.step) + " is matrix " + std::to_string(last) + " of " +
                     to_string(expected));
    }
    if (shard->element_count() == 0) continue;
    const int64_t elements = job.rows * job.cols;
    const bool several = run.count > 1;
    const Piece& second = plan.pieces[i + run.step];
    job.count = layers * run.count;
    job.x_stride = (several ? 1 : matrices) * elements;
    job.count_per_amax = 1;
    job.amax_stride = several ? run.step : count;
    job.column_transposed = true;
    const CopyShape shape = copy_shape(format, piece.rows, piece.cols, false);
    Copy& copy = piece.transposed ? job.column : job.row;
    copy.codes_bytes = shape.codes_bytes();
    copy.scales_bytes = shape.scales_bytes();
    copy.codes_stride = several ? second.codes_start - piece.codes_start : plan.bytes;
    copy.scales_stride = several ? second.scales_start - piece.scales_start : plan.bytes;
    copy.codes_gap = static_cast<int32_t>(round_up(copy.codes_bytes, kSectionBytes) - copy.codes_bytes);
    copy.scales_gap = static_cast<int32_t>(round_up(copy.scales_bytes, kSectionBytes) - copy.scales_bytes);
    for (int64_t layer = 0; layer < apart; ++layer) {
      job.x = static_cast<const uint8_t*>(shard->untyped_data()) +
              (layer * matrices + piece.matrix) * elements * dtype_bytes(job.dtype);
      copy.codes = buffers[layer] + piece.codes_start;
      copy.scales = buffers[layer] + piece.scales_start;
      copy.amax = static_cast<const float*>(amax.untyped_data()) + layer * count + i;
      jobs.push_back(job);
    }
  }
  return ffi::Error::Success();
}

// buffer: uint8 (*lead, bytes). For the other operands, see pack_jobs.
template <class B>
ffi::Error pack(typename B::Context context, ffi::AnyBuffer amax, ffi::RemainingArgs shards,
                ffi::Result<ffi::AnyBuffer> buffer, int32_t format_code, ffi::Span<const int64_t> table) {
  return guarded([&]() -> ffi::Error {
    GTP_CHECK(check_format(format_code));
    const Format& format = kFormats[format_code];
    Plan plan;
    GTP_CHECK(read_plan(format, table, plan));
    GTP_CHECK(check_f32("amax", amax));
    Dims lead = dims_of(amax);
    if (lead.empty() || lead.back() != static_cast<int64_t>(plan.pieces.size())) {
      return invalid("amax does not have one element per piece");
    }
    lead.pop_back();
    GTP_CHECK(check_bytes("buffer", *buffer, lead, {plan.bytes}));
    std::vector<QuantizeJob> jobs;
    GTP_CHECK(pack_jobs(format, plan, lead, amax, shards, {static_cast<uint8_t*>(buffer->untyped_data())}, jobs));
    return B::run(context, B::quantize, jobs, QuantizeOptions{format_code, false, nullptr});
  });
}

// amax: float32 (layers, pieces). buffers: uint8 (1, bytes) for each layer. For the other operands, see pack_jobs.
template <class B>
ffi::Error pack_apart(typename B::Context context, ffi::AnyBuffer amax, ffi::RemainingArgs shards,
                      ffi::RemainingRets buffers, int32_t format_code, ffi::Span<const int64_t> table) {
  return guarded([&]() -> ffi::Error {
    GTP_CHECK(check_format(format_code));
    const Format& format = kFormats[format_code];
    Plan plan;
    GTP_CHECK(read_plan(format, table, plan));
    GTP_CHECK(check_f32("amax", amax));
    const Dims dims = dims_of(amax);
    if (dims.size() != 2 || dims[1] != static_cast<int64_t>(plan.pieces.size())) {
      return invalid("amax does not have one element per layer and piece");
    }
    if (static_cast<int64_t>(buffers.size()) != dims[0]) {
      return invalid("there are " + std::to_string(buffers.size()) + " buffers for " + std::to_string(dims[0]) +
                     " layers");
    }
    std::vector<uint8_t*> first;
    for (size_t layer = 0; layer < buffers.size(); ++layer) {
      const auto buffer = buffers.get<ffi::AnyBuffer>(layer);
      if (!buffer.has_value()) return buffer.error();
      GTP_CHECK(check_bytes("buffer", **buffer, {1}, {plan.bytes}));
      first.push_back(static_cast<uint8_t*>((*buffer)->untyped_data()));
    }
    std::vector<QuantizeJob> jobs;
    if (!first.empty()) GTP_CHECK(pack_jobs(format, plan, {dims[0]}, amax, shards, first, jobs));
    return B::run(context, B::quantize, jobs, QuantizeOptions{format_code, false, nullptr});
  });
}

// buffer: uint8 (shards, bytes). amax: float32 (pieces,). weights: (rows, cols) each, where rows is the sum of the
// total_rows of the output's pieces or, if `by_shard`, shards times the sum of their rows.
template <class B>
ffi::Error unpack(typename B::Context context, ffi::AnyBuffer buffer, ffi::AnyBuffer amax, ffi::RemainingRets weights,
                  int32_t format_code, ffi::Span<const int64_t> table, bool by_shard) {
  return guarded([&]() -> ffi::Error {
    GTP_CHECK(check_format(format_code));
    const Format& format = kFormats[format_code];
    Plan plan;
    GTP_CHECK(read_plan(format, table, plan));
    std::map<int64_t, int64_t> shard_rows, total_rows;  // by output
    for (const Piece& piece : plan.pieces) {
      shard_rows[piece.out] += piece.rows;
      total_rows[piece.out] += piece.total_rows;
    }
    const Dims buffer_dims = dims_of(buffer);
    if (buffer_dims.size() != 2) return invalid("buffer does not have two dimensions");
    const int64_t shards = buffer_dims[0], count = static_cast<int64_t>(plan.pieces.size());
    GTP_CHECK(check_bytes("buffer", buffer, {shards}, {plan.bytes}));
    GTP_CHECK(check_f32("amax", amax));
    if (dims_of(amax) != Dims{count}) return invalid("amax does not have one element per piece");

    const auto* bytes = static_cast<const uint8_t*>(buffer.untyped_data());
    std::vector<DequantizeJob> jobs;
    for (int64_t i = 0; i < count; ++i) {
      const Piece& piece = plan.pieces[i];
      const std::string name = "output " + std::to_string(piece.out);
      const auto weight = weights.get<ffi::AnyBuffer>(piece.out);
      if (!weight.has_value()) return weight.error();
      DequantizeJob job{};
      GTP_CHECK(check_values(name, **weight, job.dtype));
      const Dims dims = dims_of(**weight);
      const int64_t before = by_shard ? (shards - 1) * shard_rows[piece.out] : 0;
      const int64_t rows = by_shard ? piece.rows : piece.total_rows;
      if (dims.size() != 2 || dims[1] != piece.cols || dims[0] < before + piece.out_row + rows) {
        return invalid(name + " has shape " + to_string(dims) + ", which does not fit piece " + std::to_string(i));
      }
      if (!by_shard && piece.total_rows > shards * piece.rows) {
        return invalid("the shards have fewer rows in all than total_rows of piece " + std::to_string(i));
      }
      job.codes = bytes + piece.codes_start;
      job.scales = bytes + piece.scales_start;
      job.amax = static_cast<const float*>(amax.untyped_data()) + i;
      job.x = static_cast<uint8_t*>((*weight)->untyped_data()) + piece.out_row * piece.cols * dtype_bytes(job.dtype);
      job.count = shards;
      job.rows = piece.rows;
      job.cols = piece.cols;
      job.rows_kept = by_shard ? shards * piece.rows : piece.total_rows;
      job.x_stride = (by_shard ? shard_rows[piece.out] : piece.rows) * piece.cols;
      job.codes_stride = job.scales_stride = plan.bytes;
      job.count_per_amax = shards;
      job.amax_stride = 0;
      job.layout = Layout::kRows;
      if (job.rows_kept * piece.cols > 0) jobs.push_back(job);
    }
    for (size_t i = 0; i < weights.size(); ++i) {
      const auto weight = weights.get<ffi::AnyBuffer>(i);
      if (!weight.has_value()) return weight.error();
      const Dims dims = dims_of(**weight);
      const auto out = static_cast<int64_t>(i);
      const int64_t rows = by_shard ? shards * shard_rows[out] : total_rows[out];
      if (dims.empty() || dims[0] != rows) {
        return invalid("output " + std::to_string(i) + " has shape " + to_string(dims) + ", but its pieces have " +
                       std::to_string(rows) + " rows");
      }
    }
    return B::run(context, B::dequantize, jobs, format_code);
  });
}

}  // namespace

GTP_DEFINE_HANDLERS(pack, pack,
                    .Arg<ffi::AnyBuffer>()
                        .RemainingArgs()
                        .Ret<ffi::AnyBuffer>()
                        .Attr<int32_t>("format")
                        .Attr<ffi::Span<const int64_t>>("table"));
GTP_DEFINE_HANDLERS(pack_apart, pack_apart,
                    .Arg<ffi::AnyBuffer>()
                        .RemainingArgs()
                        .RemainingRets()
                        .Attr<int32_t>("format")
                        .Attr<ffi::Span<const int64_t>>("table"));
GTP_DEFINE_HANDLERS(unpack, unpack,
                    .Arg<ffi::AnyBuffer>()
                        .Arg<ffi::AnyBuffer>()
                        .RemainingRets()
                        .Attr<int32_t>("format")
                        .Attr<ffi::Span<const int64_t>>("table")
                        .Attr<bool>("by_shard"));

}  // namespace gtp
