// Faults that tests plant into the emulated engine, at the places that name them, to check that the test suite finds
// them. tests/cpp/cuda/faults.h says what each does and which test finds it. In other builds RINGCOMM_FAULT is the
// constant kNone, and the compiler drops every switch.
#pragma once

namespace ringcomm::cuda {

#define RINGCOMM_FOR_EACH_FAULT(X) \
  X(kNone)                         \
  X(kFlagWithoutRelease)           \
  X(kFlagWithoutAcquire)           \
  X(kNoBarrierBeforePost)          \
  X(kPostBeforeAllHaveWorked)      \
  X(kNoBarrierAfterWait)           \
  X(kWrongBarrier)                 \
  X(kWrongChunk)                   \
  X(kNoWaitForCredit)              \
  X(kCreditOfOneMore)              \
  X(kCreditBeforeRead)             \
  X(kTicketsForgotten)             \
  X(kTailRoundedUp)                \
  X(kRankBarrierWaitsForNobody)    \
  X(kNoBarrierBeforeRankBarrier)   \
  X(kNoBarrierBeforeFinish)        \
  X(kSecondFlagOfLineIgnored)      \
  X(kFlagOfWideLineIgnored)        \
  X(kBoxesDoNotTakeTurns)          \
  X(kStagesDoNotTakeTurns)         \
  X(kShardsDoNotTakeTurns)         \
  X(kNoRankBarrierBeforeCopyOut)   \
  X(kSignaturesNotCompared)        \
  X(kMappingOutlivesMemory)        \
  X(kSourceReleasedUnread)         \
  X(kMissingRegionUnnoticed)       \
  X(kCopyBeforeReady)              \
  X(kGoOnBeforeDone)

enum class Fault {
#define X(name) name,
  RINGCOMM_FOR_EACH_FAULT(X)
#undef X
};

}  // namespace ringcomm::cuda

#if !defined(RINGCOMM_FAULT)
#define RINGCOMM_FAULT ::ringcomm::cuda::Fault::kNone
#endif
