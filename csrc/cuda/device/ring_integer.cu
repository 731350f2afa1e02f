#include "cuda/device/ring_call.h"

namespace ringcomm::cuda {

Kernel<CallArgs> ring_integer_kernel(DType dtype, ReduceOp op) {
  return ring_of_group<TypeGroup::kIntegers>(dtype, op);
}

}  // namespace ringcomm::cuda
