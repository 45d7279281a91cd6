// Grouped matmuls of e4m3 codes with float32 scales of blocks of 128, for Hopper: products with weights in tiles of 128 x
// 128, and sums over each group's rows of operands in runs of 128.
//
// Tensor cores keep some 14 bits of a sum, so every panel, which is one block deep, has a sum of its own; it is scaled
// and added in float32 by the warps that multiply. A warpgroup multiplies a panel in two halves of 128 columns, because
// its registers do not hold the accumulators of 256. While it adds one half, the other warpgroup multiplies.
#include "grouped.cuh"

namespace gtp::cuda {
namespace {

constexpr int kBlock = 128;
constexpr int kScales = 16 / sizeof(float);  // a copy reads from an address that is a multiple of 16 bytes

// If `kTiles`, the right operand has scales of tiles, which are read from memory; otherwise it has scales of runs, which
// are copied with each panel, like those of the left operand.
template <bool kTiles>
struct SumPerBlock {
  using Kinds = Operands<Factor::kE4M3, Factor::kE4M3, false, false>;
  static_assert(Kinds::kDepth == kBlock);
  struct Maps {
    CUtensorMap left, right, left_scales, right_scales;
  };
  // Rows of a product begin anywhere, so the copy begins with up to three scales of rows before them. Those of a group's
  // matrix begin with a tile.
  static constexpr int kLeftScales = kTiles ? kRows + kScales : kRows;
  static constexpr int kScaleBytes = 4 * (kLeftScales + (kTiles ? 0 : kColumns));

  static __device__ __forceinline__ void copy_scales(const Maps& maps, const Work& work, int number, uint32_t target,
                                                     uint32_t barrier) {
    const int block = work.first / kBlock + number;
    copy_box(target, &maps.left_scales, work.row / kScales * kScales, block, 0, barrier);
    if constexpr (!kTiles) copy_box(target + 4 * kRows, &maps.right_scales, work.column, block, 0, barrier);
  }

  static __device__ __forceinline__ void add_up(const GroupedJob& job, const Work& work, Ring& ring, int part, bool has_rows,
                                                float (&sums)[128]) {
    constexpr int kHalf = kColumns / 2;
    const int thread = threadIdx.x % kGroupThreads, lane = thread % 32;
    const int row = part * kPart + thread / 32 * 16 + lane / 4, column = lane % 4 * 2;  // the first of this thread
    const int skipped = kTiles ? work.row % kScales : 0;
    const float* tiles = nullptr;  // the scales of the tiles of the first half, by block
    int second = 0;                // from there to those of the second half, which may be empty
    if constexpr (kTiles) {
      const int across = (job.columns + kBlock - 1) / kBlock, blocks = (job.depth + kBlock - 1) / kBlock;
      const int tile = work.column / kBlock;
      tiles = job.right_scales + (int64_t{work.group} * across + tile) * blocks;
      second = tile + 1 < across ? blocks : 0;
    }
    float d[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) d[i] = 0.0f;
    for (int i = 0; i < work.panels; ++i) {
      float of_tile[2];  // read before the wait, so that nothing waits for them
      if constexpr (kTiles) {
        of_tile[0] = __ldg(tiles + i);
        of_tile[1] = __ldg(tiles + second + i);
      }
      wait(ring.full + ring.stage * 8, ring.parity);
      if (has_rows) {
        const float* scales = reinterpret_cast<const float*>(ring.memory + scales_at<kScaleBytes>(ring.stage));
        const float upper = scales[skipped + row], lower = scales[skipped + row + 8];
        const uint64_t a = describe_lines<false>(ring.panel() + part * kPart * kLineBytes);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint64_t b = describe_lines<false>(ring.panel() + kLeftBytes + half * kHalf * kLineBytes);
          keep(d);
          matmul_fence();
#pragma unroll
          for (int k = 0; k < 4; ++k) matmul_64x128(d, a + k * kStep<false>, b + k * kStep<false>, k > 0);
          matmul_commit();
          matmul_wait<0>();
          keep(d);
#pragma unroll
          for (int j = 0; j < 64; j += 4) {  // two columns of eight, in both rows
            float2 right;
            if constexpr (kTiles) {
              right = make_float2(of_tile[half], of_tile[half]);
            } else {
              right = *reinterpret_cast<const float2*>(scales + kRows + half * kHalf + j * 2 + column);
            }
            float* sum = sums + half * 64 + j;
            sum[0] = __fmaf_rn(d[j], upper * right.x, sum[0]);
            sum[1] = __fmaf_rn(d[j + 1], upper * right.y, sum[1]);
            sum[2] = __fmaf_rn(d[j + 2], lower * right.x, sum[2]);
            sum[3] = __fmaf_rn(d[j + 3], lower * right.y, sum[3]);
          }
        }
      }
      __syncwarp();  // all lanes have read the scales
      if (lane == 0) arrive(ring.empty + ring.stage * 8);
      ring.advance();
    }
  }
};

template <bool kTiles>
const char* launch_blocks(const Launch& what, const CUtensorMap& left, const CUtensorMap& right) {
  const GroupedJob& job = what.arguments.job;
  typename SumPerBlock<kTiles>::Maps maps{left, right, {}, {}};
  const int lines = job.outer ? job.rows : (job.left_rows + 3) / 4 * 4, blocks = (job.depth + kBlock - 1) / kBlock;
  if (!encode_scales(maps.left_scales, job.left_scales, blocks, lines, SumPerBlock<kTiles>::kLeftScales) ||
      (!kTiles && !encode_scales(maps.right_scales, job.right_scales, blocks, job.columns, kColumns))) {
    return "cuTensorMapEncodeTiled rejected scales";
  }
  return launch_either<SumPerBlock<kTiles>>(what, maps);
}

}  // namespace

const char* grouped_blocked_matmul(const GroupedJob& job, Stream stream) {
  Launch what{};
  CUtensorMap left, right;
  if (const char* error = prepare(job, stream, what, left, right)) return error;
  return job.outer ? launch_blocks<false>(what, left, right) : launch_blocks<true>(what, left, right);
}

}  // namespace gtp::cuda
