// Grouped matmuls of FP8 codes or 16-bit values for Hopper: products of each row with its group's matrix, and sums over
// each group's rows. Sums stay in the accumulators of the tensor cores from the first panel to the last.
#include "grouped.cuh"

namespace gtp::cuda {
namespace {

// Clears the rows of a panel that belong to the next group.
__device__ __forceinline__ void clear_lines(uint8_t* panel, int first) {
  constexpr int kBoxes = kStageBytes / kColumnBoxBytes, kWords = kLineBytes / 16;
  const int thread = threadIdx.x - kGroupThreads, count = (kColumnBox - first) * kWords;
  for (int i = thread; i < kBoxes * count; i += 2 * kGroupThreads) {
    uint8_t* box = panel + i / count * kColumnBoxBytes + first * kLineBytes;
    reinterpret_cast<uint4*>(box)[i % count] = make_uint4(0, 0, 0, 0);
  }
  publish_writes();
  wait_for_group(2 * kGroupThreads);
}

template <Factor kLeft, Factor kRight, bool kLeftAcross, bool kRightAcross>
struct OneSum {
  using Kinds = Operands<kLeft, kRight, kLeftAcross, kRightAcross>;
  struct Maps {
    CUtensorMap left, right;
  };
  static constexpr int kScaleBytes = 0;

  static __device__ __forceinline__ void add_up(const GroupedJob&, const Work& work, Ring& ring, int part, bool has_rows,
                                                float (&d)[128]) {
    constexpr uint32_t kLeftPart = kLeftAcross ? kColumnBoxBytes : kPart * kLineBytes;
    const bool speaks = threadIdx.x % 32 == 0;
    int before = 0;
    for (int i = 0; i < work.panels; ++i) {
      wait(ring.full + ring.stage * 8, ring.parity);
      if constexpr (kLeftAcross) {
        const int left_over = work.limit - work.first - i * Kinds::kDepth;
        if (left_over < Kinds::kDepth) clear_lines(ring.memory + ring.stage * kStageBytes, left_over);
      }
      if (has_rows) {
        const uint64_t a = describe_lines<kLeftAcross>(ring.panel() + part * kLeftPart);
        const uint64_t b = describe_lines<kRightAcross>(ring.panel() + kLeftBytes);
        keep(d);
        matmul_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          matmul_64x256<kLeft, kRight, kLeftAcross, kRightAcross>(d, a + k * kStep<kLeftAcross>, b + k * kStep<kRightAcross>);
        }
        matmul_commit();
        matmul_wait<1>();
      }
      if (i > 0 && speaks) arrive(ring.empty + before * 8);
      before = ring.stage;
      ring.advance();
    }
    matmul_wait<0>();
    keep(d);
    if (work.panels > 0 && speaks) arrive(ring.empty + before * 8);
  }
};

template <Factor kFactor>
const char* launch_values(const Launch& what, const CUtensorMap& left, const CUtensorMap& right) {
  const GroupedJob& job = what.arguments.job;
  if (job.outer) return launch_either<OneSum<kFactor, kFactor, true, true>>(what, {left, right});
  if (job.backward) return launch<OneSum<kFactor, kFactor, false, true>, false>(what, {left, right});
  return launch<OneSum<kFactor, kFactor, false, false>, false>(what, {left, right});
}

template <Factor kLeft>
const char* launch_codes(const Launch& what, const CUtensorMap& left, const CUtensorMap& right) {
  return what.arguments.job.right_factor == Factor::kE5M2
             ? launch_either<OneSum<kLeft, Factor::kE5M2, false, false>>(what, {left, right})
             : launch_either<OneSum<kLeft, Factor::kE4M3, false, false>>(what, {left, right});
}

}  // namespace

const char* grouped_matmul(const GroupedJob& job, Stream stream) {
  Launch what{};
  CUtensorMap left, right;
  if (const char* error = prepare(job, stream, what, left, right)) return error;
  switch (job.left_factor) {
    case Factor::kBF16: return launch_values<Factor::kBF16>(what, left, right);
    case Factor::kF16: return launch_values<Factor::kF16>(what, left, right);
    case Factor::kE5M2: return launch_codes<Factor::kE5M2>(what, left, right);
    default: return launch_codes<Factor::kE4M3>(what, left, right);
  }
}

}  // namespace gtp::cuda
