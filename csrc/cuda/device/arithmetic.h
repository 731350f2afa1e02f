// Which pairs of element type and combining step the kernels are compiled for, and how a pair is found at run time.
#pragma once

#include "core/dispatch.h"
#include "cuda/device/kernels.h"

namespace ringcomm::cuda {

// The bits of a sum or product do not depend on the sign of an integer type, those of an average do. Bitwise operators
// see bytes, whatever they belong to. A bool has three operators, which normalise it.
RINGCOMM_HD constexpr Arithmetic arithmetic_for(DType dtype, ReduceOp op) {
  const ReduceOp step = combine_of(op);
  if (dtype == DType::kBool) {
    const bool any = step == ReduceOp::kSum || step == ReduceOp::kMax;
    const bool all = step == ReduceOp::kProd || step == ReduceOp::kMin;
    return {dtype, any ? ReduceOp::kBor : all ? ReduceOp::kBand : step, 1};
  }
  if (is_bitwise(step)) return {DType::kUInt8, step, static_cast<int>(element_bytes(dtype))};
  const bool signless = step == ReduceOp::kProd || op == ReduceOp::kSum;
  return {dtype == DType::kUInt8 && signless ? DType::kInt8 : dtype, step, 1};
}

// Whether some call of this build ends up with exactly this pair.
constexpr bool is_compiled(DType dtype, ReduceOp step) {
#if defined(RINGCOMM_ONLY_DTYPE) && defined(RINGCOMM_ONLY_OP)
  const Arithmetic only = arithmetic_for(DType::RINGCOMM_ONLY_DTYPE, ReduceOp::RINGCOMM_ONLY_OP);
  return only.dtype == dtype && only.op == step;
#else
  for (int op = 0; op <= static_cast<int>(ReduceOp::kBxor); ++op) {
    const ReduceOp call = static_cast<ReduceOp>(op);
    const Arithmetic pair = arithmetic_for(dtype, call);
    if (supports(dtype, call) && pair.dtype == dtype && pair.op == step) return true;
  }
  return false;
#endif
}

template <typename T>
inline constexpr DType kDTypeOf = DType::kUInt8;
#define X(e, type, text) \
  template <>            \
  inline constexpr DType kDTypeOf<type> = DType::e;
RINGCOMM_FOR_EACH_DTYPE(X)
#undef X
template <typename T, ReduceOp kStep>
inline constexpr bool kIsCompiled = is_compiled(kDTypeOf<T>, kStep);

// The files of a kernel family share the work of compiling it: each has the pairs of one group.
enum class TypeGroup { kWideFloats, kNarrowFloats, kIntegers };
constexpr TypeGroup group_of(DType dtype) {
  if (!is_float(dtype)) return TypeGroup::kIntegers;
  return element_bytes(dtype) >= 4 ? TypeGroup::kWideFloats : TypeGroup::kNarrowFloats;
}

// pick(Element<T>, ReduceStep) for a compiled pair, else null.
template <typename Args, DType kDType, typename T, typename Pick>
Kernel<Args> kernel_of_type([[maybe_unused]] ReduceOp op, [[maybe_unused]] const Pick& pick) {
#define X(e)                                      \
  if constexpr (is_compiled(kDType, ReduceOp::e)) \
    if (op == ReduceOp::e) return pick(Element<T>{}, ReduceStep<ReduceOp::e>{});
  RINGCOMM_FOR_EACH_STEP(X)
#undef X
  return nullptr;
}
template <typename Args, TypeGroup kGroup, typename Pick>
Kernel<Args> kernel_of_group(DType dtype, ReduceOp op, const Pick& pick) {
#define X(e, type, text)                      \
  if constexpr (group_of(DType::e) == kGroup) \
    if (dtype == DType::e) return kernel_of_type<Args, DType::e, type>(op, pick);
  RINGCOMM_FOR_EACH_DTYPE(X)
#undef X
  return nullptr;
}
// Of a family that one file compiles.
template <typename Args, typename Pick>
Kernel<Args> kernel_of(DType dtype, ReduceOp op, const Pick& pick) {
  switch (group_of(dtype)) {
    case TypeGroup::kWideFloats:
      return kernel_of_group<Args, TypeGroup::kWideFloats>(dtype, op, pick);
    case TypeGroup::kNarrowFloats:
      return kernel_of_group<Args, TypeGroup::kNarrowFloats>(dtype, op, pick);
    case TypeGroup::kIntegers:
      return kernel_of_group<Args, TypeGroup::kIntegers>(dtype, op, pick);
  }
  return nullptr;
}

}  // namespace ringcomm::cuda
