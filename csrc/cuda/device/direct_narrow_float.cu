#include "cuda/device/direct.h"

namespace ringcomm::cuda {

Kernel<CallArgs> direct_narrow_float_kernel(DType dtype, ReduceOp op) {
  return direct_of_group<TypeGroup::kNarrowFloats>(dtype, op);
}

}  // namespace ringcomm::cuda
