// Runs a function when a scope, or a thread, ends.
#pragma once

#include <utility>

namespace ringcomm {

template <typename Act>
class OnExit {
 public:
  explicit OnExit(Act act) : act_(std::move(act)) {}
  ~OnExit() { act_(); }
  OnExit(const OnExit&) = delete;
  OnExit& operator=(const OnExit&) = delete;

 private:
  const Act act_;
};

}  // namespace ringcomm
