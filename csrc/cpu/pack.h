// The bucket loops: tensors into a bucket and back, with a cast and a factor.
#pragma once

#include "core/engine.h"

namespace ringcomm::cpu {

void pack(const Packing& packing);

}  // namespace ringcomm::cpu
