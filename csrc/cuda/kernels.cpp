#include "cuda/kernels.h"

#include "cuda/arithmetic.h"

namespace ringcomm::cuda {

Arithmetic arithmetic_of(DType dtype, ReduceOp op) { return arithmetic_for(dtype, op); }

// A family is compiled in three files, side by side.
#define RINGCOMM_FAMILY(family)                                            \
  Kernel<CallArgs> family##_wide_float_kernel(DType dtype, ReduceOp op);   \
  Kernel<CallArgs> family##_narrow_float_kernel(DType dtype, ReduceOp op); \
  Kernel<CallArgs> family##_integer_kernel(DType dtype, ReduceOp op);      \
  Kernel<CallArgs> family##_kernel(DType dtype, ReduceOp op) {             \
    switch (group_of(dtype)) {                                             \
      case TypeGroup::kWideFloats:                                         \
        return family##_wide_float_kernel(dtype, op);                      \
      case TypeGroup::kNarrowFloats:                                       \
        return family##_narrow_float_kernel(dtype, op);                    \
      case TypeGroup::kIntegers:                                           \
        return family##_integer_kernel(dtype, op);                         \
    }                                                                      \
    return nullptr;                                                        \
  }
RINGCOMM_FAMILY(direct)
RINGCOMM_FAMILY(oneshot)

}  // namespace ringcomm::cuda
