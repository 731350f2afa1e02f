// The request of an asynchronous call: it is done once the event recorded after the call is reached.
#pragma once

#include <memory>

#include "hierarchy/nccl/watcher.h"

namespace ringcomm::nccl {

// The state that the requests of a transport share with it, and which may outlive it.
struct TransportState {
  Place place;
  std::shared_ptr<StreamEvents> events;
  std::shared_ptr<AbortState> abort_state;
  std::shared_ptr<Watcher> watcher;

  // Records the present point of `stream`, which is not being captured. The device must be the current one.
  StreamEventPtr record(cudaStream_t stream) const { return events->record(stream, 0, place.rank); }
  // Makes work enqueued on `stream` from now on wait for `event`, if it is not null.
  void follow(cudaStream_t stream, const StreamEventPtr& event) const {
    StreamEvents::follow(stream, 0, event, place.rank);
  }
};

class TransportRequest final : public Request, public std::enable_shared_from_this<TransportRequest> {
 public:
  // `hurry` is called while a thread waits for a call that has not been enqueued yet.
  TransportRequest(std::shared_ptr<const TransportState> shared, Op op, int peer, std::function<void()> hurry = {})
      : shared_(std::move(shared)), op_(op), peer_(peer), hurry_(std::move(hurry)) {}

  bool done() const override;
  void wait(std::int64_t timeout_ms) override;
  void on_done(std::function<void(std::exception_ptr)> callback) override;
  int source() const override { return op_ == Op::kRecv ? peer_ : -1; }
  void join(std::uintptr_t stream) override;

  // The call has been enqueued, and `event` marks its end.
  void enqueued(StreamEventPtr event);

 private:
  StreamEventPtr event() const;
  // Whether the call is over, successfully or not.
  bool over() const;
  [[noreturn]] void raise() const;
  std::exception_ptr result() const;

  const std::shared_ptr<const TransportState> shared_;
  const Op op_;
  const int peer_;
  const std::function<void()> hurry_;
  mutable std::mutex mutex_;
  StreamEventPtr event_;
  mutable std::atomic<bool> ended_well_{false};  // set once; later failures are not those of this call
};

}  // namespace ringcomm::nccl
