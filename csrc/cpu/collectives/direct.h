// The algorithms that read and write the ranks' own buffers in place. They need buffers that every rank can access:
// those of ranks that share an address space, and memory from allocate().
#pragma once

#include "cpu/collectives/slot_stream.h"
#include "cpu/group/heap.h"

namespace ringcomm::cpu {

// Publishes the locations of this rank's buffers with ticket 0.
void publish_buffers(SlotStream& slots, const Heap& heap);

// Whether every rank can access the buffers that the call needs, with the same answer on every rank. A rank whose own
// buffer is private returns false without waiting.
bool buffers_are_visible(SlotStream& slots);
// Runs the call in place, with tickets 0 and 1, if the direct algorithm can serve it.
void direct_collective(SlotStream& slots);

}  // namespace ringcomm::cpu
