// All that a kernel needs of the machine: 16-byte loads and stores, flags, packets, block barriers, the clock. This is
// the only PTX of the CUDA engine, apart from that of flags in core/sync.h. There are two versions: nvcc's, and the
// emulator's, where another thread may run at every access that others may see.
#pragma once

#include <cstdint>

#include "core/macros.h"
#include "core/reduce.h"
#include "core/sync.h"
#include "core/types.h"
#include "cuda/device/args.h"

#if defined(__CUDACC__)
#define RINGCOMM_DEVICE __device__ __forceinline__
#define RINGCOMM_COLD __device__ __noinline__                // hardly ever runs: compiled once per kernel, not per call
#define RINGCOMM_DEVICE_CALL static __device__ __noinline__  // compiled once for all kernels of a file
#define RINGCOMM_SHARED(T, name) __shared__ T name
#define RINGCOMM_KERNEL(threads) __global__ void __launch_bounds__(threads, 1)
#elif defined(RINGCOMM_EMULATE)
#include "emulator.h"
#define RINGCOMM_DEVICE inline
#define RINGCOMM_COLD __attribute__((noinline))
#define RINGCOMM_DEVICE_CALL inline
#define RINGCOMM_KERNEL(threads) void
#else
#error "kernels are compiled by nvcc, or by a C++ compiler with RINGCOMM_EMULATE"
#endif

namespace ringcomm::cuda {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

inline constexpr int kMostThreads = 512;  // of a block

#if defined(__CUDACC__)
inline constexpr int kWarp = 32;
#else
inline constexpr int kWarp = emulator::kWarp;
#endif

struct alignas(16) Vec {
  u32 word[4];
};

// ---- flags: core/sync.h, with a scheduling point in the emulator ----------------------------------------------------

RINGCOMM_DEVICE u64 peek(const Flag* flag) {
#if defined(RINGCOMM_EMULATE)
  emulator::look();
#endif
  return load_relaxed(flag);
}
// A poll of `flag` in vain costs a turn: the emulator runs other threads until the flag is written.
RINGCOMM_DEVICE void pause_on([[maybe_unused]] const void* flag, [[maybe_unused]] u64 wanted) {
#if defined(RINGCOMM_EMULATE)
  emulator::spin_on(flag, wanted);
#endif
}
RINGCOMM_DEVICE void post(Flag* flag, u64 value) {
#if defined(RINGCOMM_EMULATE)
  emulator::yield();
  if (RINGCOMM_FAULT == Fault::kFlagWithoutRelease)
    store_relaxed(flag, value);
  else
#endif
    store_release(flag, value);
#if defined(RINGCOMM_EMULATE)
  emulator::wrote(flag);
#endif
}

// ---- data: weak accesses, ordered by the flags around them; never through the read-only cache -----------------------

RINGCOMM_DEVICE Vec load(const Vec* from) {
#if defined(__CUDACC__)
  Vec v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(from));
  return v;
#else
  emulator::yield();
  return *from;
#endif
}
RINGCOMM_DEVICE void store(Vec* to, const Vec& v) {
#if defined(__CUDACC__)
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]),
               "r"(v.word[3])
               : "memory");
#else
  emulator::yield();
  *to = v;
#endif
}
RINGCOMM_DEVICE void load_half(const void* from, u32& a, u32& b) {
#if defined(__CUDACC__)
  asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "l"(from));
#else
  emulator::yield();
  a = static_cast<const u32*>(from)[0];
  b = static_cast<const u32*>(from)[1];
#endif
}
RINGCOMM_DEVICE void store_half(void* to, u32 a, u32 b) {
#if defined(__CUDACC__)
  asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(to), "r"(a), "r"(b) : "memory");
#else
  emulator::yield();
  static_cast<u32*>(to)[0] = a;
  static_cast<u32*>(to)[1] = b;
#endif
}
template <typename T>
RINGCOMM_DEVICE T load_one(const T* from) {
#if defined(RINGCOMM_EMULATE)
  emulator::yield();
#endif
  return *from;
}
template <typename T>
RINGCOMM_DEVICE void store_one(T* to, T value) {
#if defined(RINGCOMM_EMULATE)
  emulator::yield();
#endif
  *to = value;
}
RINGCOMM_DEVICE bool aligned(const void* address) { return (reinterpret_cast<u64>(address) & 15) == 0; }

// ---- packets: data that carries its own flag ------------------------------------------------------------------------
//
// LL: 16 bytes are two halves of 4 bytes of data and 4 of flag. Each half arrives as one unit, in any order.
// LL128: 128 bytes that 8 neighbouring lanes write in one instruction arrive as one unit; the last 8 are the flag. This
// holds for NVLink and for memory inside one GPU, not for PCIe.

RINGCOMM_DEVICE void store_ll(Vec* line, u32 a, u32 b, u32 flag) {
#if defined(__CUDACC__)
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%2};" ::"l"(line), "r"(a), "r"(flag), "r"(b) : "memory");
#else
  u64* const half = reinterpret_cast<u64*>(line);
  const u64 value[2] = {a | static_cast<u64>(flag) << 32, b | static_cast<u64>(flag) << 32};
  const int first = emulator::rnd() & 1;
  emulator::yield();
  __atomic_store_n(half + first, value[first], __ATOMIC_RELAXED);
  emulator::yield();
  __atomic_store_n(half + 1 - first, value[1 - first], __ATOMIC_RELAXED);
  emulator::wrote(line);
#endif
}
// One poll: whether both halves carry `flag`.
RINGCOMM_DEVICE bool look_ll(const Vec* line, u32 flag, u32& a, u32& b) {
#if defined(__CUDACC__)
  u32 flag_a, flag_b;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(a), "=r"(flag_a), "=r"(b), "=r"(flag_b)
               : "l"(line)
               : "memory");
  return flag_a == flag && flag_b == flag;
#else
  emulator::look();
  const u64* const half = reinterpret_cast<const u64*>(line);
  const u64 x = __atomic_load_n(half, __ATOMIC_RELAXED), y = __atomic_load_n(half + 1, __ATOMIC_RELAXED);
  a = static_cast<u32>(x);
  b = static_cast<u32>(y);
  return static_cast<u32>(x >> 32) == flag &&
         (static_cast<u32>(y >> 32) == flag || RINGCOMM_FAULT == Fault::kSecondFlagOfLineIgnored);
#endif
}

RINGCOMM_DEVICE int lane_id() {
#if defined(__CUDACC__)
  return static_cast<int>(threadIdx.x) & (kWarp - 1);
#else
  return emulator::lane();
#endif
}
RINGCOMM_DEVICE bool any_in_warp(bool value) { return __any_sync(0xffffffffu, value) != 0; }

// Called by a whole warp: lane l moves 16 bytes at lines + 16 l; every 8 lanes are a line.
RINGCOMM_DEVICE void store_ll128(char* lines, u64 a, u64 b) {
#if defined(__CUDACC__)
  __syncwarp();  // one instruction for all lanes, even if they have diverged before
  asm volatile("st.volatile.global.v2.u64 [%0], {%1,%2};" ::"l"(lines + 16 * lane_id()), "l"(a), "l"(b) : "memory");
#else
  emulator::yield();
  emulator::warp_op(a, b, lines, [](std::uint64_t(*word)[2], int lanes, void* to) {
    for (int l = 0; l < lanes; ++l)
      for (int k = 0; k < 2; ++k) __atomic_store_n(static_cast<u64*>(to) + 2 * l + k, word[l][k], __ATOMIC_RELAXED);
    emulator::wrote(to);
  });
#endif
}
RINGCOMM_DEVICE void load_ll128(const char* lines, u64& a, u64& b) {
#if defined(__CUDACC__)
  __syncwarp();
  asm volatile("ld.volatile.global.v2.u64 {%0,%1}, [%2];" : "=l"(a), "=l"(b) : "l"(lines + 16 * lane_id()) : "memory");
#else
  emulator::look();
  a = b = 0;
  // Reads the flag of a line first: another process writes it last, and may do so meanwhile.
  emulator::warp_op(a, b, const_cast<char*>(lines), [](std::uint64_t(*word)[2], int lanes, void* from) {
    for (int l = lanes - 1; l >= 0; --l)
      for (int k = 1; k >= 0; --k)
        word[l][k] = __atomic_load_n(static_cast<const u64*>(from) + 2 * l + k, __ATOMIC_RELAXED);
  });
#endif
}

// ---- a barrier of some warps ----------------------------------------------------------------------------------------

inline constexpr int kWorkersBarrier = 1;  // 0 is that of the whole block

// Barrier of `threads` threads, which form whole warps, while the rest of the block goes on. True: all of them passed
// `ok`.
template <int kBarrier>
RINGCOMM_DEVICE bool agree_at(int threads, bool ok) {
#if defined(__CUDACC__)
  u32 all;
  asm volatile(
      "{\n"
      "  .reg .pred mine, everyone;\n"
      "  setp.ne.u32 mine, %1, 0;\n"
      "  barrier.cta.red.and.pred everyone, %2, %3, mine;\n"
      "  selp.u32 %0, 1, 0, everyone;\n"
      "}"
      : "=r"(all)
      : "r"(static_cast<u32>(ok)), "n"(kBarrier), "r"(threads)
      : "memory");
  return all != 0;
#else
  return emulator::bar_and(kBarrier, threads, ok) != 0;
#endif
}

// ---- the clock ------------------------------------------------------------------------------------------------------

RINGCOMM_DEVICE u64 now_ns() {
#if defined(__CUDACC__)
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
#else
  return emulator::global_timer_ns();
#endif
}

// True for the first caller ever to claim this word.
RINGCOMM_DEVICE bool claim_once(Flag* word) {
  return atomicCAS(reinterpret_cast<unsigned long long*>(word), 0ull, 1ull) == 0ull;
}

}  // namespace ringcomm::cuda
