// Compiled once per instruction set, each time in a namespace of that name (RINGCOMM_ISA).
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/norm.h"

#if !defined(RINGCOMM_ISA)
#define RINGCOMM_ISA baseline
#endif

namespace ringcomm::cpu::RINGCOMM_ISA {
namespace {

// ---- the largest magnitude ------------------------------------------------------------------------------------------
//
// Without the sign, the bits of floats are ordered like integers, and NaN is above infinity.

template <typename T>
using BitsOf =
    std::conditional_t<sizeof(T) == 2, std::uint16_t, std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>;

template <typename T>
double typed_abs_max(const void* data, std::size_t count) {
  using Bits = BitsOf<T>;
  constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;
  const T* const x = static_cast<const T*>(data);
  Bits largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const Bits bits = bits::cast<Bits>(x[i]) & kMagnitude;
    largest = bits > largest ? bits : largest;
  }
  return static_cast<double>(Element<T>::load(bits::cast<T>(largest)));
}

// ---- the sums -------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr std::size_t kLanes = 8;
#elif defined(__AVX2__)
constexpr std::size_t kLanes = 4;
#else
constexpr std::size_t kLanes = 2;
#endif
constexpr std::size_t kColumns = 4;              // accumulator vectors; several hide the latency of an addition
constexpr std::size_t kRow = kColumns * kLanes;  // elements
constexpr std::size_t kBlock = kRow * kFoldRun;  // elements that the accumulators take between flushes

typedef double Doubles __attribute__((vector_size(kLanes * sizeof(double))));

// Uses intrinsics because compilers widen a vector through memory.
inline Doubles load(const float* x) {
#if defined(__AVX512F__)
  return _mm512_cvtps_pd(_mm256_loadu_ps(x));
#elif defined(__AVX2__)
  return _mm256_cvtps_pd(_mm_loadu_ps(x));
#elif defined(__x86_64__)
  return _mm_cvtps_pd(_mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
#else
  return Doubles{x[0], x[1]};
#endif
}
inline Doubles load(const double* x) {
  Doubles doubles;
  __builtin_memcpy(&doubles, x, sizeof doubles);
  return doubles;
}

// x / 2^exponent as two factors, since a single one may be out of range. Only subnormal results are rounded, and these
// do not contribute to the sums.
struct Scale {
  double first, second;
  explicit Scale(int exponent) {
    const int half = exponent >> 1;
    first = std::ldexp(1.0, -half);
    second = std::ldexp(1.0, half - exponent);
  }
};

template <typename T>
Doubles load(const T* x, const Scale& scale) {
  if constexpr (std::is_same_v<T, double>)
    return load(x) * scale.first * scale.second;
  else
    return load(x) * (scale.first * scale.second);  // between 2^-128 and 2^149
}

// A number whose addition rounds a sum to multiples of 2^-bits.
constexpr double rounder(int bits) {
  double ulp = 1.5;
  for (int i = 52; i < bits; ++i) ulp /= 2;
  for (int i = bits; i < 52; ++i) ulp *= 2;
  return ulp;
}

// Adds an integer of at most 2^53.
void add(std::int64_t* limbs, int fold, double multiples) {
  const auto whole = static_cast<std::int64_t>(multiples);
  limbs[2 * fold] += whole >> kLimbBits;
  limbs[2 * fold + 1] += whole & ((std::int64_t{1} << kLimbBits) - 1);
}

void flush(const Doubles* columns, int fold, std::int64_t* limbs) {
  const double unit = std::ldexp(1.0, kFoldBits[fold]);
  for (std::size_t c = 0; c < kColumns; ++c)
    for (std::size_t l = 0; l < kLanes; ++l) add(limbs, fold, columns[c][l] * unit);
}

template <typename T>
void fold_rows(const T* x, std::size_t rows, const Scale& scale, std::int64_t* limbs) {
  constexpr double kFirst = rounder(kFoldBits[0]), kSecond = rounder(kFoldBits[1]);
  Doubles firsts[kColumns] = {}, seconds[kColumns] = {};
  for (std::size_t r = 0; r < rows; ++r, x += kRow) {
#pragma GCC unroll 4
    for (std::size_t c = 0; c < kColumns; ++c) {
      const Doubles scaled = load(x + c * kLanes, scale);
      const Doubles square = scaled * scaled;
      const Doubles first = (square + kFirst) - kFirst;
      firsts[c] += first;
      seconds[c] += ((square - first) + kSecond) - kSecond;
    }
  }
  flush(firsts, 0, limbs);
  flush(seconds, 1, limbs);
}

template <typename T>
void fold_block(const T* x, std::size_t count, const Scale& scale, std::int64_t* limbs) {
  const std::size_t whole = count / kRow, rest = count - whole * kRow;
  fold_rows(x, whole, scale, limbs);
  if (rest == 0) return;
  T padded[kRow] = {};
  std::memcpy(padded, x + whole * kRow, rest * sizeof(T));
  fold_rows(padded, 1, scale, limbs);
}

template <typename T>
void typed_fold(const void* data, std::size_t count, int exponent, std::int64_t* limbs) {
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const T* const x = static_cast<const T*>(data);
  const Scale scale(exponent);
  for (std::size_t at = 0; at < count; at += kBlock) {
    const std::size_t here = count - at < kBlock ? count - at : kBlock;
    if constexpr (std::is_same_v<T, Wide>) {
      fold_block(x + at, here, scale, limbs);
    } else {
      alignas(64) Wide wide[kBlock];
      for (std::size_t i = 0; i < here; ++i) wide[i] = Element<T>::load(x[at + i]);
      fold_block(wide, here, scale, limbs);
    }
  }
}

}  // namespace

// ---- dispatch -------------------------------------------------------------------------------------------------------

double abs_max(const void* data, std::size_t count, DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return typed_abs_max<double>(data, count);
    case DType::kFloat16:
      return typed_abs_max<Float16>(data, count);
    case DType::kBFloat16:
      return typed_abs_max<BFloat16>(data, count);
    default:
      return typed_abs_max<float>(data, count);
  }
}

void fold(const void* data, std::size_t count, DType dtype, int exponent, std::int64_t* limbs) {
  switch (dtype) {
    case DType::kFloat64:
      return typed_fold<double>(data, count, exponent, limbs);
    case DType::kFloat16:
      return typed_fold<Float16>(data, count, exponent, limbs);
    case DType::kBFloat16:
      return typed_fold<BFloat16>(data, count, exponent, limbs);
    default:
      return typed_fold<float>(data, count, exponent, limbs);
  }
}

}  // namespace ringcomm::cpu::RINGCOMM_ISA
