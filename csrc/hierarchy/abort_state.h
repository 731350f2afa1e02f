// The end of a communicator of several hosts, as known on one rank: that of the engine among the ranks of its host,
// which keeps the first reason.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "core/engine.h"

namespace ringcomm::hierarchy {

class AbortState {
 public:
  // `local`: the engine of this host; `who`: "rank 2 on host node1".
  AbortState(std::shared_ptr<Engine> local, std::string who) : local_(std::move(local)), who_(std::move(who)) {}

  const std::string& who() const { return who_; }
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
};

}  // namespace ringcomm::hierarchy
