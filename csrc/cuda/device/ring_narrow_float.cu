#include "cuda/device/ring_call.h"

namespace ringcomm::cuda {

Kernel<CallArgs> ring_narrow_float_kernel(DType dtype, ReduceOp op) {
  return ring_of_group<TypeGroup::kNarrowFloats>(dtype, op);
}

}  // namespace ringcomm::cuda
