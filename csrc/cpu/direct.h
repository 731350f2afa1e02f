// The algorithms that read and write the ranks' own buffers in place, where every rank can reach them: ranks that
// share an address space, and memory from allocate().
#pragma once

#include <cstdint>

#include "cpu/heap.h"
#include "cpu/stage.h"

namespace ringcomm::cpu {

// Announces this rank's buffers with ticket 0.
void announce_buffers(Stage& stage, const Heap& heap);

// Whether the call can be done in place: then it is, with tickets 0 and 1, and the result is true. The answer is the
// same on every rank. A rank whose own buffer is private knows the answer without waiting.
bool direct_collective(Stage& stage);

}  // namespace ringcomm::cpu
