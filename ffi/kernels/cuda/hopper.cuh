// Instructions of sm_90a that are not available in C++: barriers, copies by the tensor memory accelerator, and the
// matmul of a warpgroup.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "gtp/jobs.h"

namespace gtp::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to copies.
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

// Copies the box of a map at (inner, middle, outer) to shared memory. The barrier counts all of its bytes, including
// the zeros outside the array.
__device__ __forceinline__ void copy_box(uint32_t target, const CUtensorMap* map, int inner, int middle, int outer,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
          target),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(inner), "r"(middle), "r"(outer)
      : "memory");
}

__device__ __forceinline__ void fetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

constexpr uint32_t kLineBytes = 128;                   // bytes of a swizzled line; lines form groups of eight
constexpr uint32_t kColumnBoxBytes = 64 * kLineBytes;  // bytes of a box of 64 steps of the contraction by 64 columns

// Describes swizzled lines to a matmul. For operands along the contraction, a line holds 128 bytes of a row. For
// operands across it, a line holds 64 columns at one step of the contraction, and the next columns are in the next box.
template <bool kAcross>
__device__ __forceinline__ uint64_t describe_lines(uint32_t address) {
  constexpr uint64_t kSwizzle128 = 1, kGroupBytes = 8 * kLineBytes, kFurther = kAcross ? kColumnBoxBytes >> 4 : 1;
  return ((address & 0x3FFFF) >> 4) | kFurther << 16 | kGroupBytes >> 4 << 32 | kSwizzle128 << 62;
}

// The step of a description from one matmul to the next: 32 bytes of each line, or 16 lines.
template <bool kAcross>
constexpr uint32_t kStep = (kAcross ? 16 * kLineBytes : 32) >> 4;

// Makes this thread's writes to shared memory visible to matmuls.
__device__ __forceinline__ void publish_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Waits for the threads that multiply, but for no others.
__device__ __forceinline__ void wait_for_group(int threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }

__device__ __forceinline__ void matmul_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void matmul_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void matmul_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// Keeps the compiler from moving reads or writes of the sums of matmuls in flight across this point.
template <int kCount>
__device__ __forceinline__ void keep(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Computes d += a b^T with 64 rows of a and 256 rows of b, of 32 codes or 16 values each.
template <Factor kLeft, Factor kRight, bool kLeftAcross, bool kRightAcross>
__device__ __forceinline__ void matmul_64x256(float (&d)[128], uint64_t a, uint64_t b) {
#define GTP_MATMUL(kinds, across) \
  asm volatile( \
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n" \
      "wgmma.mma_async.sync.aligned.m64n256" kinds " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127" \
      "}, %128, %129, p, 1, 1" across ";\n}" \
      : \
        "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), \
        "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
        "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), \
        "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
        "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), \
        "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), \
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), \
        "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
        "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127]) \
      : "l"(a), "l"(b))
  if constexpr (kLeft == Factor::kBF16 && kLeftAcross) {
    GTP_MATMUL("k16.f32.bf16.bf16", ", 1, 1");
  } else if constexpr (kLeft == Factor::kBF16 && kRightAcross) {
    GTP_MATMUL("k16.f32.bf16.bf16", ", 0, 1");
  } else if constexpr (kLeft == Factor::kBF16) {
    GTP_MATMUL("k16.f32.bf16.bf16", ", 0, 0");
  } else if constexpr (kLeft == Factor::kF16 && kLeftAcross) {
    GTP_MATMUL("k16.f32.f16.f16", ", 1, 1");
  } else if constexpr (kLeft == Factor::kF16 && kRightAcross) {
    GTP_MATMUL("k16.f32.f16.f16", ", 0, 1");
  } else if constexpr (kLeft == Factor::kF16) {
    GTP_MATMUL("k16.f32.f16.f16", ", 0, 0");
  } else if constexpr (kLeft == Factor::kE5M2 && kRight == Factor::kE5M2) {
    GTP_MATMUL("k32.f32.e5m2.e5m2", "");
  } else if constexpr (kLeft == Factor::kE5M2) {
    GTP_MATMUL("k32.f32.e5m2.e4m3", "");
  } else if constexpr (kRight == Factor::kE5M2) {
    GTP_MATMUL("k32.f32.e4m3.e5m2", "");
  } else {
    GTP_MATMUL("k32.f32.e4m3.e4m3", "");
  }
#undef GTP_MATMUL
}

// Computes d = a b^T, or adds it to d if `adds`, with 64 rows of a and 128 rows of b, of 32 e4m3 codes each.
__device__ __forceinline__ void matmul_64x128(float (&d)[64], uint64_t a, uint64_t b, bool adds) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1;\n}"
      :
        "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(static_cast<int>(adds)));
}

}  // namespace gtp::cuda
