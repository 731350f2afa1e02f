#include "cuda/device/ring_call.h"

namespace ringcomm::cuda {

Kernel<CallArgs> ring_wide_float_kernel(DType dtype, ReduceOp op) {
  return ring_of_group<TypeGroup::kWideFloats>(dtype, op);
}

}  // namespace ringcomm::cuda
