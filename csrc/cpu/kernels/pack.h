// The loops between tensors and a bucket, with a cast and a factor.
#pragma once

#include "core/engine.h"

namespace ringcomm::cpu {

void pack(const PackCall& packing);

}  // namespace ringcomm::cpu
