// What a rank computes by itself, on its own memory: no call of the communicator.
#pragma once

#include "cuda/context.h"

namespace ringcomm::cuda {

// Enqueued on the packing's or combining's stream. The arguments have been checked; the device is the current one.
void pack(const Packing& packing, const Context& context);
void combine(const Combining& combining, const Context& context);

}  // namespace ringcomm::cuda
