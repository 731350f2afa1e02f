// Operations of one rank on its own memory, which are no calls of the communicator.
#pragma once

#include "cuda/launch/context.h"

namespace ringcomm::cuda {

// Enqueued on the stream of `packing` or `combining`. The arguments have been checked; the device is the current one.
void pack(const PackCall& packing, const Context& context);
void combine(const CombineCall& combining, const Context& context);

}  // namespace ringcomm::cuda
