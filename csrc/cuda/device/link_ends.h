// The two ends of a link between blocks of two ranks (core/link.h). The board lies with the reader, `consumed` with the
// writer: each side stores to its peer's memory and polls its own.
//
// A flag is stored behind a fence, which waits until everything that the block has written has reached the peers. So
// that the block need not wait for the fence, its last warp only posts flags, and the other warps, the workers, move
// the data:
//
//   workers                                  the posting warp
//   two threads wait for slice t, credit
//   barrier of the workers
//   move the data of slice t                 fence, flags of slice t - 1
//   barrier of the block                     barrier of the block
//   two threads wait for slice t + 1 ...     fence, flags of slice t
//
// The workers' reads and writes come before the barrier of the block, and the barrier comes before the flag, because a
// release covers what its thread has observed of other threads. Workers wait at the barrier of the block rather than
// only arrive there: a worker that was one slice ahead could arrive twice where the barrier expects it once. So only
// the flags of one slice are in flight while the next slice is moved.
//
// A block of one warp has no warp to spare: its last thread posts.
#pragma once

#include "cuda/device/move.h"

namespace ringcomm::cuda {

class LinkEnds {
 public:
  RINGCOMM_DEVICE explicit LinkEnds(const Block& block)
      : block_(block),
        waits_for_slice_(block.thread() == 0),
        waits_for_credit_(block.thread() == (workers() > kWarp ? kWarp : 0)) {}

  // The threads that move data: the first ones of the block.
  RINGCOMM_DEVICE int workers() const { return block_.threads() > kWarp ? block_.threads() - kWarp : block_.threads(); }
  RINGCOMM_DEVICE bool works() const { return block_.thread() < workers(); }
  // Whether every wait so far has succeeded. After publish and release all threads agree on it.
  RINGCOMM_DEVICE bool going() const { return going_; }

  RINGCOMM_DEVICE void await_credit(const Flag* consumed, u64 ticket, u64 depth, int peer) {
    if (!waits_for_credit_ || !ok_) return;
    ok_ = RINGCOMM_FAULT == Fault::kNoWaitForCredit ||
          block_.wait(consumed, credit_needed(ticket, depth + (RINGCOMM_FAULT == Fault::kCreditOfOneMore)), peer,
                      WaitKind::kCredit);
  }
  // `first`: this is the first ticket of a call, whose header must carry this signature.
  RINGCOMM_DEVICE void await_slice(const Board& board, u64 ticket, int peer, WaitKind kind, const Signature& signature,
                                   bool first) {
    if (!waits_for_slice_ || !ok_) return;
    ok_ = block_.wait(&board.header(ticket)->flag, ticket + 1, peer, kind) &&
          (!first || block_.same(signature, load_one(&board.header(ticket)->signature), peer));
  }
  // Barrier of the workers. True: all waits succeeded, and this thread moves data now. Once it is false, nothing moves
  // any more.
  RINGCOMM_DEVICE bool ready() {
    settled_ = false;
    if (!works()) return false;
    if (!going_ || RINGCOMM_FAULT == Fault::kNoBarrierAfterWait) return going_;
    going_ = RINGCOMM_FAULT == Fault::kWrongBarrier ? agree_at<0>(workers(), ok_)
                                                    : agree_at<kWorkersBarrier>(workers(), ok_);
    return going_;
  }
  // The same for the whole block: the posting warp also learns whether the waits succeeded, and helps to move the data.
  RINGCOMM_DEVICE bool all_ready() {
    settled_ = false;
    going_ = going_ && block_.agree(ok_);
    return going_;
  }

  // Says that the slot of `ticket` is filled. Until then only thread 0 may write its header.
  RINGCOMM_DEVICE void publish(const Board& board, u64 ticket, const Signature& signature, bool first) {
    if (first && going_ && block_.thread() == 0) store_one(&board.header(ticket)->signature, signature);
    settle();
    if (going_ && posts()) post(&board.header(ticket)->flag, ticket + 1);
  }
  RINGCOMM_DEVICE void release(Flag* consumed, u64 ticket) {
    if (RINGCOMM_FAULT != Fault::kCreditBeforeRead) settle();
    if (going_ && posts()) post(consumed, ticket + 1);
  }

 private:
  RINGCOMM_DEVICE bool posts() const { return block_.thread() == block_.threads() - 1; }
  // All threads finish their reads and writes before a flag is posted, and all learn whether a wait gave up.
  RINGCOMM_DEVICE void settle() {
    if (settled_) return;
    settled_ = true;
    if (RINGCOMM_FAULT == Fault::kNoBarrierBeforePost) return;
    if (RINGCOMM_FAULT == Fault::kPostBeforeAllHaveWorked) {
      if (block_.thread() < kWarp || !works()) agree_at<2>(block_.threads() - workers() + kWarp, true);
      return;
    }
    going_ = block_.agree(going_);
  }

  const Block& block_;
  const bool waits_for_slice_, waits_for_credit_;
  bool ok_ = true;     // this thread's waits have succeeded
  bool going_ = true;  // all threads' waits have succeeded, as far as this thread knows
  bool settled_ = true;
};

}  // namespace ringcomm::cuda
