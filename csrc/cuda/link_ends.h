// The two ends of a link between blocks of two ranks (core/link.h). The board lies with the reader, `consumed` with the
// writer: everybody stores to the peer and looks at his own memory.
//
// Both ends of a hop are waited for by two threads of different warps at once; what they found is known to the block
// after ready(). So do two threads post, each paying for one fence.
#pragma once

#include "cuda/move.h"

namespace ringcomm::cuda {

class LinkEnds {
 public:
  RINGCOMM_DEVICE explicit LinkEnds(const Block& block)
      : block_(block),
        waits_for_slice_(block.thread() == 0),
        waits_for_credit_(block.thread() == (block.threads() > kWarp ? kWarp : 0)) {}

  RINGCOMM_DEVICE bool going() const { return going_; }

  RINGCOMM_DEVICE void await_credit(const Flag* consumed, u64 ticket, u64 depth, int peer) {
    if (!waits_for_credit_ || !ok_) return;
    ok_ = RINGCOMM_FAULT == 5 ||
          block_.wait(consumed, credit_needed(ticket, depth + (RINGCOMM_FAULT == 8)), peer, WaitKind::kCredit);
  }
  // `first` ticket of a call: its header must carry this signature.
  RINGCOMM_DEVICE void await_slice(const Board& board, u64 ticket, int peer, WaitKind kind, const Signature& signature,
                                   bool first) {
    if (!waits_for_slice_ || !ok_) return;
    ok_ = block_.wait(&board.header(ticket)->flag, ticket + 1, peer, kind) &&
          (!first || block_.same(signature, load_one(&board.header(ticket)->signature), peer));
  }
  // The block comes together: whether everything awaited is there. After a no nothing moves any more.
  RINGCOMM_DEVICE bool ready() {
    if (RINGCOMM_FAULT != 3) going_ = going_ && block_.agree(ok_);
    settled_ = false;
    return going_;
  }

  RINGCOMM_DEVICE void publish(const Board& board, u64 ticket, const Signature& signature, bool first) {
    settle();
    if (!going_ || block_.thread() != block_.threads() - 1) return;
    if (first) store_one(&board.header(ticket)->signature, signature);
    post(&board.header(ticket)->flag, ticket + 1);
  }
  RINGCOMM_DEVICE void release(Flag* consumed, u64 ticket) {
    if (RINGCOMM_FAULT != 12) settle();
    if (going_ && block_.thread() == 0) post(consumed, ticket + 1);
  }

 private:
  // All threads have read and written what they had to, before somebody says so.
  RINGCOMM_DEVICE void settle() {
    if (settled_ || !going_) return;
    if (RINGCOMM_FAULT != 2) block_.sync();
    settled_ = true;
  }

  const Block& block_;
  const bool waits_for_slice_, waits_for_credit_;
  bool ok_ = true;     // what this thread waited for is there
  bool going_ = true;  // what anybody waited for was there; the same in all threads
  bool settled_ = true;
};

}  // namespace ringcomm::cuda
