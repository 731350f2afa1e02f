// A call on the host. It is open until all ranks that share its launch, or both ends of a message, have called. Then it
// has been enqueued (its end is an event in a stream) or has failed. The ranks that it serves share it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>

#include "cuda/streams/events.h"

namespace ringcomm::cuda {

using Clock = std::chrono::steady_clock;
// How long a waiting thread sleeps before it looks at the AbortState again, in case nobody has notified it.
inline constexpr std::chrono::milliseconds kHeartbeat{20};
// Added to the time limit of an enqueued call, because its limit on the device begins when the stream reaches it.
inline constexpr std::chrono::seconds kGrace{10};

class PendingCall {
 public:
  virtual ~PendingCall() = default;
  PendingCall() = default;
  PendingCall(const PendingCall&) = delete;

  bool open() const { return state_.load(std::memory_order_acquire) == kOpen; }
  bool failed() const { return state_.load(std::memory_order_acquire) == kFailed; }
  // Valid once the call is enqueued.
  const StreamEventPtr& end_event() const { return end_event_; }
  // Whether its kernels wait for other ranks; the host page then says how the wait ended.
  bool waits_for_ranks() const { return waits_for_ranks_; }
  int source() const { return source_; }
  // Why the call has failed; null: the communicator has ended, and its AbortState says why.
  const std::exception_ptr& error() const { return error_; }

  // Returns false if the call is still open at `end`.
  bool await(Clock::time_point end) const;

  void enqueued(StreamEventPtr end, bool waits_for_ranks);
  void fail(std::exception_ptr error);

  void came_from(int rank) { source_ = rank; }

  // Makes an open call fail, so that no rank reads its arguments any more. Returns false if it was not open.
  virtual bool cancel() { return false; }
  // Names the ranks that have not made the call, and their calls: "ranks 1 and 2 to come to call #5, got ...".
  virtual std::string missing() const { return ""; }

 private:
  enum State { kOpen, kEnqueued, kFailed };
  void settle(State state);

  std::atomic<int> state_{kOpen};
  int source_ = -1;
  StreamEventPtr end_event_;
  bool waits_for_ranks_ = false;
  std::exception_ptr error_;
  mutable std::mutex mutex_;
  mutable std::condition_variable settled_;
};

}  // namespace ringcomm::cuda
