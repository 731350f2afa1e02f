// The end of a communicator of several hosts, as known on one rank.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "core/engine.h"

namespace ringcomm::hierarchy {

class AbortState {
 public:
  // `local`: the engine among the ranks of this host, which may also end by itself; `who`: "rank 2 on host node1".
  AbortState(std::shared_ptr<Engine> local, std::string who) : local_(std::move(local)), who_(std::move(who)) {}

  const std::string& who() const { return who_; }
  // Keeps the first reason.
  void record(const std::string& reason, ErrorCode code);
  bool ended() const;
  // Waits a moment for the reason of the rank of this host that aborted.
  std::string why() const;
  ErrorCode code() const;
  // Throws the reason if there is one.
  void check(Op op) const;
  // This rank closes the communicator; the errors that follow from that have no other reason, so nothing waits for one.
  void close() { closing_.store(true); }
  // Waits a moment for a reason: a rank that aborts sends its reason before its connections end, but it may arrive
  // later.
  void await() const;
  // Throws the reason instead of an error that may be its consequence.
  void explain(Op op, const Error& error) const;

 private:
  const std::shared_ptr<Engine> local_;
  const std::string who_;
  std::atomic<bool> closing_{false};
  mutable std::mutex mutex_;
  std::string reason_;
  ErrorCode code_ = ErrorCode::kAborted;
};

// A message of the user; its error gives the reason for which the communicator has ended.
class MessageRequest final : public Request {
 public:
  MessageRequest(std::shared_ptr<Request> message, std::shared_ptr<const AbortState> abort_state, Op op)
      : message_(std::move(message)), abort_state_(std::move(abort_state)), op_(op) {}

  bool done() const override { return message_->done(); }
  void wait(std::int64_t timeout_ms) override;
  void on_done(std::function<void(std::exception_ptr)> callback) override;
  int source() const override { return message_->source(); }

 private:
  const std::shared_ptr<Request> message_;
  const std::shared_ptr<const AbortState> abort_state_;
  const Op op_;
};

}  // namespace ringcomm::hierarchy
