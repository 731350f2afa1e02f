#include "cuda/device/direct/kernel.h"

namespace ringcomm::cuda {

template Kernel<CallArgs> direct_of_group<TypeGroup::kIntegers>(DType dtype, ReduceOp op);

}  // namespace ringcomm::cuda
