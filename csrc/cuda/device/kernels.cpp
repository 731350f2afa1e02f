#include "cuda/device/kernels.h"

#include "cuda/device/arithmetic.h"

namespace ringcomm::cuda {

Arithmetic arithmetic_of(DType dtype, ReduceOp op) { return arithmetic_for(dtype, op); }

// A family that is compiled in three files, side by side.
#define RINGCOMM_FAMILY(family, Args)                                                                   \
  template <TypeGroup kGroup>                                                                           \
  Kernel<Args> family##_of_group(DType dtype, ReduceOp op);                                             \
  Kernel<Args> family##_kernel(DType dtype, ReduceOp op) {                                              \
    const TypeGroup group = group_of(dtype);                                                            \
    return group == TypeGroup::kWideFloats     ? family##_of_group<TypeGroup::kWideFloats>(dtype, op)   \
           : group == TypeGroup::kNarrowFloats ? family##_of_group<TypeGroup::kNarrowFloats>(dtype, op) \
                                               : family##_of_group<TypeGroup::kIntegers>(dtype, op);    \
  }
RINGCOMM_FAMILY(ring, CallArgs)
RINGCOMM_FAMILY(direct, CallArgs)
RINGCOMM_FAMILY(known, KnownArgs)
#undef RINGCOMM_FAMILY

}  // namespace ringcomm::cuda
