#include "cuda/device/ring/kernel.h"

namespace ringcomm::cuda {

template Kernel<CallArgs> ring_of_group<TypeGroup::kIntegers>(DType dtype, ReduceOp op);

}  // namespace ringcomm::cuda
