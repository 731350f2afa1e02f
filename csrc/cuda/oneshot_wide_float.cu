#include "cuda/oneshot.h"

namespace ringcomm::cuda {

Kernel<CallArgs> oneshot_wide_float_kernel(DType dtype, ReduceOp op) {
  return oneshot_of_group<TypeGroup::kWideFloats>(dtype, op);
}

}  // namespace ringcomm::cuda
