// Runs a function when a scope, or a thread, ends.
#pragma once

#include <utility>

namespace ringcomm {

template <typename Act>
class ScopeExit {
 public:
  explicit ScopeExit(Act act) : act_(std::move(act)) {}
  ~ScopeExit() { act_(); }
  ScopeExit(const ScopeExit&) = delete;
  ScopeExit& operator=(const ScopeExit&) = delete;

 private:
  const Act act_;
};

}  // namespace ringcomm
