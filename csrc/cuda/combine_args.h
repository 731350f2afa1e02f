// Arguments of the combine kernel: two messages into one.
#pragma once

#include <cstdint>

#include "core/types.h"

namespace ringcomm::cuda {

// Element i of output becomes first[i] combined with second[i]; the output may be one of the two.
struct CombineArgs {
  const char* first;
  const char* second;
  char* output;
  std::uint64_t count;   // elements of the kernel's type
  ReduceOp op;           // the caller's: kAvg divides the sum
  std::int32_t divisor;  // kAvg: what the sum is divided by
};

}  // namespace ringcomm::cuda
