#include "cuda/kernels.h"

#include "cuda/arithmetic.h"

namespace ringcomm::cuda {

Arithmetic arithmetic_of(DType dtype, ReduceOp op) { return arithmetic_for(dtype, op); }

Kernel<CallArgs> direct_wide_float_kernel(DType dtype, ReduceOp op);
Kernel<CallArgs> direct_narrow_float_kernel(DType dtype, ReduceOp op);
Kernel<CallArgs> direct_integer_kernel(DType dtype, ReduceOp op);
// Compiled in three files, side by side.
Kernel<CallArgs> direct_kernel(DType dtype, ReduceOp op) {
  switch (group_of(dtype)) {
    case TypeGroup::kWideFloats:
      return direct_wide_float_kernel(dtype, op);
    case TypeGroup::kNarrowFloats:
      return direct_narrow_float_kernel(dtype, op);
    case TypeGroup::kIntegers:
      return direct_integer_kernel(dtype, op);
  }
  return nullptr;
}

}  // namespace ringcomm::cuda
