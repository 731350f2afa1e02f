// Faults that can be planted into the emulated engine, to see that the tests find them: RINGCOMM_FAULT=kWrongChunk in
// the environment plants that one (csrc/cuda/device/faults.h). Included before everything else in builds with the
// emulated engine, and only there.
//
// tests/test_native.py runs each in the build that finds it: by wrong values or a report of the emulator, by the order
// of accesses (ThreadSanitizer), by accesses outside of memory (AddressSanitizer).
//
//   name                         found by  test                    fault
//   kFlagWithoutRelease          order     cuda_back_to_back_test  a flag is stored without a release
//   kFlagWithoutAcquire          order     cuda_back_to_back_test  a flag is read without an acquire
//   kNoBarrierBeforePost         values    cuda_ring_test          no barrier between the data of a block and its flag
//   kPostBeforeAllHaveWorked     values    cuda_ring_test          the posting warp waits for one other warp alone
//   kNoBarrierAfterWait          values    cuda_ring_test          no barrier between a wait and the moving of data
//   kWrongBarrier                values    cuda_ring_test          the workers wait at the barrier of the block
//   kWrongChunk                  memory    cuda_ring_test          a chunk lands in the place of another
//   kNoWaitForCredit             values    cuda_ring_test          nobody waits for credit
//   kCreditOfOneMore             values    cuda_ring_test          credit is off by one slot
//   kCreditBeforeRead            values    cuda_ring_test          credit is given before the block has read
//   kTicketsForgotten            values    cuda_ring_test          the tickets of a link are forgotten between launches
//   kTailRoundedUp               memory    cuda_copy_test          the tail of a run is rounded up to 16 bytes
//   kRankBarrierWaitsForNobody   values    cuda_direct_test        the barrier of the ranks waits for nobody
//   kNoBarrierBeforeRankBarrier  values    cuda_direct_test        no barrier of the block before that of the ranks
//   kNoBarrierBeforeFinish       order     cuda_back_to_back_test  no barrier before the counters of a channel move on
//   kSecondFlagOfLineIgnored     values    cuda_oneshot_test       the second flag of an LL line is not looked at
//   kFlagOfWideLineIgnored       values    cuda_oneshot_test       the flag of an LL128 line is not looked at
//   kBoxesDoNotTakeTurns         values    cuda_back_to_back_test  the boxes for packets do not take turns
//   kStagesDoNotTakeTurns        values    cuda_direct_test        the staging regions do not take turns
//   kShardsDoNotTakeTurns        values    cuda_direct_test        the regions for reduced shards do not take turns
//   kNoRankBarrierBeforeCopyOut  values    cuda_direct_test        no barrier of the ranks before the copy out
//   kSignaturesNotCompared       values    cuda_ring_test          signatures are not compared
//   kMappingOutlivesMemory       values    cuda_buffers_test       a peer's mapping is used after the memory was freed
//   kSourceReleasedUnread        values    cuda_copy_test          the source of a long message is released unread
//   kMissingRegionUnnoticed      memory    cuda_direct_test        a region of a peer is used that is not mapped
//   kCopyBeforeReady             values    cuda_copy_engine_test   a stream copies before its peers' inputs are ready
//   kGoOnBeforeDone              values    cuda_copy_engine_test   a stream goes on before its peers have copied
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda/device/faults.h"

namespace ringcomm::test {

inline const cuda::Fault planted_fault = [] {
  const char* const wanted = std::getenv("RINGCOMM_FAULT");
  if (!wanted) return cuda::Fault::kNone;
#define X(name) \
  if (std::strcmp(wanted, #name) == 0) return cuda::Fault::name;
  RINGCOMM_FOR_EACH_FAULT(X)
#undef X
  std::fprintf(stderr, "RINGCOMM_FAULT expected a name of csrc/cuda/device/faults.h, got %s\n", wanted);
  std::abort();
}();

}  // namespace ringcomm::test

#undef RINGCOMM_FAULT
#define RINGCOMM_FAULT ::ringcomm::test::planted_fault
