#include "cuda/oneshot.h"

namespace ringcomm::cuda {

Kernel<CallArgs> oneshot_narrow_float_kernel(DType dtype, ReduceOp op) {
  return oneshot_of_group<TypeGroup::kNarrowFloats>(dtype, op);
}

}  // namespace ringcomm::cuda
