#include "cuda/oneshot.h"

namespace ringcomm::cuda {

Kernel<CallArgs> oneshot_integer_kernel(DType dtype, ReduceOp op) {
  return oneshot_of_group<TypeGroup::kIntegers>(dtype, op);
}

}  // namespace ringcomm::cuda
