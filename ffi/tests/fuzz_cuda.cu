// Runs the CUDA and CPU kernels on the same random jobs: many jobs per call, at odd addresses, with strides and gaps
// that calls from XLA do not have. Inputs and outputs are in one arena, so comparing all of it also finds stray writes.
//
//     fuzz_cuda SEED CASES
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtp/cpu.h"
#include "gtp/cuda.h"
#include "gtp/numerics.h"

namespace {

using namespace gtp;

constexpr int64_t kArena = int64_t{128} << 20;
constexpr uint8_t kUntouched = 0xA5;

std::mt19937_64 generator;

int64_t below(int64_t limit) { return static_cast<int64_t>(generator() % static_cast<uint64_t>(limit)); }
bool one_in(int64_t n) { return below(n) == 0; }

int64_t any_size(int64_t limit) {
  static constexpr int64_t kSizes[] = {0,  1,  2,   15,  16,  17,  31,  32,  33,  63,  64,  65,
                                       80, 96, 127, 128, 129, 192, 255, 256, 257, 320, 520, 1088};
  // entire panels have separate code
  const int64_t size = one_in(3) ? 128 * (1 + below(4)) : one_in(2) ? kSizes[below(std::size(kSizes))] : below(150);
  return std::min(size, limit);
}

void require(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "violated: %s\n", what.c_str());
  std::exit(1);
}

void check(cudaError_t error, const char* what) {
  require(error == cudaSuccess, std::string(what) + ": " + cudaGetErrorString(error));
}

// Memory with the same bytes on host and device.
class Arena {
 public:
  Arena() : host_(new uint8_t[kArena]), found_(new uint8_t[kArena]) {
    check(cudaMalloc(reinterpret_cast<void**>(&device_), kArena), "cudaMalloc");
  }

  void clear() {
    used_ = 0;
    places_.clear();
  }

  // Takes a number of bytes, aligned as requested or better, with unused bytes before and after.
  uint8_t* take(int64_t bytes, int64_t alignment, std::string name) {
    const int64_t start = round_up(used_ + 1 + below(40), 16) + (one_in(2) ? 0 : alignment * below(16 / alignment));
    require(start + bytes + 64 <= kArena, "the arena is large enough");
    std::memset(host_.get() + used_, kUntouched, start + bytes + 64 - used_);
    used_ = start + bytes;
    places_.push_back({start, std::move(name)});
    return host_.get() + start;
  }

  template <class T>
  T* on_device(T* host) const {
    if (!host) return nullptr;
    return reinterpret_cast<T*>(device_ + (reinterpret_cast<const uint8_t*>(host) - host_.get()));
  }

  void upload() { check(cudaMemcpy(device_, host_.get(), used_ + 64, cudaMemcpyHostToDevice), "upload"); }

  // Waits for the device, and compares its memory with the host's.
  void compare(const std::string& what) {
    check(cudaDeviceSynchronize(), what.c_str());
    check(cudaMemcpy(found_.get(), device_, used_ + 64, cudaMemcpyDeviceToHost), "download");
    const auto at = std::mismatch(found_.get(), found_.get() + used_ + 64, host_.get()).first - found_.get();
    if (at == used_ + 64) return;
    const auto after = std::upper_bound(places_.begin(), places_.end(), at,
                                        [](int64_t value, const Place& place) { return value < place.start; });
    const Place place = after == places_.begin() ? Place{0, "the bytes before the first buffer"} : *(after - 1);
    char text[200];
    std::snprintf(text, sizeof text, ": byte %lld of %s is %02x on the device and %02x on the host",
                  static_cast<long long>(at - place.start), place.name.c_str(), found_[at], host_[at]);
    require(false, what + text);
  }

 private:
  struct Place {
    int64_t start;
    std::string name;
  };
  std::unique_ptr<uint8_t[]> host_, found_;
  uint8_t* device_ = nullptr;
  int64_t used_ = 0;
  std::vector<Place> places_;
};

void fill_values(uint8_t* x, int64_t size, DType dtype) {
  std::normal_distribution<float> normal;
  const bool wild = one_in(3);
  const uint32_t kept = one_in(2) ? 0xFFF80000u : ~0u;  // numbers with few bits produce ties
  const int64_t spoilt = one_in(2) && size > 0 ? below(size) : -1;
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t word = i == spoilt ? kNan : wild ? static_cast<uint32_t>(generator())
                                             : bits_of(normal(generator)) & kept;
    if (dtype == DType::kF32) {
      std::memcpy(x + 4 * i, &word, 4);
    } else {
      const uint16_t half = wild ? static_cast<uint16_t>(word)
                                 : dtype == DType::kBF16 ? to_bf16(float_of(word)) : to_f16(float_of(word));
      std::memcpy(x + 2 * i, &half, 2);
    }
  }
}

// With half of them, products with 16-bit numbers are often e2m1 ties.
float any_amax() {
  if (one_in(3)) return from_bf16(static_cast<uint16_t>(0x4000 + below(256)));
  if (one_in(3)) return 21.0f * static_cast<float>(1 + below(8));
  static constexpr float kAmaxes[] = {3.0f, 6.0f, 0.5f, 100.0f, 0.0f, 1e-40f, 1e-30f, 1e30f, kFloatMax};
  return kAmaxes[below(std::size(kAmaxes))];
}

const float* take_amaxes(Arena& arena, int64_t count, const std::string& name) {
  auto* amax = reinterpret_cast<float*>(arena.take(4 * count, 4, name));
  for (int64_t i = 0; i < count; ++i) {
    const float value = any_amax();
    std::memcpy(amax + i, &value, 4);
  }
  return amax;
}

DType any_dtype() { return static_cast<DType>(below(3)); }

int64_t scale_bytes(const Format& format, int64_t rows, int64_t cols) {
  return format.block_cols ? ceil_div(rows, format.block_rows) * ceil_div(cols, format.block_cols) : 0;
}

// Takes room for `count` matrices of `bytes` bytes each, with a gap to be zeroed and unused bytes between them.
uint8_t* take_stack(Arena& arena, int64_t count, int64_t bytes, int32_t& gap, int64_t& stride, const std::string& name) {
  gap = one_in(2) ? 0 : static_cast<int32_t>(below(kSectionBytes));
  stride = bytes + gap + (one_in(2) ? 0 : below(40));
  if (one_in(2)) stride = round_up(stride, kSectionBytes);
  return arena.take(count * stride, 1, name);
}

Copy take_copy(Arena& arena, const Format& format, int64_t count, int64_t rows, int64_t cols, const float* amax,
               const std::string& name) {
  Copy copy{};
  copy.codes_bytes = rows * format.code_bytes(cols);
  copy.scales_bytes = scale_bytes(format, rows, cols);
  copy.codes = take_stack(arena, count, copy.codes_bytes, copy.codes_gap, copy.codes_stride, name + " codes");
  copy.scales = take_stack(arena, count, copy.scales_bytes, copy.scales_gap, copy.scales_stride, name + " scales");
  copy.amax = amax;
  return copy;
}

Copy on_device(const Arena& arena, Copy copy) {
  copy.codes = arena.on_device(copy.codes);
  copy.scales = arena.on_device(copy.scales);
  copy.amax = arena.on_device(copy.amax);
  return copy;
}

// Runs a call. Every fourth time, captures it in a graph and launches the graph, as XLA may do. During a capture, a
// call must neither wait nor allocate.
template <class Call>
void run(const std::string& what, const Call& call) {
  if (!one_in(4)) {
    const char* error = call(nullptr);
    return require(!error, what + ": " + (error ? error : ""));
  }
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t ready;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  const char* error = call(stream);
  require(!error, what + " in a graph: " + (error ? error : ""));
  check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&ready, graph, 0), "cudaGraphInstantiate");
  check(cudaGraphLaunch(ready, stream), "cudaGraphLaunch");
  check(cudaStreamSynchronize(stream), what.c_str());
  check(cudaGraphExecDestroy(ready), "cudaGraphExecDestroy");
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

// Uses more jobs than one table holds, with up to three dtypes.
int64_t any_count() { return one_in(3) ? 1 + below(90) : 1 + below(4); }

void quantize_case(Arena& arena, const cpu::Pool& pool) {
  const int code = static_cast<int>(below(kFormatCount));
  const Format& format = kFormats[code];
  const bool hadamard = code == 1 && one_in(3), stochastic = format.element_bits == 4 && one_in(3);
  auto* key = reinterpret_cast<uint32_t*>(arena.take(8, 4, "key"));
  for (int i = 0; i < 2; ++i) key[i] = static_cast<uint32_t>(generator());
  std::vector<QuantizeJob> jobs, there;
  const int64_t many = any_count(), limit = many > 30 ? 200 : many > 4 ? 260 : 2000;
  for (int64_t i = 0; i < many; ++i) {
    const std::string name = std::string(format.name) + " job " + std::to_string(i);
    QuantizeJob job{};
    job.dtype = any_dtype();
    job.count = 1 + (one_in(2) ? below(5) : 0);
    job.rows = any_size(limit);
    job.cols = any_size(std::max<int64_t>(1, std::min(limit, 400000 / std::max<int64_t>(1, job.rows * job.count))));
    job.x_stride = job.rows * job.cols + (one_in(2) ? 0 : below(30));
    const int64_t size = job.count * job.x_stride;
    auto* x = arena.take(size * dtype_bytes(job.dtype), dtype_bytes(job.dtype), name + " x");
    fill_values(x, size, job.dtype);
    job.x = x;
    job.count_per_amax = 1 + below(job.count);
    job.amax_stride = below(4);
    job.column_transposed = format.transposed_columns || one_in(2);
    const int64_t amaxes = 1 + (job.count - 1) / job.count_per_amax * job.amax_stride;
    const auto* amax = take_amaxes(arena, amaxes, name + " amax");
    const auto* other = one_in(3) ? take_amaxes(arena, amaxes, name + " amax of columns") : amax;
    const int64_t which = below(3), length = hadamard ? round_up(job.rows, kRun) : job.rows;
    if (which != 1) job.row = take_copy(arena, format, job.count, job.rows, job.cols, amax, name + " row");
    if (which != 0) job.column = take_copy(arena, format, job.count, job.cols, length, other, name + " column");
    jobs.push_back(job);
    job.x = arena.on_device(x);
    job.row = on_device(arena, job.row);
    job.column = on_device(arena, job.column);
    there.push_back(job);
  }
  arena.upload();
  const QuantizeOptions options{code, hadamard, stochastic ? arena.on_device(key) : nullptr};
  run("quantize", [&](cuda::Stream stream) { return cuda::quantize(there, options, stream); });
  cpu::quantize(jobs, {code, hadamard, stochastic ? key : nullptr}, pool);
  arena.compare(std::string("quantize") + (hadamard ? " hadamard" : "") + (stochastic ? " stochastic" : ""));
}

void dequantize_case(Arena& arena, const cpu::Pool& pool) {
  const int code = static_cast<int>(below(kFormatCount));
  const Format& format = kFormats[code];
  std::vector<DequantizeJob> jobs, there;
  const int64_t many = any_count(), limit = many > 30 ? 200 : many > 4 ? 260 : 2000;
  for (int64_t i = 0; i < many; ++i) {
    const std::string name = std::string(format.name) + " job " + std::to_string(i);
    DequantizeJob job{};
    job.dtype = any_dtype();
    job.layout = one_in(2) ? Layout::kRows : format.transposed_columns || one_in(2) ? Layout::kColumnsTransposed : Layout::kColumns;
    job.count = 1 + (one_in(2) ? below(5) : 0);
    job.rows = any_size(limit);
    job.cols = any_size(std::max<int64_t>(1, std::min(limit, 400000 / std::max<int64_t>(1, job.rows * job.count))));
    job.rows_kept = job.count * job.rows;
    if (job.layout == Layout::kRows && one_in(2)) job.rows_kept = below(job.rows_kept + 1);
    int32_t gap;
    const auto any_bytes = [&](int64_t bytes, int64_t& stride, const char* what) {
      uint8_t* start = take_stack(arena, job.count, bytes, gap, stride, name + what);
      for (int64_t k = 0; k < job.count * stride; ++k) start[k] = static_cast<uint8_t>(generator());
      return start;
    };
    job.codes = any_bytes(job.rows * format.code_bytes(job.cols), job.codes_stride, " codes");
    job.scales = any_bytes(scale_bytes(format, job.rows, job.cols), job.scales_stride, " scales");
    job.count_per_amax = 1 + below(job.count);
    job.amax_stride = below(4);
    job.amax = take_amaxes(arena, 1 + (job.count - 1) / job.count_per_amax * job.amax_stride, name + " amax");
    job.x_stride = job.rows * job.cols + (one_in(2) ? 0 : below(30));
    const int64_t bytes = dtype_bytes(job.dtype);
    job.x = arena.take(job.count * job.x_stride * bytes, bytes, name + " values");
    jobs.push_back(job);
    job.codes = arena.on_device(job.codes);
    job.scales = arena.on_device(job.scales);
    job.amax = arena.on_device(job.amax);
    job.x = arena.on_device(static_cast<uint8_t*>(job.x));
    there.push_back(job);
  }
  arena.upload();
  run("dequantize", [&](cuda::Stream stream) { return cuda::dequantize(there, code, stream); });
  cpu::dequantize(jobs, code, pool);
  arena.compare("dequantize");
}

void amax_case(Arena& arena, const cpu::Pool& pool) {
  const int64_t many = one_in(3) ? 1 + below(2500) : 1 + below(160);
  std::vector<Array> arrays, there;
  for (int64_t i = 0; i < many; ++i) {
    Array array{nullptr, one_in(20) ? below(100000) : below(300), any_dtype()};
    if (many < 20 && one_in(4)) array.size = below(600000);
    const int64_t bytes = dtype_bytes(array.dtype);
    auto* data = arena.take(array.size * bytes, bytes, "array " + std::to_string(i));
    fill_values(data, array.size, array.dtype);
    array.data = data;
    arrays.push_back(array);
    array.data = arena.on_device(data);
    there.push_back(array);
  }
  auto* amax = reinterpret_cast<float*>(arena.take(4 * many, 4, "amax"));
  const int64_t rows = any_size(500), cols = any_size(300), count = 1 + below(3);
  const Array stack{arena.take(count * rows * cols * 4, 4, "stack"), count * rows * cols, any_dtype()};
  fill_values(static_cast<uint8_t*>(const_cast<void*>(stack.data)), stack.size, stack.dtype);
  auto* transformed = reinterpret_cast<float*>(arena.take(4, 4, "amax after the transform"));
  arena.upload();
  run("multi_amax", [&](cuda::Stream stream) { return cuda::multi_amax(there, arena.on_device(amax), stream); });
  const Array stack_there{arena.on_device(static_cast<const uint8_t*>(stack.data)), stack.size, stack.dtype};
  run("hadamard_amax", [&](cuda::Stream stream) {
    return cuda::hadamard_amax(stack_there, count, rows, cols, arena.on_device(transformed), stream);
  });
  cpu::multi_amax(arrays, amax, pool);
  cpu::hadamard_amax(stack, count, rows, cols, transformed, pool);
  arena.compare("amax");
}

float value_at(const void* x, int64_t i, DType dtype) {
  if (dtype == DType::kF32) return static_cast<const float*>(x)[i];
  const uint16_t half = static_cast<const uint16_t*>(x)[i];
  return dtype == DType::kBF16 ? from_bf16(half) : from_f16(half);
}

// Requires that a code is that of a number within `error` of the exact one.
void require_close(uint8_t code, double exact, double error, const TensorCodes& codes) {
  const float scale = tensor_scale(codes.largest, *codes.amax);
  const auto encoded = [&](double x) {
    const float scaled = smaller(static_cast<float>(x) * scale, kFloatMax);
    return static_cast<int>(codes.e5m2 ? encode_e5m2(scaled) : encode_e4m3(scaled));
  };
  const double size = std::fabs(exact);
  const int magnitude = code & 0x7F;
  require(encoded(std::max(0.0, size - error)) <= magnitude && magnitude <= encoded(size + error),
          "swiglu: a code is that of a number nearby");
  require(size <= error || magnitude == 0 || (code >> 7 != 0) == (exact < 0), "swiglu: a code has the right sign");
}

// Checks the codes against double precision, and that a transposed copy has the codes of the other.
void swiglu_case(Arena& arena) {
  SwigluJob job{};
  job.dtype = any_dtype();
  job.parts = 1 + below(3);
  job.rows = any_size(400);
  job.width = any_size(300);
  const int64_t hidden = job.parts * job.width, bytes = dtype_bytes(job.dtype);
  const auto values = [&](int64_t size, const char* name) {
    auto* x = arena.take(size * bytes, bytes, name);
    fill_values(x, size, job.dtype);
    return x;
  };
  const auto* gate_up = values(job.rows * 2 * hidden, "gate_up");
  const auto* gradient = values(job.rows * hidden, "gradient");
  job.of_hidden = {take_amaxes(arena, 1, "amax"), 448.0f, false};
  const bool e5m2 = one_in(2);
  job.of_gradient = {take_amaxes(arena, 1, "amax of the gradient"), e5m2 ? 57344.0f : 448.0f, e5m2};
  auto* forward = arena.take(job.rows * hidden, 1, "codes of hidden");
  auto* hidden_codes = arena.take(job.rows * hidden, 1, "transposed codes of hidden");
  auto* rows = arena.take(job.rows * 2 * hidden, 1, "codes of the gradient");
  auto* columns = arena.take(job.rows * 2 * hidden, 1, "transposed codes of the gradient");
  auto* amaxes = reinterpret_cast<float*>(arena.take(8, 4, "amaxes"));
  arena.upload();

  SwigluJob there = job;
  there.gate_up = arena.on_device(gate_up);
  there.of_hidden.amax = arena.on_device(job.of_hidden.amax);
  there.of_gradient.amax = arena.on_device(job.of_gradient.amax);
  there.hidden_codes = arena.on_device(forward);
  run("swiglu_amax", [&](cuda::Stream stream) { return cuda::swiglu_amax(there, arena.on_device(amaxes), stream); });
  run("swiglu_quantize", [&](cuda::Stream stream) { return cuda::swiglu_quantize(there, stream); });
  there.gradient = arena.on_device(gradient);
  there.hidden_codes = arena.on_device(hidden_codes);
  there.row_codes = arena.on_device(rows);
  there.column_codes = arena.on_device(columns);
  run("swiglu_amax", [&](cuda::Stream stream) { return cuda::swiglu_amax(there, arena.on_device(amaxes) + 1, stream); });
  run("swiglu_quantize", [&](cuda::Stream stream) { return cuda::swiglu_quantize(there, stream); });
  const std::pair<void*, int64_t> results[] = {{forward, job.rows * hidden},
                                               {hidden_codes, job.rows * hidden},
                                               {rows, job.rows * 2 * hidden},
                                               {columns, job.rows * 2 * hidden},
                                               {amaxes, 8}};
  for (const auto& [host, size] : results) {
    check(cudaMemcpy(host, arena.on_device(static_cast<uint8_t*>(host)), size, cudaMemcpyDeviceToHost), "download");
  }
  arena.compare("swiglu: stray writes");

  // Devices and hosts compute different sigmoids, and devices flush those below 2**-126 to 0. Float32 may overflow where
  // double precision does not, so numbers near its limits are not checked.
  const double most = 0.99 * (job.dtype == DType::kF16 ? 65504.0 : 3.38e38);
  const double relative = job.dtype == DType::kBF16 ? 0x1p-8 : 0x1p-10, least = job.dtype == DType::kF16 ? 0x1p-24 : 1e-37;
  double tops[2] = {}, errors[2] = {};
  bool sure[2] = {true, true};
  for (int64_t row = 0; row < job.rows; ++row) {
    for (int64_t at = 0; at < hidden; ++at) {
      const int64_t column = at / job.width * 2 * job.width + at % job.width, place = row * 2 * hidden + column;
      const double gate = value_at(gate_up, place, job.dtype), up = value_at(gate_up, place + job.width, job.dtype);
      const double of_hidden = value_at(gradient, row * hidden + at, job.dtype);
      const double s = 1 / (1 + std::exp(-gate)), of_silu = of_hidden * up;
      const double exact[] = {gate * s * up, of_silu * s + of_silu * gate * (s * (1 - s)), of_hidden * gate * s};
      // the largest number on the way to each, apart from the sigmoid
      const double reach[] = {gate * up, std::fabs(of_silu) * (1 + std::fabs(gate)), of_hidden * gate};
      const uint8_t codes[] = {forward[row * hidden + at], rows[place], rows[place + job.width]};
      require(codes[0] == hidden_codes[at * job.rows + row], "both copies of hidden have the same codes");
      require(codes[1] == columns[column * job.rows + row], "both copies of the gate's gradient have the same codes");
      require(codes[2] == columns[(column + job.width) * job.rows + row], "both copies of up's gradient have the same codes");
      for (int i = 0; i < 3; ++i) {
        const int which = i > 0;
        if (!std::isfinite(exact[i])) {
          require(codes[i] == kNanCode, "a number that is not finite has the code NaN");
        } else if (std::fabs(reach[i]) > 3e38 || std::fabs(exact[i]) > most) {
          sure[which] = false;
        } else {
          const double error = std::fabs(exact[i]) * relative + std::fabs(reach[i]) * (2e-38 + (i == 1 ? 1e-5 * s : 0)) + least;
          require_close(codes[i], exact[i], error, which ? job.of_gradient : job.of_hidden);
          tops[which] = std::max(tops[which], std::fabs(exact[i]));
          errors[which] = std::max(errors[which], error);
        }
      }
    }
  }
  for (int i = 0; i < 2; ++i) {
    require(std::isfinite(amaxes[i]) && amaxes[i] >= 0, "an amax is finite and not negative");
    require(!sure[i] || std::fabs(amaxes[i] - tops[i]) <= errors[i], "an amax is that of the exact numbers");
  }
}

}  // namespace

int main(int argc, char** argv) {
  generator.seed(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0);
  const long cases = argc > 2 ? std::strtol(argv[2], nullptr, 10) : 1000;
  const cpu::Pool pool{3, [](std::function<void()> task) { std::thread(std::move(task)).detach(); }};
  Arena arena;
  for (long i = 0; i < cases; ++i) {
    arena.clear();
    switch (below(8)) {
      case 0: case 1: case 2: quantize_case(arena, pool); break;
      case 3: case 4: case 5: dequantize_case(arena, pool); break;
      case 6: amax_case(arena, pool); break;
      default: swiglu_case(arena);
    }
  }
  std::printf("%ld cases\n", cases);
}
