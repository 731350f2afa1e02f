// The ranks of one process that share a device have one launch for each call, because blocks that wait for each other
// must all be in one launch: each rank posts its call, and the last one launches for all. The calls of the ranks are
// matched in order; a mismatch is found here, before anything is launched.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/engine.h"
#include "cuda/streams/events.h"
#include "cuda/streams/pending_call.h"
#include "cuda/streams/status.h"

namespace ringcomm::cuda {

class Context;

// The calls of a rank that one launch serves: a single call, or a list.
struct Batch {
  const Call* calls = nullptr;
  int num_calls = 0;
  cudaStream_t stream = nullptr;
  unsigned long long capture = 0;
  std::int64_t limit_ms = 0;
  StreamEventPtr ready;    // the point of `stream` at which the inputs are ready; null: its end at the launch
  std::vector<Call> kept;  // copies of the calls, if their caller does not wait

  const Call& first() const { return calls[0]; }
};

// One member of a launch.
struct LaunchMember {
  int rank;
  Context* context;
  const Batch* batch;
};

class LocalGroup {
 public:
  LocalGroup(AbortState& abort_state, std::vector<int> ranks);

  void join(Context& context);
  // Removes a rank that makes no more calls and has no open call.
  void leave(int rank);

  // Posts the next call of this rank. The thread of the last rank that posts it launches it. The ranks may share the
  // result.
  std::shared_ptr<PendingCall> post(Context& context, Batch batch);

  // Throws if ranks were found to differ in this rank's next call, or in a later one.
  void check_mismatch(int rank);
  // Fails the open calls, because the communicator has ended.
  void end_all();
  // The end of the last launch.
  StreamEventPtr last() const;

 private:
  class PendingLaunch;
  struct RankSlot {
    int rank;
    Context* context = nullptr;
    std::uint64_t calls = 0;
    Call last;  // without parts and addresses
    bool left = false;
  };

  RankSlot& slot_of(int rank);
  void check_mismatch(RankSlot& slot);
  void compare(const PendingLaunch& pending, const RankSlot& slot);
  void launch(PendingLaunch& pending, RankSlot& slot);
  void enqueue(PendingLaunch& pending, std::size_t lead);
  bool cancel(PendingLaunch& pending);
  std::string missing(const PendingLaunch& pending) const;
  void fail_open(std::exception_ptr error);

  AbortState& abort_state_;
  mutable std::mutex mutex_;
  std::vector<RankSlot> slots_;
  std::deque<std::shared_ptr<PendingLaunch>> open_;  // calls that some ranks have yet to make
  std::uint64_t first_open_ = 0;                     // number of the first of them
  std::exception_ptr mismatch_;                      // of call mismatch_number_
  std::uint64_t mismatch_number_ = 0;
  LatestEvents latest_;
};

}  // namespace ringcomm::cuda
