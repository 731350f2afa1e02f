// Element types and reduction operators: their names, sizes and storage formats. All types round in the same way: to
// nearest, ties to even, NaN stays a quiet NaN. Values beyond the largest finite one become infinity; in float8_e4m3fn,
// which has no infinity, they become the largest value (as torch 2.13 converts).
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/macros.h"

namespace ringcomm {

RINGCOMM_HD constexpr std::size_t round_up(std::size_t n, std::size_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// X(enumerator, C++ type, public name). The element types that can be reduced.
#define RINGCOMM_FOR_EACH_DTYPE(X)                        \
  X(kFloat32, float, "float32")                           \
  X(kFloat64, double, "float64")                          \
  X(kFloat16, ::ringcomm::Float16, "float16")             \
  X(kBFloat16, ::ringcomm::BFloat16, "bfloat16")          \
  X(kFloat8E4M3, ::ringcomm::Float8E4M3, "float8_e4m3fn") \
  X(kFloat8E5M2, ::ringcomm::Float8E5M2, "float8_e5m2")   \
  X(kInt8, std::int8_t, "int8")                           \
  X(kInt16, std::int16_t, "int16")                        \
  X(kInt32, std::int32_t, "int32")                        \
  X(kInt64, std::int64_t, "int64")                        \
  X(kUInt8, std::uint8_t, "uint8")                        \
  X(kBool, ::ringcomm::Bool, "bool")

// X(enumerator, bytes, public name). The element types that are only moved: ranks compare them, kernels copy their
// bytes. (A sum of complex numbers is a sum of twice as many real ones.)
#define RINGCOMM_FOR_EACH_MOVED_DTYPE(X) \
  X(kUInt16, 2, "uint16")                \
  X(kUInt32, 4, "uint32")                \
  X(kUInt64, 8, "uint64")                \
  X(kComplex32, 4, "complex32")          \
  X(kComplex64, 8, "complex64")          \
  X(kComplex128, 16, "complex128")

// X(enumerator, public name). The only list of reduction operators.
#define RINGCOMM_FOR_EACH_REDUCE_OP(X) \
  X(kSum, "sum")                       \
  X(kAvg, "avg")                       \
  X(kProd, "prod")                     \
  X(kMin, "min")                       \
  X(kMax, "max")                       \
  X(kPremulSum, "premul_sum")          \
  X(kBand, "band")                     \
  X(kBor, "bor")                       \
  X(kBxor, "bxor")

enum class DType : std::uint8_t {
#define X(e, type, text) e,
  RINGCOMM_FOR_EACH_DTYPE(X) RINGCOMM_FOR_EACH_MOVED_DTYPE(X)
#undef X
};
enum class ReduceOp : std::uint8_t {
#define X(e, text) e,
  RINGCOMM_FOR_EACH_REDUCE_OP(X)
#undef X
};

// Loops over the types that can be reduced end at kBool, over all types at kComplex128, over the operators at kBxor.
#define X(...) +1
static_assert(static_cast<int>(DType::kBool) + 1 == 0 RINGCOMM_FOR_EACH_DTYPE(X),
              "kBool must be the last type that can be reduced");
static_assert(static_cast<int>(DType::kComplex128) == static_cast<int>(DType::kBool) RINGCOMM_FOR_EACH_MOVED_DTYPE(X),
              "kComplex128 must be the last type");
static_assert(static_cast<int>(ReduceOp::kBxor) + 1 == 0 RINGCOMM_FOR_EACH_REDUCE_OP(X),
              "kBxor must be the last operator");
#undef X

namespace bits {
template <typename To, typename From>
RINGCOMM_HD To cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace bits

// Storage types. `widen` is exact, `narrow` rounds once; every NaN narrows to the same NaN. A GPU has instructions for
// both directions of the 16-bit types, and from sm_89 on of float8_e4m3fn; they give the same bits for every number and
// infinity. (The instructions for float8_e5m2 turn infinity into the largest number, so they are not used.)
struct BFloat16 {
  std::uint16_t raw;
};
struct Float16 {
  std::uint16_t raw;
};
struct Float8E4M3 {
  std::uint8_t raw;
};
struct Float8E5M2 {
  std::uint8_t raw;
};
struct Bool {
  std::uint8_t raw;
};

RINGCOMM_HD float widen(BFloat16 x) { return bits::cast<float>(static_cast<std::uint32_t>(x.raw) << 16); }
RINGCOMM_HD BFloat16 narrow(float x, BFloat16*) {
#if defined(__CUDA_ARCH__)
  std::uint16_t raw;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(raw) : "f"(x));
  return {x != x ? std::uint16_t{0x7fc0} : raw};
#else
  const std::uint32_t u = bits::cast<std::uint32_t>(x);
  const std::uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const std::uint32_t quiet_nan = 0x7fc0u;
  return {static_cast<std::uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded)};
#endif
}

// Widens a small float with `kMantissa` stored bits below `kExponent` exponent bits: puts the bits into a float, and
// corrects the bias by one multiplication, which also normalises subnormals.
template <int kExponent, int kMantissa>
RINGCOMM_HD float widen_ieee(std::uint32_t raw) {
  constexpr int kBits = kExponent + kMantissa;
  constexpr std::uint32_t kBias = (1u << (kExponent - 1)) - 1;
  constexpr std::uint32_t kInfinity = ((1u << kExponent) - 1) << kMantissa;
  const std::uint32_t magnitude = raw & ((1u << kBits) - 1);
  const std::uint32_t sign = (raw >> kBits) << 31;
  const float scale = bits::cast<float>((254u - kBias) << 23);  // 2^(127 - bias)
  const float value = bits::cast<float>(magnitude << (23 - kMantissa)) * scale;
  const std::uint32_t finite = bits::cast<std::uint32_t>(value);
  const std::uint32_t special =
      0x7f800000u | (magnitude << (23 - kMantissa)) | (magnitude > kInfinity ? 0x400000u : 0u);
  return bits::cast<float>(sign | (magnitude >= kInfinity ? special : finite));
}
RINGCOMM_HD float widen(Float16 x) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.raw));
  return value;
#else
  return widen_ieee<5, 10>(x.raw);
#endif
}
RINGCOMM_HD float widen(Float8E5M2 x) { return widen_ieee<5, 2>(x.raw); }
RINGCOMM_HD float widen(Float8E4M3 x) {  // no infinity; only S.1111.111 is NaN
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint32_t halves;  // float16 represents every value
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<std::uint16_t>(x.raw)));
  return widen(Float16{static_cast<std::uint16_t>(halves)});
#else
  const std::uint32_t magnitude = x.raw & 0x7fu;
  const float value = bits::cast<float>(magnitude << 20) * bits::cast<float>((254u - 7u) << 23);
  const std::uint32_t finite = bits::cast<std::uint32_t>(value);
  return bits::cast<float>((static_cast<std::uint32_t>(x.raw >> 7) << 31) |
                           (magnitude == 0x7fu ? 0x7fc00000u : finite));
#endif
}

// Rounds |x| to `kMantissa` stored bits with smallest normal exponent `1 - kBias`. The result is the raw magnitude,
// which may exceed the largest exponent (the caller clamps it).
template <int kMantissa, int kBias>
RINGCOMM_HD std::uint32_t narrow_magnitude(std::uint32_t u) {
  constexpr int kShift = 23 - kMantissa;
  constexpr std::uint32_t kSmallestNormal = static_cast<std::uint32_t>(127 - kBias + 1) << 23;
  // Subnormals: adding this float moves the wanted bits to the bottom of the mantissa and rounds them to even.
  constexpr std::uint32_t kMagic = static_cast<std::uint32_t>(127 - kBias + 1 + kShift) << 23;
  const float aligned = bits::cast<float>(u) + bits::cast<float>(kMagic);
  const std::uint32_t subnormal = bits::cast<std::uint32_t>(aligned) - kMagic;
  const std::uint32_t rebias = static_cast<std::uint32_t>(127 - kBias) << 23;
  const std::uint32_t normal = (u - rebias + ((1u << (kShift - 1)) - 1) + ((u >> kShift) & 1u)) >> kShift;
  return u < kSmallestNormal ? subnormal : normal;
}
RINGCOMM_HD Float16 narrow(float x, Float16*) {
#if defined(__CUDA_ARCH__)
  std::uint16_t raw;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(raw) : "f"(x));
  return {x != x ? std::uint16_t{0x7e00} : raw};
#else
  const std::uint32_t all = bits::cast<std::uint32_t>(x), u = all & 0x7fffffffu;
  const std::uint32_t finite = narrow_magnitude<10, 15>(u);
  const std::uint32_t clamped = u >= 0x477ff000u ? 0x7c00u : finite;  // 65520 and above round to infinity
  const std::uint32_t magnitude = u > 0x7f800000u ? 0x7e00u : clamped;
  return {static_cast<std::uint16_t>((u > 0x7f800000u ? 0u : (all >> 16) & 0x8000u) | magnitude)};
#endif
}
RINGCOMM_HD Float8E5M2 narrow(float x, Float8E5M2*) {
  const std::uint32_t all = bits::cast<std::uint32_t>(x), u = all & 0x7fffffffu;
  const std::uint32_t finite = narrow_magnitude<2, 15>(u);
  const std::uint32_t clamped = u >= 0x47700000u ? 0x7cu : finite;  // 61440 and above round to infinity
  const std::uint32_t magnitude = u > 0x7f800000u ? 0x7fu : clamped;
  return {static_cast<std::uint8_t>((u > 0x7f800000u ? 0u : (all >> 24) & 0x80u) | magnitude)};
}
RINGCOMM_HD Float8E4M3 narrow(float x, Float8E4M3*) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint16_t both;  // satfinite: 448 is the largest value here too
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(0.0f), "f"(x));
  return {static_cast<std::uint8_t>(x != x ? 0x7fu : both)};
#else
  const std::uint32_t all = bits::cast<std::uint32_t>(x), u = all & 0x7fffffffu;
  const std::uint32_t finite = narrow_magnitude<3, 7>(u);
  const std::uint32_t clamped = u >= 0x43f00000u || finite > 0x7eu ? 0x7eu : finite;  // 448 is the largest value
  const bool nan = u > 0x7f800000u;
  return {static_cast<std::uint8_t>((nan ? 0u : (all >> 24) & 0x80u) | (nan ? 0x7fu : clamped))};
#endif
}

RINGCOMM_HD bool widen(Bool x) { return x.raw != 0; }
RINGCOMM_HD Bool narrow(bool x, Bool*) { return {static_cast<std::uint8_t>(x)}; }

// The type in which elements of T are accumulated, and the conversions to and from it. Functions that take a type as an
// argument take an Element of it.
template <typename T>
struct Element {
  using Type = T;
  using Acc = std::conditional_t<std::is_same_v<T, Bool>, bool, std::conditional_t<std::is_class_v<T>, float, T>>;
  RINGCOMM_HD static Acc load(T x) {
    if constexpr (std::is_same_v<T, Acc>)
      return x;
    else
      return widen(x);
  }
  RINGCOMM_HD static T store(Acc x) {
    if constexpr (std::is_same_v<T, Acc>)
      return x;
    else
      return narrow(x, static_cast<T*>(nullptr));
  }
};

RINGCOMM_HD constexpr std::size_t element_bytes(DType dtype) {
  switch (dtype) {
#define X(e, type, text) \
  case DType::e:         \
    return sizeof(type);
    RINGCOMM_FOR_EACH_DTYPE(X)
#undef X
#define X(e, bytes, text) \
  case DType::e:          \
    return bytes;
    RINGCOMM_FOR_EACH_MOVED_DTYPE(X)
#undef X
  }
  return 0;
}
inline const char* name(DType dtype) {
  switch (dtype) {
#define X(e, type, text) \
  case DType::e:         \
    return text;
    RINGCOMM_FOR_EACH_DTYPE(X)
    RINGCOMM_FOR_EACH_MOVED_DTYPE(X)
#undef X
  }
  return "?";
}
inline const char* name(ReduceOp op) {
  switch (op) {
#define X(e, text)  \
  case ReduceOp::e: \
    return text;
    RINGCOMM_FOR_EACH_REDUCE_OP(X)
#undef X
  }
  return "?";
}

RINGCOMM_HD constexpr bool is_only_moved(DType dtype) { return dtype > DType::kBool; }
RINGCOMM_HD constexpr bool is_float(DType dtype) { return dtype <= DType::kFloat8E5M2; }
RINGCOMM_HD constexpr bool is_bitwise(ReduceOp op) { return op >= ReduceOp::kBand; }

// Whether a type has an operator: bitwise ones need integers, averages need numbers, and premul_sum needs floats.
RINGCOMM_HD constexpr bool supports(DType dtype, ReduceOp op) {
  if (is_only_moved(dtype)) return false;
  if (is_float(dtype)) return !is_bitwise(op);
  if (dtype == DType::kBool) return op != ReduceOp::kAvg && op != ReduceOp::kPremulSum;
  return op != ReduceOp::kPremulSum;
}

}  // namespace ringcomm
