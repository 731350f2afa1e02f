// Compiled once per instruction set, each time in a namespace of that name (RINGCOMM_ISA).
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/dispatch.h"
#include "cpu/kernels/loops.h"

#if !defined(RINGCOMM_ISA)
#define RINGCOMM_ISA baseline
#endif
#define RINGCOMM_TEXT_OF(x) #x
#define RINGCOMM_TEXT(x) RINGCOMM_TEXT_OF(x)

namespace ringcomm::cpu::RINGCOMM_ISA {
namespace {

// ---- copy ----------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
using Vector = __m512i;
inline Vector load_vector(const char* p) { return _mm512_loadu_si512(p); }
inline void stream_vector(char* p, Vector v) { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), v); }
#elif defined(__AVX2__)
using Vector = __m256i;
inline Vector load_vector(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void stream_vector(char* p, Vector v) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), v); }
#elif defined(__x86_64__)
using Vector = __m128i;
inline Vector load_vector(const char* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline void stream_vector(char* p, Vector v) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), v); }
#endif

#if defined(__x86_64__)
void copy_streaming(char* dst, const char* src, std::size_t nbytes) {
  constexpr std::size_t kLine = 64, kVectors = kLine / sizeof(Vector);
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(dst) % kLine) % kLine;
  if (nbytes < head + kLine) {
    std::memcpy(dst, src, nbytes);
    return;
  }
  std::memcpy(dst, src, head);
  std::size_t i = head;
  for (; i + kLine <= nbytes; i += kLine) {
    Vector v[kVectors];
    for (std::size_t k = 0; k < kVectors; ++k) v[k] = load_vector(src + i + k * sizeof(Vector));
    for (std::size_t k = 0; k < kVectors; ++k) stream_vector(dst + i + k * sizeof(Vector), v[k]);
  }
  std::memcpy(dst + i, src + i, nbytes - i);
}
#else
void copy_streaming(char* dst, const char* src, std::size_t nbytes) { std::memcpy(dst, src, nbytes); }
#endif

void copy(void* dst, const void* src, std::size_t nbytes, bool streaming) {
  if (dst == src || nbytes == 0) return;
  if (streaming)
    copy_streaming(static_cast<char*>(dst), static_cast<const char*>(src), nbytes);
  else
    std::memcpy(dst, src, nbytes);
}

// ---- blocks: every reduction runs in blocks that stay in the first-level cache --------------------------------------

constexpr std::size_t kBlock = 1024;  // elements

template <typename T>
using AccOf = typename Element<T>::Acc;

template <typename T>
void load_block(AccOf<T>* acc, const T* src, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) acc[i] = Element<T>::load(src[i]);
}
template <typename T>
void store_block(T* dst, const AccOf<T>* acc, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) dst[i] = Element<T>::store(acc[i]);
}

#if defined(__AVX512F__)
// Converts sixteen 16-bit floats at a time in registers.
inline __m512 load_wide(const Float16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m512 load_wide(const BFloat16* p) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
inline void store_wide(Float16* p, __m512 v) {
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m256i h = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_mask_mov_epi16(h, nan, _mm256_set1_epi16(0x7e00)));
}
inline void store_wide(BFloat16* p, __m512 v) {
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i u = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __m512i bits = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(bits));
}

template <>
void load_block<Float16>(float* acc, const Float16* src, std::size_t count) {
  std::size_t i = 0;
  for (; i + 16 <= count; i += 16) _mm512_storeu_ps(acc + i, load_wide(src + i));
  for (; i < count; ++i) acc[i] = widen(src[i]);
}
template <>
void store_block<Float16>(Float16* dst, const float* acc, std::size_t count) {
  std::size_t i = 0;
  for (; i + 16 <= count; i += 16) store_wide(dst + i, _mm512_loadu_ps(acc + i));
  for (; i < count; ++i) dst[i] = narrow(acc[i], static_cast<Float16*>(nullptr));
}
#elif defined(__F16C__)
template <>
void load_block<Float16>(float* acc, const Float16* src, std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(acc + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i))));
  for (; i < count; ++i) acc[i] = widen(src[i]);
}
template <>
void store_block<Float16>(Float16* dst, const float* acc, std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 v = _mm256_loadu_ps(acc + i);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m128i nan16 = _mm_packs_epi32(_mm256_castsi256_si128(nan), _mm256_extracti128_si256(nan, 1));
    const __m128i h = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), _mm_blendv_epi8(h, _mm_set1_epi16(0x7e00), nan16));
  }
  for (; i < count; ++i) dst[i] = narrow(acc[i], static_cast<Float16*>(nullptr));
}
#endif

template <typename T>
void load_leaf(AccOf<T>* acc, const ReduceArgs& args, int rank, std::size_t at, std::size_t count) {
  load_block(acc, static_cast<const T*>(args.sources[rank]) + at, count);
  if (args.op == ReduceOp::kPremulSum) {
    const double factor = args.factors[rank];
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) acc[i] = scale(acc[i], factor);
  }
}

template <typename T>
void finish_block(AccOf<T>* acc, const ReduceArgs& args, std::size_t count) {
  if (args.op != ReduceOp::kAvg) return;
  const int divisor = args.divisor;
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) acc[i] = divide(acc[i], divisor);
}

// The tree over any number of ranks, a block at a time. The right half of each node uses a block of its own, so at most
// log2(ranks)+1 blocks are live.
template <typename T, typename Combine>
void reduce_block_tree(AccOf<T>* acc, const ReduceArgs& args, int first, int ranks, std::size_t at, std::size_t count) {
  if (ranks == 1) {
    load_leaf<T>(acc, args, first, at, count);
    return;
  }
  alignas(64) AccOf<T> right[kBlock];
  const int left_ranks = tree_split(ranks);
  reduce_block_tree<T, Combine>(acc, args, first, left_ranks, at, count);
  reduce_block_tree<T, Combine>(right, args, first + left_ranks, ranks - left_ranks, at, count);
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) acc[i] = Combine::apply(acc[i], right[i]);
}

// The tree over N ranks in registers.
template <typename T, typename Combine, int N>
void reduce_block_fused(T* dst, const ReduceArgs& args, std::size_t at, std::size_t count) {
  const T* src[N];
  for (int k = 0; k < N; ++k) src[k] = static_cast<const T*>(args.sources[k]) + at;
  const auto combine = [](AccOf<T> a, AccOf<T> b) { return Combine::apply(a, b); };
  if (args.op == ReduceOp::kAvg) {
    const int divisor = args.divisor;
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i)
      dst[i] = Element<T>::store(
          divide(tree_reduce<N>(0, [&](int k) { return Element<T>::load(src[k][i]); }, combine), divisor));
  } else {
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i)
      dst[i] = Element<T>::store(tree_reduce<N>(0, [&](int k) { return Element<T>::load(src[k][i]); }, combine));
  }
}

#if defined(__AVX512F__)
template <typename T>
inline constexpr bool kWide = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;

// The sum over N ranks; returns the number of elements done, a multiple of 16.
template <typename T, int N>
std::size_t sum_block_wide(T* dst, const ReduceArgs& args, std::size_t at, std::size_t count) {
  const T* src[N];
  for (int k = 0; k < N; ++k) src[k] = static_cast<const T*>(args.sources[k]) + at;
  const bool avg = args.op == ReduceOp::kAvg;
  const __m512 divisor = _mm512_set1_ps(static_cast<float>(args.divisor));
  std::size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m512 sum = tree_reduce<N>(
        0, [&](int k) { return load_wide(src[k] + i); }, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
    store_wide(dst + i, avg ? _mm512_div_ps(sum, divisor) : sum);
  }
  return i;
}
#endif

// Fused trees over more ranks exist for sums only: for other operators they are not worth their code size.
template <typename T, typename Combine>
constexpr bool fuses(int ranks) {
  if (sizeof(T) == 1 || std::is_same_v<T, Float16>) return false;
  return ranks == 2 || (ranks == 4 && std::is_same_v<Combine, Sum> && !std::is_integral_v<T>);
}

template <typename T, typename Combine>
void reduce_block(T* dst, const ReduceArgs& args, std::size_t at, std::size_t count) {
#if defined(__AVX512F__)
  if constexpr (kWide<T> && std::is_same_v<Combine, Sum>) {
    const bool plain = args.op != ReduceOp::kPremulSum && (args.ranks == 2 || args.ranks == 4);
    const std::size_t done = !plain            ? 0
                             : args.ranks == 2 ? sum_block_wide<T, 2>(dst, args, at, count)
                                               : sum_block_wide<T, 4>(dst, args, at, count);
    if (done == count) return;
    dst += done, at += done, count -= done;
  }
#endif
  if (args.op != ReduceOp::kPremulSum) {
    if constexpr (fuses<T, Combine>(2))
      if (args.ranks == 2) return reduce_block_fused<T, Combine, 2>(dst, args, at, count);
    if constexpr (fuses<T, Combine>(4))
      if (args.ranks == 4) return reduce_block_fused<T, Combine, 4>(dst, args, at, count);
  }
  alignas(64) AccOf<T> acc[kBlock];
  reduce_block_tree<T, Combine>(acc, args, 0, args.ranks, at, count);
  finish_block<T>(acc, args, count);
  store_block(dst, acc, count);
}

template <typename T, typename Combine>
void reduce_typed(const ReduceArgs& args) {
  alignas(64) T scratch[kBlock];
  const bool direct = args.num_outputs == 1 && !args.streaming;
  // The first block ends at a cache line of the output, so that later blocks stream complete lines.
  const std::size_t misaligned = (reinterpret_cast<std::uintptr_t>(args.outputs[0]) % 64) / sizeof(T);
  std::size_t count = smaller(args.count, kBlock - misaligned);
  for (std::size_t at = 0; at < args.count; at += count, count = smaller(kBlock, args.count - at)) {
    T* const own = static_cast<T*>(args.outputs[0]) + at;
    reduce_block<T, Combine>(direct ? own : scratch, args, at, count);
    if (direct) continue;
    for (int k = 0; k < args.num_outputs; ++k)
      copy(static_cast<T*>(args.outputs[k]) + at, scratch, count * sizeof(T), args.streaming);
  }
}

void reduce(const ReduceArgs& args) {
  dispatch_reduce(args.dtype, args.op, [&](auto element, auto combine) {
    reduce_typed<typename decltype(element)::Type, decltype(combine)>(args);
  });
}

}  // namespace

// In norm_isa.cpp.
double abs_max(const void* data, std::size_t count, DType dtype);
void fold(const void* data, std::size_t count, DType dtype, int exponent, std::int64_t* limbs);

extern const Kernels kTable;
const Kernels kTable = {RINGCOMM_TEXT(RINGCOMM_ISA), reduce, copy, abs_max, fold};

}  // namespace ringcomm::cpu::RINGCOMM_ISA
