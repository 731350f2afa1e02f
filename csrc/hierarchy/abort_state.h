// The end of a communicator of several hosts, as known on one rank.
#pragma once

#include <atomic>
#include <exception>
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
  void explain(Op op, const std::exception_ptr& error) const;

 private:
  const std::shared_ptr<Engine> local_;
  const std::string who_;
  std::atomic<bool> closing_{false};
  mutable std::mutex mutex_;
  std::string reason_;
  ErrorCode code_ = ErrorCode::kAborted;
};

}  // namespace ringcomm::hierarchy
